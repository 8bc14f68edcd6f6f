//! Runtime pieces that servers and workers share.
//!
//! [`QuietUnixStream`] is a Unix socket that does not wake a task each time its peer reads.
//! [`Processors`] tells whether a processor is idle. An internal crate of pushpull: its API may
//! change with any version.

mod processors;
mod quiet_unix_stream;

pub use processors::Processors;
pub use quiet_unix_stream::QuietUnixStream;
