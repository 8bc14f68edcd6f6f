//! The transport that servers and workers share.
//!
//! [`Stream`] is a TCP connection or a Unix socket. [`AdaptiveSpin`] decides whether a waiting
//! thread polls or sleeps, and [`Processors`] reports whether another thread needs the processor.
//! An internal crate of pushpull: its API may change with any version.

mod adaptive_spin;
mod processors;
mod stream;

pub use adaptive_spin::{AdaptiveSpin, SpinLimits, SpinWait};
pub use processors::Processors;
pub use stream::{DetachedStream, Stream};
