//! Errors in setting up or opening the memory of a shard.

use std::io;
use std::path::PathBuf;

use pushpull_optim::optimizer::Untrainable;
use thiserror::Error;

/// An error in setting up or opening the memory of a shard.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The configured memory limit is too small.
    #[error("cannot reserve {need} bytes: {limit} bytes of bytes_max are left for it")]
    DoesNotFit {
        /// The bytes needed.
        need: u64,
        /// The bytes left under the limit, without those that are kept for others.
        limit: u64,
    },
    /// The variables of a shard need more memory than the limit leaves.
    #[error("cannot reserve {need} bytes, {limit} are left: {made_of}")]
    ModelDoesNotFit {
        /// The bytes needed.
        need: u64,
        /// The bytes left under the limit.
        limit: u64,
        /// The use of the bytes, and the setting that allows more.
        made_of: String,
    },
    /// The file system of the state directory is too small, even if it held nothing else.
    #[error(
        "cannot reserve {need} bytes in {}: its file system has {limit} for them at most; put the \
         state directory on a larger one",
        path.display()
    )]
    DirectoryTooSmall {
        /// The directory.
        path: PathBuf,
        /// The bytes of the file that does not fit.
        need: u64,
        /// The bytes that the file system has beside the other files of the state.
        limit: u64,
    },
    /// Another server holds the lock of the directory.
    #[error("cannot use the state directory {}: another server holds its lock", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// A file of the state is damaged. None of it was used.
    #[error("cannot open {}: at byte {offset} there must be {expected}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The byte offset.
        offset: u64,
        /// The expected contents.
        expected: String,
    },
    /// The state was written in another format, by an older or a newer server. It is intact.
    #[error(
        "cannot open {}: it was written in format {found}, and this server reads format {format}: \
         {}",
        path.display(),
        format_advice(*found, *format)
    )]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// The format of the file.
        found: u32,
        /// The format of this server.
        format: u32,
    },
    /// A file that other files of the state refer to is missing.
    #[error("cannot open {}: it is missing, though the state beside it needs it", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The state belongs to a server with a different configuration.
    #[error(
        "cannot open {}: it was written by a server whose {field} is {found:?}, and this \
         one's is {expected:?}",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The setting that differs.
        field: String,
        /// The value of this server.
        expected: String,
        /// The value in the state.
        found: String,
    },
    /// The variables of the state cannot be trained with the configured optimizers. See
    /// `PsConfig::optimizer_for` and `PsConfig::rate_for`.
    #[error("cannot train {variable:?} as configured: {reason}")]
    Untrainable {
        /// The variable, or the configured name that matches none.
        variable: String,
        /// The reason.
        reason: String,
    },
    /// The machine has been rebooted since the state was written. The files are not guaranteed to
    /// survive that without `Durability::Power`.
    #[error(
        "cannot open {}: the machine was rebooted since it was written, and the state may \
         be older than what was acknowledged; restore a checkpoint, or remove the directory",
        path.display()
    )]
    OtherBoot {
        /// The file.
        path: PathBuf,
    },
    /// A flush has failed since the machine was booted. The kernel may treat pages as written that
    /// are not on disk, and would report success to the next flush.
    #[error(
        "cannot open {}: a flush has failed since the machine was booted ({reason}), and the state \
         may not be on disk; put the state directory aside and restore a checkpoint, or reboot \
         the machine to continue from the state on disk",
        path.display()
    )]
    Poisoned {
        /// The file.
        path: PathBuf,
        /// The cause of the failed flush.
        reason: String,
    },
    /// The directory or file belongs to another user or is accessible to others.
    #[error("cannot use the state directory {}: {reason}", path.display())]
    Unsafe {
        /// The directory or file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The inspected path is neither a state directory nor the folder of a shard.
    #[error(
        "cannot inspect {}: it holds neither folders shard-0, shard-1 ... nor a control file",
        path.display()
    )]
    NoState {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system returned an error.
    #[error("cannot {doing} {}", path.display())]
    Io {
        /// The operation, as a verb phrase.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

impl From<Untrainable> for StorageError {
    fn from(Untrainable { variable, reason }: Untrainable) -> StorageError {
        StorageError::Untrainable { variable, reason }
    }
}

/// Returns what to do with a state of another format.
fn format_advice(found: u32, format: u32) -> &'static str {
    match found < format {
        true => {
            "start the server that wrote it, end it with a checkpoint, and remove the directory; \
             this server then restores the checkpoint"
        }
        false => {
            "start the newer server that wrote it, or remove the directory and restore a checkpoint"
        }
    }
}
