//! The transport that servers and workers share.
//!
//! [`Stream`] is a TCP connection or a Unix socket. [`FrameStream`] receives the frames of one, and
//! [`SendQueue`] sends frames. [`AdaptiveSpin`] decides whether a waiting thread polls or sleeps, and
//! [`Processors`] reports whether another thread needs the processor. An internal crate of pushpull:
//! its API may change with any version.

mod adaptive_spin;
mod frame_stream;
mod processors;
mod send_queue;
mod stream;

pub use adaptive_spin::{AdaptiveSpin, SpinLimits, SpinWait};
pub use frame_stream::{ConnectionPhase, ConnectionSide, FrameStream};
pub use processors::Processors;
pub use send_queue::{SendBody, SendQueue};
pub use stream::{DetachedStream, Stream};
