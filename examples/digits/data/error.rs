//! Why samples cannot be had.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a dataset cannot be loaded or drawn from. Offsets count the bytes of the unpacked file.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum DataError {
    /// Neither the plain file nor the compressed one is there.
    NotFound {
        /// Where it was looked for.
        directory: PathBuf,
        /// The name of the plain file.
        name: &'static str,
    },
    /// The system, or the decompressor, refused to hand out the next bytes.
    Read {
        /// The file.
        file: PathBuf,
        /// How far it was read.
        offset: u64,
        /// Its reason.
        source: io::Error,
    },
    /// The file is of another kind.
    Magic {
        /// The file; the magic number is at offset 0.
        file: PathBuf,
        /// What it begins with.
        found: u32,
        /// What it should begin with.
        expected: u32,
    },
    /// A number in the header is out of all proportion.
    Implausible {
        /// The file.
        file: PathBuf,
        /// Where the number lies.
        offset: u64,
        /// What it counts.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The greatest value allowed; the least is 1.
        max: u64,
    },
    /// The file ends too early.
    Truncated {
        /// The file.
        file: PathBuf,
        /// Where it ends.
        offset: u64,
        /// Where its header says that it ends.
        expected: u64,
    },
    /// The file goes on where it should end.
    TrailingBytes {
        /// The file.
        file: PathBuf,
        /// Where its header says that it ends.
        offset: u64,
    },
    /// A label is no class.
    LabelOutOfRange {
        /// The file.
        file: PathBuf,
        /// Where the label lies.
        offset: u64,
        /// The label.
        found: u8,
        /// How many classes there are.
        classes: usize,
    },
    /// There is not one label for each image.
    CountMismatch {
        /// The file of images; its count is at offset 4.
        images: PathBuf,
        /// How many images it holds.
        image_count: usize,
        /// The file of labels; its count is at offset 4.
        labels: PathBuf,
        /// How many labels it holds.
        label_count: usize,
    },
    /// The images to train on and those to test on are of different sizes.
    WidthMismatch {
        /// Where the files are.
        directory: PathBuf,
        /// Pixels in an image to train on.
        train: usize,
        /// Pixels in an image to test on.
        test: usize,
    },
    /// A worker has nothing to draw from, or draws nothing.
    EmptyShare {
        /// The worker's index.
        worker: usize,
        /// How many workers share the rows.
        workers: usize,
        /// The rows they share.
        rows: usize,
        /// Rows in a batch.
        batch_rows: usize,
    },
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataError::NotFound { directory, name } => {
                write!(f, "cannot find {name} or {name}.gz in {}", directory.display())
            }
            DataError::Read { file, offset, source } => {
                write!(f, "cannot read {} at offset {offset}: {source}", file.display())
            }
            DataError::Magic { file, found, expected } => write!(
                f,
                "cannot load {}: it begins with {found:#010x} at offset 0, expected {expected:#010x}",
                file.display()
            ),
            DataError::Implausible { file, offset, field, found, max } => write!(
                f,
                "cannot load {}: the number of {field} at offset {offset} is {found}, expected 1 \
                 to {max}",
                file.display()
            ),
            DataError::Truncated { file, offset, expected } => write!(
                f,
                "cannot load {}: it ends at offset {offset}, expected {expected} bytes",
                file.display()
            ),
            DataError::TrailingBytes { file, offset } => write!(
                f,
                "cannot load {}: it goes on at offset {offset}, expected its end there",
                file.display()
            ),
            DataError::LabelOutOfRange { file, offset, found, classes } => write!(
                f,
                "cannot load {}: the label at offset {offset} is {found}, expected less than \
                 {classes}",
                file.display()
            ),
            DataError::CountMismatch { images, image_count, labels, label_count } => write!(
                f,
                "cannot pair {} with {}: {image_count} images and {label_count} labels at offset \
                 4, expected equal counts",
                images.display(),
                labels.display()
            ),
            DataError::WidthMismatch { directory, train, test } => write!(
                f,
                "cannot use {}: images to train on have {train} pixels and images to test on \
                 {test}, expected equal sizes",
                directory.display()
            ),
            DataError::EmptyShare { worker, workers, rows, batch_rows } => write!(
                f,
                "cannot draw batches of {batch_rows} rows for worker {worker} of {workers} out of \
                 {rows} rows: expected at least one row for each worker and in each batch"
            ),
        }
    }
}

impl Error for DataError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            DataError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}
