//! Errors of starting and running a server, sorted by cause: the caller's configuration, or the
//! machine. Errors of peers are answered to them and are not reported here.

use std::io;

use pushpull_checkpoint::StorageFault;
use pushpull_common::cluster::ClusterError;
use pushpull_common::ids::TaskId;
pub use pushpull_net::ListenError;
pub use pushpull_store::StorageError;
use thiserror::Error;

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
    /// The task does not belong to the job that holds the variables.
    #[error("cannot start {task}: only tasks of the job {job} hold variables")]
    NotPs {
        /// The configured task.
        task: TaskId,
        /// The job that holds the variables.
        job: String,
    },
    /// No job of the cluster holds variables, or several could.
    #[error("cannot start {task}")]
    NoVariablesJob {
        /// The configured task.
        task: TaskId,
        /// The cause.
        source: ClusterError,
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
    /// Another cluster saves its checkpoints in the same storage. Each would delete those of the
    /// other as older ones of its own.
    #[error("cannot start {task}")]
    CheckpointsInUse {
        /// The configured task.
        task: TaskId,
        /// The storage.
        source: StorageFault,
    },
    /// A thread could not be created.
    #[error("cannot start the thread {thread}")]
    Thread {
        /// The name of the thread.
        thread: String,
        /// The error.
        source: io::Error,
    },
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
    /// The server belongs to another process, which has forked this one. It continues there.
    #[error("cannot serve in a child of fork: the server runs in process {parent}")]
    Forked {
        /// The process of the server.
        parent: u32,
    },
    /// A thread of the server could not acquire a resource that it needs, such as file descriptors.
    #[error("cannot run the thread {thread}")]
    Thread {
        /// The name of the thread.
        thread: String,
        /// The error.
        source: io::Error,
    },
}
