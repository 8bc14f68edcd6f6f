//! RMSProp, with momentum and optionally centered, as TensorFlow 1 computes it.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, fraction,
    impl_loops, positive,
};

/// RMSProp: `r += (1-d) (g^2 - r)`, `m = u m + lr g / sqrt(r + e)`, `w -= m`. The centered form
/// replaces the mean square by the variance: `c += (1-d) (g - c)` and `sqrt(r - c^2 + e)`.
///
/// Source: T. Tieleman, G. Hinton, "Lecture 6.5 - rmsprop: Divide the gradient by a running average
/// of its recent magnitude", 2012 (Coursera, Neural Networks for Machine Learning). The centered
/// form and the momentum are from A. Graves, "Generating Sequences With Recurrent Neural Networks",
/// 2013 (arXiv:1308.0850), equations 38 to 41, in the form of TensorFlow 1's RMSProp.
///
/// Slots: `rms` (`r`), initially **1**, in the unit of the squared gradient; `momentum` (`m`),
/// initially 0, in the unit of the value, kept even if the momentum is 0. The centered form also
/// has `mg` (`c`), initially 0, in the unit of the gradient.
///
/// The lecture specifies neither an initial `rms` nor an epsilon; Keras starts `rms` at 0. The
/// initial 1, as in TensorFlow 1, damps the first steps. The learning rate is a part of `momentum`,
/// unlike in [`Momentum`](super::Momentum). If rounding makes the variance negative, TensorFlow
/// still takes the root and gets NaN or an unbounded step. Here the variance is then 0.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsProp {
    learning_rate: Schedule,
    decay: f64,
    momentum: f64,
    epsilon: f64,
    centered: bool,
}

impl RmsProp {
    /// Creates the rule with this learning rate, which has no default, a decay of 0.9, no momentum
    /// and epsilon 1e-10, not centered.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        RmsProp {
            learning_rate: learning_rate.into(),
            decay: 0.9,
            momentum: 0.0,
            epsilon: 1e-10,
            centered: false,
        }
    }

    /// Sets the share of the mean square and of the mean that an update keeps, in `[0, 1)`.
    /// Default: 0.9.
    pub fn decay(self, decay: f64) -> Self {
        RmsProp { decay, ..self }
    }

    /// Sets the share of the previous step that is added to the next, in `[0, 1)`. Default: 0.
    pub fn momentum(self, momentum: f64) -> Self {
        RmsProp { momentum, ..self }
    }

    /// Sets the number added within the root, above 0, in the unit of the squared gradient.
    /// Default: 1e-10.
    pub fn epsilon(self, epsilon: f64) -> Self {
        RmsProp { epsilon, ..self }
    }

    /// Divides by the root of the variance instead of the mean square. Needs a third slot.
    pub fn centered(self) -> Self {
        RmsProp { centered: true, ..self }
    }
}

const SLOTS: [OptimizerSlot; 3] = [
    OptimizerSlot::new("rms", 1.0),
    OptimizerSlot::new("momentum", 0.0),
    OptimizerSlot::new("mg", 0.0),
];

impl Optimizer for RmsProp {
    fn kind(&self) -> &'static str {
        if self.centered { "rmsprop_centered" } else { "rmsprop" }
    }

    fn slots(&self) -> &[OptimizerSlot] {
        if self.centered { &SLOTS } else { &SLOTS[..2] }
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        fraction("decay", self.decay)
            .or(fraction("momentum", self.momentum))
            .or(positive("epsilon", self.epsilon))
            .or(self.learning_rate.fault())
    }
}

impl BuiltInRule for RmsProp {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        let update = RmsPropUpdate {
            rate: F::of(self.learning_rate.of(at)),
            rest: F::of(1.0 - self.decay),
            momentum: F::of(self.momentum),
            epsilon: F::of(self.epsilon),
        };
        if self.centered { run.update(CenteredUpdate(update)) } else { run.update(update) }
    }
}

#[derive(Clone, Copy)]
struct RmsPropUpdate<F> {
    rate: F,
    /// `1 - decay`, rounded from f64.
    rest: F,
    momentum: F,
    epsilon: F,
}

impl<F: OptimizerFloat> RmsPropUpdate<F> {
    /// Moves a running mean towards a number.
    #[inline(always)]
    fn move_mean(self, mean: F, number: F) -> F {
        mean + (number - mean) * self.rest
    }

    /// Returns the new momentum, given the running mean of the squared gradient or its variance.
    #[inline(always)]
    fn step_momentum(self, momentum: F, g: F, square: F) -> F {
        momentum * self.momentum + g * self.rate / (square + self.epsilon).sqrt()
    }
}

impl<F: OptimizerFloat> UpdateRule<F, 2> for RmsPropUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, [r, m]: [F; 2], g: F) -> (F, [F; 2]) {
        let r = self.move_mean(r, g * g);
        let m = self.step_momentum(m, g, r);
        (w - m, [r, m])
    }
}

#[derive(Clone, Copy)]
struct CenteredUpdate<F>(RmsPropUpdate<F>);

impl<F: OptimizerFloat> UpdateRule<F, 3> for CenteredUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, [r, m, c]: [F; 3], g: F) -> (F, [F; 3]) {
        let r = self.0.move_mean(r, g * g);
        let c = self.0.move_mean(c, g);
        let variance = r - c * c;
        let zero = F::of(0.0);
        // Not `max`, which would drop a NaN.
        let variance = if variance < zero { zero } else { variance };
        let m = self.0.step_momentum(m, g, variance);
        (w - m, [r, m, c])
    }
}
