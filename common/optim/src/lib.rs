//! The mathematics of training with a parameter server, usable without one: update rules
//! and learning-rate schedules.
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

pub mod optimizer;
mod sparse_reduction;
pub mod volatile;

pub use optimizer::{
    Adadelta, Adagrad, Adam, AdamW, ApplyAt, Ftrl, Lamb, Momentum, Optimizer, OptimizerSlot,
    RmsProp, Run, Schedule, Sgd,
};
pub use sparse_reduction::SparseReduction;
