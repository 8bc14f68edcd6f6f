//! [`SplitError`]: why the samples cannot be loaded.

use std::path::PathBuf;

use pushpull::error::{DataError, SourceError, StreamError};
use thiserror::Error;

/// The reason why the samples cannot be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum SplitError {
    /// Neither the plain nor the packed file exists.
    #[error("cannot find {name} or {name}.gz in {}", directory.display())]
    NotFound {
        /// The directory that was searched.
        directory: PathBuf,
        /// The name of the plain file.
        name: String,
    },
    /// Training and test images have different sizes.
    #[error(
        "cannot use {}: images to train on have {train} pixels and images to test on {test}, \
         expected equal sizes",
        directory.display()
    )]
    Width {
        /// The directory of the files.
        directory: PathBuf,
        /// Number of pixels in a training image.
        train: usize,
        /// Number of pixels in a test image.
        test: usize,
    },
    /// A label is not below the number of classes.
    #[error("the label is {found}, expected less than {classes}")]
    Label {
        /// The label.
        found: u32,
        /// Number of classes.
        classes: usize,
    },
    /// A record of a stream has another length than a sample.
    #[error("the record has {found} bytes, expected {expected}: a label and pixels")]
    Record {
        /// The length of the record.
        found: usize,
        /// The length of a sample.
        expected: usize,
    },
    /// A stream cannot be opened, read or used.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A file cannot be opened or read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The URL of the files cannot be used.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Url(#[from] pushpull::remote::RemoteError),
    /// The storage of the files fails.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Storage(#[from] pushpull::checkpoint::StorageFault),
    /// A sample cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
}
