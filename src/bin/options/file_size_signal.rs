//! The signal of a file that would grow beyond its limit (`ulimit -f`).

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// SIGXFSZ. The number is that of every Linux architecture that Rust supports, MIPS aside, and of
/// the BSDs.
const FILE_SIZE_EXCEEDED: i32 = 25;

/// Handles the signal. By default it ends the process. With a handler the write fails, and what has
/// made it reports the error.
///
/// # Panics
/// Outside of a Tokio runtime.
pub(crate) fn fail_writes_instead() -> io::Result<()> {
    signal(SignalKind::from_raw(FILE_SIZE_EXCEEDED)).map(drop)
}
