//! The mathematics of training with a parameter server, usable without one: update rules,
//! learning-rate schedules and gradient accumulators.
//!
//! An [`Optimizer`] updates the values of a variable and its slots from a gradient, in place:
//!
//! ```
//! use pushpull_optim::{Adam, ApplyAt, Optimizer, Run, Schedule};
//!
//! // Minimize the squared distance of w from (1, 2).
//! let rule = Adam::new(Schedule::cosine(0.1, 0.0, 500));
//! let mut w = [0.0_f32; 2];
//! let mut slots = Vec::new();
//! for slot in rule.slots() {
//!     slots.push([slot.initial as f32; 2]);
//! }
//! for step in 0..500 {
//!     let gradient = [2.0 * (w[0] - 1.0), 2.0 * (w[1] - 2.0)];
//!     let mut slots: Vec<&mut [f32]> = slots.iter_mut().map(|slot| &mut slot[..]).collect();
//!     let run = Run { values: &mut w, slots: &mut slots, gradient: &gradient };
//!     rule.apply_f32(ApplyAt::new(step + 1, step), run);
//! }
//! assert!((w[0] - 1.0).abs() < 1e-3 && (w[1] - 2.0).abs() < 1e-3, "{w:?}");
//! ```
//!
//! [`Accumulator`] and [`SparseAccumulator`] are TensorFlow's conditional accumulators, and
//! [`TokenQueue`] is the queue of its `SyncReplicasOptimizer`. They are plain values without
//! threads, clocks or sockets. A program can use them to average the gradients of its own replicas,
//! as in-graph replication does. Calls never block: results are fetched with `poll_taken`.
//!
//! One step of two replicas:
//!
//! ```
//! use pushpull_common::ids::GlobalStep;
//! use pushpull_common::tensor::Shape;
//! use pushpull_optim::{Accumulator, Applied, Reduction};
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
//! // A straggler's gradient is dropped: the values it was computed from have been replaced.
//! let stale = accumulator.apply(&shape, &[100.0, 100.0], GlobalStep(0))?;
//! assert_eq!(stale, Applied::Stale { current: GlobalStep(1) });
//! # Ok(()) }
//! ```

mod accumulator;
pub mod optimizer;
mod real;
mod sparse_accumulator;
mod synchronous_tokens;
mod takers;
#[cfg(test)]
mod tests;
mod token_queue;
pub mod volatile;

pub use accumulator::{Accumulator, ApplyError, Reduction};
pub use optimizer::{
    Adadelta, Adagrad, Adam, AdamW, ApplyAt, Ftrl, Lamb, Momentum, Optimizer, RmsProp, Run,
    Schedule, Sgd, SlotSpec,
};
pub use real::Summand;
pub use sparse_accumulator::{
    SparseAccumulator, SparseApplyError, SparseGradient, SparseReduction,
};
pub use synchronous_tokens::{SynchronousTokens, SynchronousTokensError};
pub use takers::{Applied, TakeError, Taken, Ticket};
pub use token_queue::{Dequeued, PushTokensError, TokenQueue, WaitError, WaiterId};

/// The maximum number of callers that wait on one accumulator or token queue. Callers that were
/// served and have not fetched their result count.
///
/// The limit allows one caller per replica of the largest plausible cluster. It also stops a caller
/// that keeps calling without fetching its results.
pub const WAITERS_MAX: usize = 4096;
