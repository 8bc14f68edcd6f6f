//! The parts of this crate on which `pushpull-training` and `pushpull-services` are built.
//!
//! They are no part of the API, and change without notice. The same holds for the hidden methods
//! and fields of public types.

pub use crate::blocking::waiter::Waiter;
pub use crate::config::ProgressCallback;
pub use crate::contained::contained;
pub use crate::declaring::declare;
#[cfg(feature = "devices")]
pub use crate::devices::DeviceCopy;
pub use crate::gradients::gradient_buffer::AlignedBuffer;
pub use crate::local_values::LocalValues;
pub use crate::outcome::SaveHandle;
pub use crate::pause::Pause;
pub use crate::reader::{SERVERS, VALUES};
#[cfg(feature = "ring")]
pub use crate::ring::{Agreement, DenseRing, RingWish, RingWorker, StepEntry};
pub use crate::runtime::{CALLER_SPIN, Leadership, OpenOperation, SessionRunner};
#[cfg(feature = "ring")]
pub use crate::token::local_token;
