//! Around the training loop: its data, record files, summaries and helper threads.

mod append_buffer;
pub mod data;
pub mod summary;
pub mod tfrecord;
