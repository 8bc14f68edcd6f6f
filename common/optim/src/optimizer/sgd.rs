//! Stochastic gradient descent.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, impl_loops,
    not_negative,
};

/// Gradient descent without slots: `w -= lr (g + d w)`. The weight decay `d` is 0 by default. For
/// this rule, weight decay and L2 regularization are the same.
///
/// Source: H. Robbins, S. Monro, "A Stochastic Approximation Method", 1951 (Annals of Mathematical
/// Statistics 22), with the gradient as the function whose zero is sought, in the form of
/// TensorFlow's GradientDescent, which has no decay. That the decay equals L2 is proposition 1 of
/// I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv:1711.05101),
/// where the decay is `lr d`.
#[doc(alias = "GradientDescentOptimizer")]
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: Schedule,
    weight_decay: f64,
}

impl Sgd {
    /// Creates the rule with this learning rate, which has no sensible default.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Sgd { learning_rate: learning_rate.into(), weight_decay: 0.0 }
    }

    /// Sets the share of a weight that an update at learning rate 1 removes, at least 0. Default:
    /// 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Sgd { weight_decay, ..self }
    }
}

impl Optimizer for Sgd {
    fn kind(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &[]
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        not_negative("weight_decay", self.weight_decay).or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Sgd {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        let rate = F::of(self.learning_rate.of(at));
        let decay = F::of(self.weight_decay);
        match self.weight_decay == 0.0 {
            true => run.update(SgdUpdate::<F, false> { rate, decay }),
            false => run.update(SgdUpdate::<F, true> { rate, decay }),
        }
    }
}

/// The choice is a constant, made outside the loop. A branch inside it would prevent vectorization.
#[derive(Clone, Copy)]
struct SgdUpdate<F, const DECAYS: bool> {
    rate: F,
    decay: F,
}

impl<F: OptimizerFloat, const DECAYS: bool> UpdateRule<F, 0> for SgdUpdate<F, DECAYS> {
    #[inline(always)]
    fn step(self, w: F, []: [F; 0], g: F) -> (F, [F; 0]) {
        let g = if DECAYS { g + self.decay * w } else { g };
        (w - self.rate * g, [])
    }
}
