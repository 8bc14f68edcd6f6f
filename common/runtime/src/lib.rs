//! What the runtimes of servers and workers share.
//!
//! [`QuietUnixStream`] is a Unix socket whose peer's reads wake nobody; [`Processors`] says whether there is a processor to spare.
//! An internal crate of pushpull: what it offers may change with any version.

mod processors;
mod quiet_unix_stream;

pub use processors::Processors;
pub use quiet_unix_stream::QuietUnixStream;
