//! Errors of loading a dataset and drawing from it.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// An error of loading a dataset or drawing from it. Offsets count bytes of the unpacked file.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum DataError {
    /// Neither the plain nor the compressed file exists.
    NotFound {
        /// The directory that was searched.
        directory: PathBuf,
        /// The name of the plain file.
        name: &'static str,
    },
    /// A read or the decompression failed.
    Read {
        /// The file.
        file: PathBuf,
        /// Number of bytes read before.
        offset: u64,
        /// The cause.
        source: io::Error,
    },
    /// The file has the wrong magic number.
    Magic {
        /// The file; the magic number is at offset 0.
        file: PathBuf,
        /// The magic number found.
        found: u32,
        /// The expected magic number.
        expected: u32,
    },
    /// A number in the header is out of bounds.
    Implausible {
        /// The file.
        file: PathBuf,
        /// Offset of the number.
        offset: u64,
        /// What the number counts.
        field: &'static str,
        /// The number.
        found: u64,
        /// The maximum; the minimum is 1.
        max: u64,
    },
    /// The file ends too early.
    Truncated {
        /// The file.
        file: PathBuf,
        /// Offset of the end of the file.
        offset: u64,
        /// Offset of the end by the header.
        expected: u64,
    },
    /// The file continues after its expected end.
    TrailingBytes {
        /// The file.
        file: PathBuf,
        /// Offset of the end by the header.
        offset: u64,
    },
    /// A label is not below the number of classes.
    LabelOutOfRange {
        /// The file.
        file: PathBuf,
        /// Offset of the label.
        offset: u64,
        /// The label.
        found: u8,
        /// Number of classes.
        classes: usize,
    },
    /// The numbers of images and labels differ.
    CountMismatch {
        /// The file of images; its count is at offset 4.
        images: PathBuf,
        /// Number of images.
        image_count: usize,
        /// The file of labels; its count is at offset 4.
        labels: PathBuf,
        /// Number of labels.
        label_count: usize,
    },
    /// Training and test images have different sizes.
    WidthMismatch {
        /// The directory of the files.
        directory: PathBuf,
        /// Number of pixels in a training image.
        train: usize,
        /// Number of pixels in a test image.
        test: usize,
    },
    /// A worker's share or a batch would be empty.
    EmptyShare {
        /// Index of the worker.
        worker: usize,
        /// Number of workers that share the rows.
        workers: usize,
        /// Number of rows.
        rows: usize,
        /// Number of rows in a batch.
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
                "cannot load {}: it continues at offset {offset}, expected its end there",
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
