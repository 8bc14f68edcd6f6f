//! Optimizers: one trait, and one file for each rule. The documentation of a rule has its formula
//! and its source.
//!
//! Each rule computes what TensorFlow's operation of that name computes, in the same order, with
//! two differences in the last digits. Terms such as `1 - beta` are rounded once from `f64`, where
//! TensorFlow subtracts in the variable's type. A reciprocal root is a root and a division.
//! Defaults are those of TensorFlow 1; Keras has others. [`AdamW`] follows Keras and [`Lamb`]
//! follows TensorFlow Addons, with their defaults.

mod adadelta;
mod adagrad;
mod adam;
mod adamw;
mod float;
mod ftrl;
#[cfg(test)]
mod golden;
mod gradient;
mod kernel;
mod lamb;
mod momentum;
mod rmsprop;
mod rules;
mod schedule;
mod sgd;
mod sums;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use float::OptimizerFloat;
use kernel::RuleRun;

pub use adadelta::Adadelta;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamw::AdamW;
pub use ftrl::Ftrl;
#[doc(hidden)]
pub use gradient::{GradientRun, MEAN_GRADIENTS_MAX, SharedRun};
pub use lamb::Lamb;
pub use momentum::Momentum;
pub use rmsprop::RmsProp;
pub use rules::{OptimizerRules, Untrainable, VariableRules};
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use sums::{SumRun, Sums};

/// An optimizer slot: state that an optimizer keeps for each element of each trainable variable.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OptimizerSlot {
    /// The slot's name, such as `m`; part of checkpoints.
    pub name: &'static str,
    /// The initial value.
    pub initial: f64,
}

impl OptimizerSlot {
    /// Creates a slot that has the value `initial` everywhere at first.
    #[inline]
    pub const fn new(name: &'static str, initial: f64) -> Self {
        OptimizerSlot { name, initial }
    }
}

/// The position of an update in training, and its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ApplyAt {
    /// The number of the gradient in the training, 1 for the first: on all shards the same, whatever
    /// variables it contains. See `docs/asynchronous.md`.
    pub count: u64,
    /// The global step of the gradient's token, for schedules.
    pub step: u64,
    /// The factor of the learning rate: 1, or less for a gradient that is damped because it is
    /// stale. See [`Optimizer::scales_rate`].
    pub rate: f64,
    /// The result of [`Sums::totals`] for the whole variable, if the rule uses sums
    /// ([`Optimizer::sums_whole_variables`]). Zeros otherwise, and while the sums are computed.
    pub sums: [f64; ApplyAt::SUMS_MAX],
}

impl ApplyAt {
    /// The maximum number of sums of a rule.
    pub const SUMS_MAX: usize = 4;

    /// Describes the `count`-th gradient of a training, whose token has global step `step`, at the
    /// rule's own learning rate.
    #[inline]
    pub const fn new(count: u64, step: u64) -> Self {
        ApplyAt { count, step, rate: 1.0, sums: [0.0; ApplyAt::SUMS_MAX] }
    }

    /// Sets the factor of the learning rate.
    #[inline]
    pub const fn at_rate(self, rate: f64) -> Self {
        ApplyAt { rate, ..self }
    }

    /// Sets the sums over the whole variable.
    #[inline]
    pub const fn with_sums(self, sums: [f64; ApplyAt::SUMS_MAX]) -> Self {
        ApplyAt { sums, ..self }
    }
}

/// A run of elements of one variable, with its slots and its gradient.
///
/// All slices have the same length.
#[derive(Debug)]
pub struct Run<'a, T> {
    /// The values, updated in place.
    pub values: &'a mut [T],
    /// The slots, updated in place, in the order of [`Optimizer::slots`].
    pub slots: &'a mut [&'a mut [T]],
    /// The gradient.
    pub gradient: &'a [T],
}

/// A run whose result is written to other memory. Sources and destinations do not overlap, and all
/// slices have the same length.
#[derive(Debug)]
#[doc(hidden)]
pub struct StreamRun<'a, T> {
    /// The current values.
    pub values: &'a [T],
    /// The destination of the new values.
    pub values_out: &'a mut [T],
    /// The current slots, in the order of [`Optimizer::slots`].
    pub slots: &'a [&'a [T]],
    /// The destinations of the new slots.
    pub slots_out: &'a mut [&'a mut [T]],
    /// The gradient.
    pub gradient: GradientRun<'a, T>,
    /// Whether the result is written with non-temporal stores where the loop has them, because
    /// nothing reads it soon. The caller then orders these stores before it publishes the result.
    pub past_cache: bool,
    /// Set if a new value is not finite.
    pub overflowed: &'a mut bool,
}

/// An internal iterator over runs. It is called once, with a function that updates one run.
pub type Runs<'a, T> = dyn FnMut(&mut dyn FnMut(Run<'_, T>)) + 'a;

/// An internal iterator over runs whose results are written to other memory.
#[doc(hidden)]
pub type StreamRuns<'a, T> = dyn FnMut(&mut dyn FnMut(StreamRun<'_, T>)) + 'a;

/// An update rule that applies gradients to variables, element by element.
///
/// A shard calls it on its own thread for runs of at most a few thousand elements, in any order.
/// The result for an element must depend only on the element, its slots, its gradient and
/// [`ApplyAt`], which includes the sums over the whole variable. Hyperparameters are `f64`; the
/// rule rounds them once to the variable's type.
///
/// Must not panic on NaN or infinity: a push is validated while it is applied, and the result is
/// discarded if it is rejected.
pub trait Optimizer: fmt::Debug + Send + Sync + 'static {
    /// Returns the rule's name, such as `adam`. It must be the same on all ps tasks of a cluster.
    fn kind(&self) -> &'static str;

    /// Returns the slots of the rule.
    fn slots(&self) -> &[OptimizerSlot];

    /// Updates a run of a variable of `f32`.
    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>);

    /// Updates a run of a variable of `f64`.
    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>);

    /// Updates runs as `apply_f32` does, but writes the results to other memory. Returns false,
    /// without calling `runs`, if the rule has no such loop. The rules of this module have one,
    /// which saves a pass over the values.
    #[doc(hidden)]
    fn stream_runs_f32(&self, _at: ApplyAt, _runs: &mut StreamRuns<'_, f32>) -> bool {
        false
    }

    /// Updates runs of `f64` as [`Optimizer::stream_runs_f32`] does those of `f32`.
    #[doc(hidden)]
    fn stream_runs_f64(&self, _at: ApplyAt, _runs: &mut StreamRuns<'_, f64>) -> bool {
        false
    }

    /// Updates runs as `apply_f32` does. They need not be adjacent, as rows are not. The rules of
    /// this module compute what is common to all runs only once.
    #[doc(hidden)]
    fn apply_runs_f32(&self, at: ApplyAt, runs: &mut Runs<'_, f32>) {
        runs(&mut |run| self.apply_f32(at, run));
    }

    /// Updates runs of `f64` as [`Optimizer::apply_runs_f32`] does those of `f32`.
    #[doc(hidden)]
    fn apply_runs_f64(&self, at: ApplyAt, runs: &mut Runs<'_, f64>) {
        runs(&mut |run| self.apply_f64(at, run));
    }

    /// Returns whether an update needs sums over all elements of a variable before any of them
    /// changes, as rules with norms do.
    ///
    /// Each push or step is then processed twice: [`Optimizer::sum_f32`] or [`Optimizer::sum_f64`]
    /// adds up the terms of all runs, in order, and then the runs are updated with
    /// [`ApplyAt::sums`]. Such a variable must be dense and in one partition. Its pushes are
    /// applied only when they are whole.
    fn sums_whole_variables(&self) -> bool {
        false
    }

    /// Adds the terms of a run of `f32` to the sums of its variable. `at.sums` is zero.
    fn sum_f32(&self, _at: ApplyAt, _run: SumRun<'_, f32>, _sums: &mut Sums) {}

    /// Adds the terms of a run of `f64` to the sums of its variable.
    fn sum_f64(&self, _at: ApplyAt, _run: SumRun<'_, f64>, _sums: &mut Sums) {}

    /// Returns whether the rule multiplies its learning rate by [`ApplyAt::rate`]. The server's
    /// `StalenessPolicy::Damp` requires that. A smaller gradient is no substitute: a rule that
    /// divides by the size of gradients would make a step of the same size.
    fn scales_rate(&self) -> bool {
        false
    }

    /// Returns whether a push of some rows also changes the other rows, whose gradient is zero.
    /// Such a push costs as much as one of the whole variable. Otherwise the other rows keep their
    /// values and slots.
    fn moves_absent_rows(&self) -> bool {
        false
    }

    /// Returns the first invalid hyperparameter: its name, its value and the reason.
    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        None
    }
}

/// An optimizer that is chosen at run time.
impl Optimizer for Arc<dyn Optimizer> {
    fn kind(&self) -> &'static str {
        (**self).kind()
    }

    fn slots(&self) -> &[OptimizerSlot] {
        (**self).slots()
    }

    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>) {
        (**self).apply_f32(at, run);
    }

    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>) {
        (**self).apply_f64(at, run);
    }

    fn stream_runs_f32(&self, at: ApplyAt, runs: &mut StreamRuns<'_, f32>) -> bool {
        (**self).stream_runs_f32(at, runs)
    }

    fn stream_runs_f64(&self, at: ApplyAt, runs: &mut StreamRuns<'_, f64>) -> bool {
        (**self).stream_runs_f64(at, runs)
    }

    fn apply_runs_f32(&self, at: ApplyAt, runs: &mut Runs<'_, f32>) {
        (**self).apply_runs_f32(at, runs);
    }

    fn apply_runs_f64(&self, at: ApplyAt, runs: &mut Runs<'_, f64>) {
        (**self).apply_runs_f64(at, runs);
    }

    fn sums_whole_variables(&self) -> bool {
        (**self).sums_whole_variables()
    }

    fn sum_f32(&self, at: ApplyAt, run: SumRun<'_, f32>, sums: &mut Sums) {
        (**self).sum_f32(at, run, sums);
    }

    fn sum_f64(&self, at: ApplyAt, run: SumRun<'_, f64>, sums: &mut Sums) {
        (**self).sum_f64(at, run, sums);
    }

    fn scales_rate(&self) -> bool {
        (**self).scales_rate()
    }

    fn moves_absent_rows(&self) -> bool {
        (**self).moves_absent_rows()
    }

    fn fault(&self) -> HyperparameterFault {
        (**self).fault()
    }
}

/// A rule of this module: rounds its hyperparameters to a type and updates a run.
trait BuiltInRule {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>);
}

/// Implements the six `apply` and `stream` methods of an [`Optimizer`] by [`BuiltInRule::drive`].
macro_rules! impl_loops {
    () => {
        fn apply_f32(&self, at: $crate::optimizer::ApplyAt, run: $crate::optimizer::Run<'_, f32>) {
            self.drive(at, run);
        }

        fn apply_f64(&self, at: $crate::optimizer::ApplyAt, run: $crate::optimizer::Run<'_, f64>) {
            self.drive(at, run);
        }

        fn stream_runs_f32(
            &self,
            at: $crate::optimizer::ApplyAt,
            runs: &mut $crate::optimizer::StreamRuns<'_, f32>,
        ) -> bool {
            self.drive(at, runs);
            true
        }

        fn stream_runs_f64(
            &self,
            at: $crate::optimizer::ApplyAt,
            runs: &mut $crate::optimizer::StreamRuns<'_, f64>,
        ) -> bool {
            self.drive(at, runs);
            true
        }

        fn apply_runs_f32(
            &self,
            at: $crate::optimizer::ApplyAt,
            runs: &mut $crate::optimizer::Runs<'_, f32>,
        ) {
            self.drive(at, runs);
        }

        fn apply_runs_f64(
            &self,
            at: $crate::optimizer::ApplyAt,
            runs: &mut $crate::optimizer::Runs<'_, f64>,
        ) {
            self.drive(at, runs);
        }
    };
}
use impl_loops;

/// An invalid hyperparameter, as [`Optimizer::fault`] returns it.
type HyperparameterFault = Option<(&'static str, f64, &'static str)>;

fn fault_unless(
    usable: bool,
    name: &'static str,
    value: f64,
    reason: &'static str,
) -> HyperparameterFault {
    (!usable).then_some((name, value, reason))
}

fn not_negative(name: &'static str, value: f64) -> HyperparameterFault {
    let usable = value.is_finite() && value >= 0.0;
    fault_unless(usable, name, value, "it must be finite and not negative")
}

fn positive(name: &'static str, value: f64) -> HyperparameterFault {
    let usable = value.is_finite() && value > 0.0;
    fault_unless(usable, name, value, "it must be finite and above 0")
}

/// Checks the share that an update keeps of an average.
fn fraction(name: &'static str, value: f64) -> HyperparameterFault {
    fault_unless((0.0..1.0).contains(&value), name, value, "it must be at least 0 and below 1")
}
