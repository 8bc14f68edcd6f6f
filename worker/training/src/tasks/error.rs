//! How tasks fail and stop.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

/// How a task failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TaskFailure<E> {
    /// It returned an error.
    #[error("task {task:?} failed: {error}")]
    Error {
        /// Name of the task.
        task: String,
        /// What it returned.
        error: E,
    },
    /// It panicked.
    #[error("task {task:?} panicked: {text}")]
    Panic {
        /// Name of the task.
        task: String,
        /// The text of the panic.
        text: String,
    },
}

impl<E> TaskFailure<E> {
    /// Returns the name of the task.
    pub fn task(&self) -> &str {
        match self {
            TaskFailure::Error { task, .. } | TaskFailure::Panic { task, .. } => task,
        }
    }
}

/// Why tasks are to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopCause {
    /// A clean stop was requested, with this reason.
    Requested(String),
    /// The task with this name has failed.
    Failed(String),
}

/// Why [`super::Tasks::join`] is no success.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TasksError<E> {
    /// A task has failed.
    #[error("cannot finish the tasks: {failure}{}", running(stragglers))]
    Failed {
        /// The first failure.
        failure: Arc<TaskFailure<E>>,
        /// Names of the tasks that still ran after the grace time.
        stragglers: Vec<String>,
    },
    /// Tasks have ignored the stop for the whole grace time.
    #[error("cannot finish the tasks: after {grace:?} still running are {stragglers:?}")]
    Stragglers {
        /// Names of the tasks, in the order of their start.
        stragglers: Vec<String>,
        /// How long they were given.
        grace: Duration,
    },
}

/// Why a task cannot be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The name is empty, or contains a zero byte.
    #[error("cannot start a task: {name:?} is no name")]
    Name {
        /// The name.
        name: String,
    },
    /// A running task has this name.
    #[error("cannot start the task {name:?}: a task of this name runs")]
    NameInUse {
        /// The name.
        name: String,
    },
    /// The system starts no thread.
    #[error("cannot start the task {name:?}: {source}")]
    Thread {
        /// The name.
        name: String,
        /// The cause.
        source: io::Error,
    },
}

fn running(stragglers: &[String]) -> String {
    match stragglers {
        [] => String::new(),
        _ => format!("; still running are {stragglers:?}"),
    }
}
