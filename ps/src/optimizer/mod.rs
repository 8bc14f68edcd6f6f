//! How a gradient changes a variable: one trait, and one file per rule.

mod adam;
mod kernel;
mod sgd;

use std::fmt;

pub use adam::Adam;
pub use sgd::Sgd;

/// A floating-point type that variables are trained in.
pub trait Float: bytemuck::Pod + sealed::Sealed {}
impl Float for f32 {}
impl Float for f64 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ApplyAt {
    /// Counts the gradients that the shard has applied, this one included: 1 for the first.
    pub count: u64,
    /// The global step of the token the gradient was computed under; for schedules.
    pub step: u64,
}

impl ApplyAt {
    /// The `count`-th gradient of a shard, computed under a token of global step `step`.
    pub const fn new(count: u64, step: u64) -> Self {
        ApplyAt { count, step }
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

/// A rule that changes variables by gradients, element by element.
///
/// A shard calls it for runs of at most a few thousand elements, in any order and from its own
/// thread; the result for an element must depend on that element, its slots, its gradient and
/// [`ApplyAt`] alone. Hyperparameters are `f64`; the rule rounds them once to the variable's type.
pub trait Optimizer: fmt::Debug + Send + Sync + 'static {
    /// The rule's name, such as `adam`. All ps tasks of a cluster must use the same.
    fn kind(&self) -> &'static str;

    /// The slots it keeps.
    fn slots(&self) -> &[SlotSpec];

    /// Changes a run of a variable of `f32`.
    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>);

    /// Changes a run of a variable of `f64`.
    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>);

    /// The first hyperparameter that cannot be used: its name, its value and why.
    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        None
    }
}

/// A learning rate must be a positive finite number.
fn learning_rate_fault(rate: f64) -> Option<(&'static str, f64, &'static str)> {
    let usable = rate.is_finite() && rate >= 0.0;
    (!usable).then_some(("learning_rate", rate, "it must be finite and not negative"))
}
