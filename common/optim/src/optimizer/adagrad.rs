//! Adagrad, as TensorFlow 1 computes it.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, impl_loops,
    positive,
};

/// Adagrad: `a += g^2`, `w -= lr g / sqrt(a)`.
///
/// Source: J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods for Online Learning and
/// Stochastic Optimization", 2011 (Journal of Machine Learning Research 12), with diagonal
/// matrices, in the form of TensorFlow 1's Adagrad.
///
/// One slot, `accumulator`, initially 0.1, in the unit of the squared gradient. It never decreases,
/// so steps only become smaller.
///
/// The paper adds a small number to the root; Keras adds 1e-7 within it. TensorFlow 1 adds nothing:
/// the initial slot prevents a division by zero and damps the first steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Adagrad {
    learning_rate: Schedule,
    slots: [OptimizerSlot; 1],
}

impl Adagrad {
    /// Creates the rule with this learning rate, which has no default, and a slot that is initially
    /// 0.1.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Adagrad {
            learning_rate: learning_rate.into(),
            slots: [OptimizerSlot::new("accumulator", 0.1)],
        }
    }

    /// Sets the initial slot, above 0, in the unit of the squared gradient. Default: 0.1.
    pub fn initial_accumulator(self, initial: f64) -> Self {
        Adagrad { slots: [OptimizerSlot::new("accumulator", initial)], ..self }
    }
}

impl Optimizer for Adagrad {
    fn kind(&self) -> &'static str {
        "adagrad"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &self.slots
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        positive("initial_accumulator", self.slots[0].initial).or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Adagrad {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        run.update(AdagradUpdate { rate: F::of(self.learning_rate.of(at)) });
    }
}

#[derive(Clone, Copy)]
struct AdagradUpdate<F> {
    rate: F,
}

impl<F: OptimizerFloat> UpdateRule<F, 1> for AdagradUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, [a]: [F; 1], g: F) -> (F, [F; 1]) {
        let a = a + g * g;
        (w - g * self.rate / a.sqrt(), [a])
    }
}
