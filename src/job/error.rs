//! [`JobError`]: the reason why a job file or a setting cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A job file that cannot be read, or a setting with an invalid value.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JobError {
    /// The file cannot be opened or read.
    #[error("cannot read the job file {}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is larger than a job file may be.
    #[error(
        "cannot read the job file {}: it has {found} bytes, more than {limit}",
        file.display()
    )]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// The bytes of the file.
        found: u64,
        /// The maximum.
        limit: u64,
    },
    /// The file is no TOML.
    #[error("{at}: {reason}")]
    Syntax {
        /// The file with the line, such as `job.toml:3`.
        at: String,
        /// The fault.
        reason: String,
    },
    /// A table or a key has no meaning.
    #[error("{at}: unknown {what} {name:?}: {advice}")]
    Unknown {
        /// The file with the line.
        at: String,
        /// `table` or `key`.
        what: &'static str,
        /// The name that is unknown.
        name: String,
        /// The nearest name that is known, or all of them.
        advice: String,
    },
    /// A value is invalid, or contradicts another.
    #[error("{culprit}: {reason}")]
    Setting {
        /// The flag with its value, or the key with its line and its value.
        culprit: String,
        /// The fault.
        reason: String,
    },
    /// The job has no addresses, so its cluster is not known before its tasks are started.
    #[error("cannot name the cluster of the job: the table cluster has none of ps_hosts and spec")]
    NoCluster,
}
