//! [`SourceError`]: the errors of opening and reading a source.

use std::error::Error as StdError;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// The reason why a source cannot be opened, or a sample cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The index is not below the number of samples. The caller is at fault.
    #[error("cannot read sample {index} of {name:?}: it has {len} samples")]
    Index {
        /// The name of the data set.
        name: String,
        /// The index that was asked for, counted from 0.
        index: u64,
        /// The number of samples in the source.
        len: u64,
    },
    /// The values and the labels in memory do not belong together.
    #[error("cannot pair {values} values of {name:?} with {labels} labels")]
    Labels {
        /// The name of the data set.
        name: String,
        /// The number of values that were given.
        values: usize,
        /// The number of labels that were given.
        labels: usize,
    },
    /// The operating system cannot read the file.
    #[error("cannot read {}", file.display())]
    Read {
        /// The path of the file.
        file: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The file is packed with gzip, and its stream is damaged, cut, or has other bytes behind it.
    #[error(
        "cannot unpack {}: its gzip stream is {}",
        file.display(),
        match source.kind() {
            io::ErrorKind::UnexpectedEof => "cut, or has other bytes behind it",
            _ => "damaged, or has other bytes behind it",
        }
    )]
    Unpack {
        /// The path of the file.
        file: PathBuf,
        /// The error of the decompressor.
        source: io::Error,
    },
    /// The path is a directory, a pipe or a device.
    #[error("cannot read {}: it is {found}, expected a regular file", file.display())]
    NotRegular {
        /// The path that was opened.
        file: PathBuf,
        /// The kind of file that was found, as the rest of a sentence.
        found: &'static str,
    },
    /// The file is packed with gzip, and the feature `gz` is not compiled in.
    #[error("cannot read {}: it is packed with gzip, which needs the feature gz", file.display())]
    Packed {
        /// The path of the file.
        file: PathBuf,
    },
    /// A packed file unpacks to more bytes than may be kept in memory.
    #[error("cannot unpack {}: it has more than {bytes_max} bytes, the limit", file.display())]
    TooLong {
        /// The path of the file.
        file: PathBuf,
        /// The maximum size of the unpacked file, in bytes.
        bytes_max: u64,
    },
    /// The file is shorter or longer than expected. It is damaged, or changed while it was open.
    #[error(
        "cannot read {}: it has {found} byte{}, expected {expected}",
        file.display(),
        if *found == 1 { "" } else { "s" }
    )]
    Length {
        /// The path of the file.
        file: PathBuf,
        /// The length in bytes. A packed file is unpacked by at most one byte more than expected.
        found: u64,
        /// The expected length in bytes.
        expected: u64,
    },
    /// A number in the header of a file is impossible, or out of its limits.
    #[error("cannot read {}: {field} is {found}, expected {expected}", file.display())]
    Header {
        /// The path of the file.
        file: PathBuf,
        /// The meaning of the number, such as an extent.
        field: &'static str,
        /// The number in the header.
        found: u64,
        /// The possible numbers, in words.
        expected: String,
    },
    /// The first bytes are those of another format.
    #[error("cannot read {}: it is {found}, expected {expected}", file.display())]
    OtherFormat {
        /// The path of the file.
        file: PathBuf,
        /// The format that was found, as the rest of a sentence.
        found: String,
        /// The format that the source reads.
        expected: String,
    },
    /// The file that is given for the samples has labels, and the one for the labels has samples.
    #[error(
        "cannot pair {} with {}: the first has {found}, and the second {labels_found}; exchange \
         the paths",
        file.display(),
        labels_file.display()
    )]
    Exchanged {
        /// The path of the samples.
        file: PathBuf,
        /// The content of the first file, such as "60000 labels".
        found: String,
        /// The path of the labels.
        labels_file: PathBuf,
        /// The content of the second file, such as "60000 images of 28x28".
        labels_found: String,
    },
    /// The samples and the labels are one file.
    #[error(
        "cannot pair {} with {}: they are the same file, of {found}",
        file.display(),
        labels_file.display()
    )]
    SameFile {
        /// The path of the samples.
        file: PathBuf,
        /// The path of the labels.
        labels_file: PathBuf,
        /// The content of the file, such as "60000 labels".
        found: String,
    },
    /// Two files that belong together differ in their number of samples.
    #[error(
        "cannot pair {} with {}: {samples} samples and {labels} labels",
        file.display(),
        labels_file.display()
    )]
    Counts {
        /// The file of the samples.
        file: PathBuf,
        /// The number of samples in the first file.
        samples: u64,
        /// The file of the labels.
        labels_file: PathBuf,
        /// The number of labels in the second file.
        labels: u64,
    },
    /// A table has no column of this name, or the selection does not have it.
    #[error("cannot read {}: there is no column {column:?} among {columns}", file.display())]
    Column {
        /// The path of the file.
        file: PathBuf,
        /// The name that was asked for.
        column: String,
        /// The columns that there are: the first names, and the number of the others.
        columns: String,
    },
    /// Two columns of a table have one name.
    #[error(
        "cannot read {}: the column {column:?} is repeated, at positions {first} and {second}",
        file.display()
    )]
    RepeatedColumn {
        /// The path of the file.
        file: PathBuf,
        /// The name that several columns have.
        column: String,
        /// The position of the first column of this name, counted from 0.
        first: usize,
        /// The position of the second.
        second: usize,
    },
    /// The row with the names of the columns is malformed.
    #[error("cannot read {}: the header {problem}", file.display())]
    HeaderRow {
        /// The path of the file.
        file: PathBuf,
        /// The problem of the header, as the rest of a sentence.
        problem: String,
    },
    /// A row of a table is malformed.
    #[error("cannot read {}: row {row} {problem}", file.display())]
    Row {
        /// The path of the file.
        file: PathBuf,
        /// The number of the row, counted from 0 without the header: the index of the sample.
        row: u64,
        /// The problem of the row, as the rest of a sentence.
        problem: String,
    },
    /// A field of a table is not of the type that was asked for.
    #[error(
        "cannot read {}: row {row}, column {column:?} is {text:?}, expected {expected}",
        file.display()
    )]
    Field {
        /// The path of the file.
        file: PathBuf,
        /// The number of the row, counted from 0 without the header: the index of the sample.
        row: u64,
        /// The name of the column.
        column: String,
        /// The text of the field, cut after 64 characters.
        text: String,
        /// The name of the type that was asked for.
        expected: &'static str,
    },
    /// A table has more rows than can be indexed.
    #[error("cannot index {}: it has more than {rows_max} rows, the limit", file.display())]
    TooManyRows {
        /// The path of the file.
        file: PathBuf,
        /// The most rows of a file.
        rows_max: u64,
    },
    /// The error of a source of your own.
    #[error(transparent)]
    Other(Box<dyn StdError + Send + Sync>),
}

impl SourceError {
    /// Wraps the error of a source of your own.
    ///
    /// ```
    /// use pushpull_training::data::SourceError;
    ///
    /// let error = SourceError::other("the camera is unplugged");
    /// assert_eq!(error.to_string(), "the camera is unplugged");
    /// ```
    pub fn other(error: impl Into<Box<dyn StdError + Send + Sync>>) -> SourceError {
        SourceError::Other(error.into())
    }
}
