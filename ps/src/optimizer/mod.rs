//! How a gradient changes a variable: one trait, and one file per rule. The doc of each rule has
//! its formula and its source.
//!
//! Each rule computes what TensorFlow's operation of that name does, in the same order, with two
//! differences in the last digits: `1 - beta` and the like are rounded from `f64` once, where
//! TensorFlow subtracts in the variable's type, and a reciprocal root is a root and a division.
//! Defaults are those of the classes of TensorFlow 1; Keras has others. [`AdamW`] follows Keras
//! and [`Lamb`] TensorFlow Addons, with their defaults.

mod adadelta;
mod adagrad;
mod adam;
mod adamw;
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

use kernel::{Elements, Float};

pub use adadelta::Adadelta;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamw::AdamW;
pub use ftrl::Ftrl;
pub(crate) use gradient::{GradientRun, MEAN_GRADIENTS_MAX, SharedRun};
pub use lamb::Lamb;
pub use momentum::Momentum;
pub use rmsprop::RmsProp;
pub(crate) use rules::{Rules, Untrainable, VariableRules};
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use sums::{SumRun, Sums};

/// A slot: state that an optimizer keeps for every element of every trainable variable.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SlotSpec {
    /// The slot's name, such as `m`; part of checkpoints.
    pub name: &'static str,
    /// The value it starts with.
    pub initial: f64,
}

impl SlotSpec {
    /// A slot that starts with `initial` everywhere.
    pub const fn new(name: &'static str, initial: f64) -> Self {
        SlotSpec { name, initial }
    }
}

/// Which update this is.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ApplyAt {
    /// Counts the gradients that the shard has applied, this one included: 1 for the first.
    pub count: u64,
    /// The global step of the token the gradient was computed under; for schedules.
    pub step: u64,
    /// What the rule multiplies its learning rate by: 1, or less for a gradient that is damped
    /// because it is stale. See [`Optimizer::scales_rate`].
    pub rate: f64,
    /// What [`Sums::totals`] of the whole variable are, if the rule adds some up
    /// ([`Optimizer::sums_whole_variables`]); zeros otherwise, and while they are added up.
    pub sums: [f64; ApplyAt::SUMS_MAX],
}

impl ApplyAt {
    /// The most sums that a rule may add up.
    pub const SUMS_MAX: usize = 4;

    /// The `count`-th gradient of a shard, computed under a token of global step `step`; at the
    /// rule's own learning rate.
    pub const fn new(count: u64, step: u64) -> Self {
        ApplyAt { count, step, rate: 1.0, sums: [0.0; ApplyAt::SUMS_MAX] }
    }

    /// The same at the rule's learning rate times `rate`.
    pub const fn at_rate(self, rate: f64) -> Self {
        ApplyAt { rate, ..self }
    }

    /// The same with these sums over the whole variable.
    pub const fn with_sums(self, sums: [f64; ApplyAt::SUMS_MAX]) -> Self {
        ApplyAt { sums, ..self }
    }
}

/// A run of elements of one variable, with the same run of its slots and its gradient.
///
/// All slices are of one length.
#[derive(Debug)]
pub struct Run<'a, T> {
    /// The values, to be changed.
    pub values: &'a mut [T],
    /// The slots in the order of [`Optimizer::slots`], to be changed.
    pub slots: &'a mut [&'a mut [T]],
    /// The gradient.
    pub gradient: &'a [T],
}

/// A run whose result is written elsewhere: the slices that are read and those that are written do
/// not overlap. All are of one length.
#[derive(Debug)]
#[doc(hidden)]
pub struct StreamRun<'a, T> {
    /// The values.
    pub values: &'a [T],
    /// What they become.
    pub values_out: &'a mut [T],
    /// The slots in the order of [`Optimizer::slots`].
    pub slots: &'a [&'a [T]],
    /// What they become.
    pub slots_out: &'a mut [&'a mut [T]],
    /// The gradient.
    pub(crate) gradient: GradientRun<'a, T>,
    /// Whether the result is written past the cache: nobody reads it soon.
    pub past_cache: bool,
    /// Set if a value is not finite that is written.
    pub(crate) overflowed: &'a mut bool,
}

/// Runs that come one by one: called once, with what is to be done with each.
pub type Runs<'a, T> = dyn FnMut(&mut dyn FnMut(Run<'_, T>)) + 'a;

/// The same of runs whose results are written elsewhere.
#[doc(hidden)]
pub type StreamRuns<'a, T> = dyn FnMut(&mut dyn FnMut(StreamRun<'_, T>)) + 'a;

/// A rule that changes variables by gradients, element by element.
///
/// A shard calls it for runs of at most a few thousand elements, in any order and from its own
/// thread; the result for an element must depend on that element, its slots, its gradient and
/// [`ApplyAt`] alone, which has sums over the whole variable for rules that add some up. Hyperparameters are `f64`; the rule rounds them once to the variable's type.
/// It must take any gradient: one with NaN may be refused only once it has been applied, and what came of it is forgotten then.
pub trait Optimizer: fmt::Debug + Send + Sync + 'static {
    /// The rule's name, such as `adam`. All ps tasks of a cluster must use the same.
    fn kind(&self) -> &'static str;

    /// The slots it keeps.
    fn slots(&self) -> &[SlotSpec];

    /// Changes a run of a variable of `f32`.
    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>);

    /// Changes a run of a variable of `f64`.
    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>);

    /// The same as `apply_f32` for each of these runs, from one place to another; `false` if the rule has no
    /// such loop, and the runs were not asked for. The rules here have one: it saves a pass over the
    /// values.
    #[doc(hidden)]
    fn stream_runs_f32(&self, _at: ApplyAt, _runs: &mut StreamRuns<'_, f32>) -> bool {
        false
    }

    /// The same for `f64`.
    #[doc(hidden)]
    fn stream_runs_f64(&self, _at: ApplyAt, _runs: &mut StreamRuns<'_, f64>) -> bool {
        false
    }

    /// The same as `apply_f32` for each of these runs, which lie apart, as rows do. What holds for all of
    /// them the rules here reckon once.
    #[doc(hidden)]
    fn apply_runs_f32(&self, at: ApplyAt, runs: &mut Runs<'_, f32>) {
        runs(&mut |run| self.apply_f32(at, run));
    }

    /// The same for `f64`.
    #[doc(hidden)]
    fn apply_runs_f64(&self, at: ApplyAt, runs: &mut Runs<'_, f64>) {
        runs(&mut |run| self.apply_f64(at, run));
    }

    /// Whether an update needs sums over all elements of a variable before any of them changes, as rules
    /// with norms do. Then each push or step is taken twice: [`Optimizer::sum_f32`] or
    /// [`Optimizer::sum_f64`] add up what all runs of the variable give, in their order, and then they are
    /// changed with [`ApplyAt::sums`]. Variables of such a rule must lie in one part, and may not be
    /// sparse; pushes are applied once they are whole.
    fn sums_whole_variables(&self) -> bool {
        false
    }

    /// Adds what a run of a variable of `f32` gives to its sums. `at.sums` are zeros yet.
    fn sum_f32(&self, _at: ApplyAt, _run: SumRun<'_, f32>, _sums: &mut Sums) {}

    /// Adds what a run of a variable of `f64` gives to its sums.
    fn sum_f64(&self, _at: ApplyAt, _run: SumRun<'_, f64>, _sums: &mut Sums) {}

    /// Whether the rule multiplies its learning rate by [`ApplyAt::rate`]. Only rules that do can
    /// be used with [`crate::StalenessPolicy::Damp`]: a smaller gradient is not the same as a
    /// smaller step for a rule that divides by how large gradients are.
    fn scales_rate(&self) -> bool {
        false
    }

    /// Whether a push of some rows of a variable changes the others, too: for them, their gradient
    /// is zero. Such a push costs as much as one of the whole variable. Without it, rows that are
    /// not pushed keep their values and their slots.
    fn moves_absent_rows(&self) -> bool {
        false
    }

    /// The first hyperparameter that cannot be used: its name, its value and why.
    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        None
    }
}

/// A rule that is chosen when the program runs.
impl Optimizer for Arc<dyn Optimizer> {
    fn kind(&self) -> &'static str {
        (**self).kind()
    }

    fn slots(&self) -> &[SlotSpec] {
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

    fn fault(&self) -> Fault {
        (**self).fault()
    }
}

/// A rule of this module: its hyperparameters rounded to a type, taken over a run.
trait Dense {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>);
}

/// The four ways in which an [`Optimizer`] that is [`Dense`] is called.
macro_rules! loops {
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
use loops;

/// A hyperparameter that cannot be used, as [`Optimizer::fault`] has it.
type Fault = Option<(&'static str, f64, &'static str)>;

fn fault_unless(usable: bool, name: &'static str, value: f64, reason: &'static str) -> Fault {
    (!usable).then_some((name, value, reason))
}

fn not_negative(name: &'static str, value: f64) -> Fault {
    let usable = value.is_finite() && value >= 0.0;
    fault_unless(usable, name, value, "it must be finite and not negative")
}

fn positive(name: &'static str, value: f64) -> Fault {
    let usable = value.is_finite() && value > 0.0;
    fault_unless(usable, name, value, "it must be finite and above 0")
}

/// What of a sum each update keeps.
fn fraction(name: &'static str, value: f64) -> Fault {
    fault_unless((0.0..1.0).contains(&value), name, value, "it must be at least 0 and below 1")
}
