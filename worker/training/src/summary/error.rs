//! [`SummaryError`]: the reasons why a summary cannot be written.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::tfrecord::TfRecordError;

/// The reason why a summary cannot be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SummaryError {
    /// The directory does not exist and cannot be created, or cannot be listed.
    #[error("cannot write summaries in {path}")]
    Directory {
        /// The path of the run's directory.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// A file cannot be created in the directory.
    #[error("cannot create {path}")]
    Create {
        /// The path of the event file.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// The event file cannot be written.
    #[error(transparent)]
    Events(#[from] TfRecordError),
    /// The file of JSON lines cannot be written. Its buffered lines remain in the buffer.
    #[error("cannot write lines to {path}")]
    JsonLines {
        /// The path of the event file.
        path: PathBuf,
        /// The I/O error that was the cause.
        source: io::Error,
    },
    /// A tag is empty or too long.
    #[error("cannot write a summary with a tag of {bytes} bytes: it must have 1 to {bytes_max}")]
    Tag {
        /// The length of the tag in bytes.
        bytes: usize,
        /// The most bytes of a tag.
        bytes_max: usize,
    },
    /// The step is above the range of the format.
    #[error("cannot write a summary of step {step}: at most 2^63 - 1 is possible")]
    Step {
        /// The step of the summary.
        step: u64,
    },
    /// The summary is too large for TensorBoard's reader.
    #[error("cannot write the summary {tag:?} of {bytes} bytes: at most {bytes_max} are possible")]
    TooLarge {
        /// The tag of the summary.
        tag: String,
        /// The size in bytes of the value that it shows.
        bytes: usize,
        /// The most bytes of a value.
        bytes_max: usize,
    },
    /// A hyperparameter is not finite.
    #[error("cannot write the hyperparameter {name:?}: {value} is not finite")]
    Hyperparameter {
        /// The name of the hyperparameter.
        name: String,
        /// The value that is not finite.
        value: f64,
    },
    /// A hyperparameter has an empty name.
    #[error("cannot write a hyperparameter without a name")]
    NoHyperparameterName,
}
