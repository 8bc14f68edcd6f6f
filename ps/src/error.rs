//! What can go wrong while a server starts or runs, sorted by culprit: the caller's
//! configuration, or the machine. What peers do wrong is answered to them and never ends up here.

use std::io;
use std::path::PathBuf;

use pushpull_common::ids::TaskId;
use thiserror::Error;

/// Why a server could not listen.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is not `host:port`, `[v6]:port` or `unix:/path`.
    #[error("cannot listen on {address:?}: it is not host:port or unix:/path")]
    Address {
        /// The address asked for.
        address: String,
    },
    /// The address can be reached from other machines, and there is no authentication yet.
    #[error(
        "cannot listen on {address}: other machines can reach it and peers are not authenticated; \
         listen on loopback or a Unix socket, or say that insecure is meant"
    )]
    Exposed {
        /// The address asked for.
        address: String,
    },
    /// Something else listens there.
    #[error("cannot listen on {address}: it is in use")]
    InUse {
        /// The address asked for.
        address: String,
    },
    /// The operating system refused.
    #[error("cannot listen on {address}: {source}")]
    Io {
        /// The address asked for.
        address: String,
        /// What it said.
        source: io::Error,
    },
}

/// Why a server could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The cluster has no such task.
    #[error("cannot start {task}: the cluster {cluster} has no such task")]
    UnknownTask {
        /// The task the configuration names.
        task: TaskId,
        /// The cluster in its text form.
        cluster: String,
    },
    /// The task is not of the job `ps`.
    #[error("cannot start {task}: only tasks of the job ps hold variables")]
    NotPs {
        /// The task the configuration names.
        task: TaskId,
    },
    /// A setting has a value it cannot have.
    #[error("cannot start with {setting} = {value}: {reason}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        value: String,
        /// Why not.
        reason: &'static str,
    },
    /// The state directory could not be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A thread could not be started.
    #[error("cannot start the thread {thread}: {source}")]
    Thread {
        /// The thread's name.
        thread: String,
        /// What the operating system said.
        source: io::Error,
    },
}

/// Why the memory of a shard could not be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The configured cap is too small.
    #[error("cannot reserve {need} bytes: {limit} bytes of bytes_max are left")]
    DoesNotFit {
        /// Bytes needed.
        need: u64,
        /// Bytes left under the cap.
        limit: u64,
    },
    /// Another server uses the directory.
    #[error("cannot use the state directory {}: another server holds its lock", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// A file of the state is not what it must be. Nothing of it was used.
    #[error("cannot open {}: at byte {offset} there must be {expected}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What must be there.
        expected: String,
    },
    /// A file of the state is missing.
    #[error("cannot open {}: it is missing, though the state beside it needs it", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The state is that of a server that was configured otherwise.
    #[error(
        "cannot open {}: it is of a server whose {field} is {found:?}, and this one's is \
         {expected:?}",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: String,
        /// This server's value.
        expected: String,
        /// That server's value.
        found: String,
    },
    /// The variables of the state cannot be trained as this server is told: see
    /// [`crate::PsConfig::optimizer_for`] and [`crate::PsConfig::rate_for`].
    #[error("cannot train {variable:?} as configured: {reason}")]
    Untrainable {
        /// The variable, or the names that are for none.
        variable: String,
        /// Why not.
        reason: String,
    },
    /// The machine was started anew since: what the files hold was never promised to survive that.
    #[error(
        "cannot open {}: the machine was started anew since it was written, and the state may \
         be older than what was acknowledged; restore a checkpoint, or remove the directory",
        path.display()
    )]
    OtherBoot {
        /// The file.
        path: PathBuf,
    },
    /// A flush has failed since the machine was started. The system may count pages as written that
    /// are not on the disk, and would say so to whoever flushes them again.
    #[error(
        "cannot open {}: a flush has failed since the machine was started ({reason}), and what \
         the state holds may not be on the disk; put the state directory aside and restore a \
         checkpoint, or start the machine anew to go on from what is on the disk",
        path.display()
    )]
    Poisoned {
        /// The file.
        path: PathBuf,
        /// Why the flush failed.
        reason: String,
    },
    /// The directory belongs to somebody else or is open to others.
    #[error("cannot use the state directory {}: {reason}", path.display())]
    Unsafe {
        /// The directory.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// Why a checkpoint was not saved. Earlier ones are as they were.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot save a checkpoint: {reason}")]
#[non_exhaustive]
pub struct SaveError {
    /// Why not.
    pub reason: String,
}

/// Why a running server ended other than by being stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A thread of the server panicked. The panic was contained; the state is lost.
    #[error("cannot go on: the thread {thread} panicked: {panic}")]
    Panicked {
        /// The thread.
        thread: String,
        /// The panic's message.
        panic: String,
    },
    /// A thread of the server could not get what it needs to run, such as descriptors.
    #[error("cannot run the thread {thread}: {source}")]
    Thread {
        /// The thread.
        thread: String,
        /// What the operating system said.
        source: io::Error,
    },
}
