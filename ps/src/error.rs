//! Errors of starting and running a server, sorted by cause: the caller's configuration, or the
//! machine. Errors of peers are answered to them and are not reported here.

use std::io;
use std::path::PathBuf;

use pushpull_common::ids::TaskId;
use pushpull_optim::optimizer::Untrainable;
use thiserror::Error;

/// An error that prevents a server from listening.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is not `host:port`, `[v6]:port` or `unix:/path`.
    #[error("cannot listen on {address:?}: it is not host:port or unix:/path")]
    Address {
        /// The requested address.
        address: String,
    },
    /// Other machines can reach the address, and peers are not authenticated yet.
    #[error(
        "cannot listen on {address}: other machines can reach it and peers are not authenticated; \
         listen on loopback or a Unix socket, or opt in to insecure listening"
    )]
    Exposed {
        /// The requested address.
        address: String,
    },
    /// The address is in use.
    #[error("cannot listen on {address}: it is in use")]
    InUse {
        /// The requested address.
        address: String,
    },
    /// The operating system returned an error.
    #[error("cannot listen on {address}: {source}")]
    Io {
        /// The requested address.
        address: String,
        /// The error.
        source: io::Error,
    },
}

/// An error that prevents a server from starting.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The cluster does not contain the task.
    #[error("cannot start {task}: the cluster {cluster} has no such task")]
    UnknownTask {
        /// The configured task.
        task: TaskId,
        /// The cluster, in text form.
        cluster: String,
    },
    /// The task does not belong to the job `ps`.
    #[error("cannot start {task}: only tasks of the job ps hold variables")]
    NotPs {
        /// The configured task.
        task: TaskId,
    },
    /// A setting has an invalid value, by itself or in combination with others.
    #[error("cannot start with {setting} = {value}: {reason}")]
    Setting {
        /// The name of the setting.
        setting: &'static str,
        /// The value.
        value: String,
        /// The reason.
        reason: &'static str,
    },
    /// The memory or the state of a shard could not be set up.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A thread could not be created.
    #[error("cannot start the thread {thread}: {source}")]
    Thread {
        /// The name of the thread.
        thread: String,
        /// The error.
        source: io::Error,
    },
}

/// An error in setting up or opening the memory of a shard.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The configured memory limit is too small.
    #[error("cannot reserve {need} bytes: {limit} bytes of bytes_max are left")]
    DoesNotFit {
        /// The bytes needed.
        need: u64,
        /// The bytes left under the limit.
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
    /// [`crate::PsConfig::optimizer_for`] and [`crate::PsConfig::rate_for`].
    #[error("cannot train {variable:?} as configured: {reason}")]
    Untrainable {
        /// The variable, or the configured name that matches none.
        variable: String,
        /// The reason.
        reason: String,
    },
    /// The machine has been rebooted since the state was written. The files are not guaranteed to
    /// survive that without [`crate::Durability::Power`].
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
    /// The operating system returned an error.
    #[error("cannot {doing} {}: {source}", path.display())]
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

/// The error of a failed checkpoint save. Earlier checkpoints are unaffected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot save a checkpoint: {reason}")]
#[non_exhaustive]
pub struct SaveError {
    /// The reason.
    pub reason: String,
}

/// An error that ended a running server.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A thread of the server panicked. The panic was contained. State in memory is lost; a state
    /// directory keeps its last commit.
    #[error("cannot continue: the thread {thread} panicked: {panic}")]
    Panicked {
        /// The name of the thread.
        thread: String,
        /// The message of the panic.
        panic: String,
    },
    /// A thread of the server could not acquire a resource that it needs, such as file descriptors.
    #[error("cannot run the thread {thread}: {source}")]
    Thread {
        /// The name of the thread.
        thread: String,
        /// The error.
        source: io::Error,
    },
}
