//! How gradients become steps.
//!
//! The public pieces are those of classic synchronous training: TensorFlow's conditional
//! accumulators, and the token queue of its `SyncReplicasOptimizer`. They are plain values without
//! threads, clocks or sockets, so a program can average the gradients of its own replicas with
//! them, as in-graph replication does. Whoever waits is served through a `poll_taken`.
//!
//! One step of two replicas:
//!
//! ```
//! use pushpull_common::ids::GlobalStep;
//! use pushpull_common::tensor::Shape;
//! use pushpull_ps::aggregate::{Accumulator, Applied, Reduction};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let shape = Shape::new([2])?;
//! let mut accumulator = Accumulator::<f32>::new(shape.clone(), Reduction::Mean);
//! let ticket = accumulator.take(2)?;
//! accumulator.apply(&shape, &[1.0, 2.0], GlobalStep(0))?;
//! assert!(accumulator.poll_taken().is_none(), "one gradient is not enough");
//! accumulator.apply(&shape, &[3.0, 4.0], GlobalStep(0))?;
//! let taken = accumulator.poll_taken().ok_or("two gradients are enough")?;
//! assert_eq!((taken.ticket, taken.value), (ticket, vec![2.0, 3.0]));
//!
//! // A third replica was late: its gradient belongs to values that are gone.
//! let late = accumulator.apply(&shape, &[100.0, 100.0], GlobalStep(0))?;
//! assert_eq!(late, Applied::Stale { current: GlobalStep(1) });
//! # Ok(()) }
//! ```

mod accumulator;
pub(crate) mod bounded_staleness;
pub(crate) mod clipping;
#[cfg(test)]
pub(crate) mod exhaustive;
pub(crate) mod mode;
mod real;
pub(crate) mod recall;
mod sparse_accumulator;
pub(crate) mod staleness;
pub(crate) mod step_coordinator;
pub(crate) mod step_follower;
pub(crate) mod step_owner;
mod synchronous_tokens;
mod takers;
#[cfg(test)]
mod tests;
mod token_queue;

pub use accumulator::{Accumulator, ApplyError, Reduction};
pub use real::Real;
pub use sparse_accumulator::{
    SparseAccumulator, SparseApplyError, SparseGradient, SparseReduction,
};
pub use synchronous_tokens::{SynchronousTokens, SynchronousTokensError};
pub use takers::{Applied, TakeError, Taken, Ticket};
pub use token_queue::{Dequeued, PushTokensError, TokenQueue, WaitError, WaiterId};

/// The callers that may wait on one accumulator or token queue, those included that were served
/// and have not fetched it. One for each replica of the largest cluster there is reason to
/// expect; a caller that comes back without having fetched what it got is stopped by it.
pub const WAITERS_MAX: usize = 4096;
