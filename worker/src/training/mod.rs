//! Around the training loop: its data, record files, summaries and helper threads.

mod append_buffer;
pub mod data;
pub mod summary;
mod tasks;
pub mod tfrecord;

pub use tasks::{SpawnError, StopCause, StopFlag, TaskFailure, Tasks, TasksError};
