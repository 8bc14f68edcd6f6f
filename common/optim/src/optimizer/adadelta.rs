//! Adadelta, as TensorFlow computes it.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, fraction,
    impl_loops, positive,
};

/// Adadelta: `a = r a + (1-r) g^2`, `d = sqrt(u + e) / sqrt(a + e) g`, `w -= lr d`, `u = r u +
/// (1-r) d^2`.
///
/// Source: M. D. Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012 (arXiv:1212.5701),
/// algorithm 1, in the form of TensorFlow's Adadelta, with a learning rate.
///
/// Two slots, both initially 0: `accum` (`a`), in the unit of the squared gradient, and
/// `accum_update` (`u`), in the unit of the squared value.
///
/// The paper has no learning rate, which equals a learning rate of 1 here. TensorFlow's default of
/// 0.001 makes the first steps tiny. `accum_update` accumulates the step before the learning rate
/// is applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Adadelta {
    learning_rate: Schedule,
    rho: f64,
    epsilon: f64,
}

impl Adadelta {
    /// Creates the rule with this learning rate, rho 0.95 and epsilon 1e-8.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Adadelta { learning_rate: learning_rate.into(), rho: 0.95, epsilon: 1e-8 }
    }

    /// Sets the decay of both slots per update, in `[0, 1)`. Default: 0.95.
    pub fn rho(self, rho: f64) -> Self {
        Adadelta { rho, ..self }
    }

    /// Sets the number added within both roots, above 0, which determines the size of the first
    /// steps. Default: 1e-8; the paper has 1e-6.
    pub fn epsilon(self, epsilon: f64) -> Self {
        Adadelta { epsilon, ..self }
    }
}

impl Default for Adadelta {
    /// Creates the rule with TensorFlow's default learning rate, 0.001.
    fn default() -> Self {
        Adadelta::new(0.001)
    }
}

impl Optimizer for Adadelta {
    fn kind(&self) -> &'static str {
        "adadelta"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        const { &[OptimizerSlot::new("accum", 0.0), OptimizerSlot::new("accum_update", 0.0)] }
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        fraction("rho", self.rho)
            .or(positive("epsilon", self.epsilon))
            .or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Adadelta {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        run.update(AdadeltaUpdate {
            rate: F::of(self.learning_rate.of(at)),
            rho: F::of(self.rho),
            rest: F::of(1.0 - self.rho),
            epsilon: F::of(self.epsilon),
        });
    }
}

#[derive(Clone, Copy)]
struct AdadeltaUpdate<F> {
    rate: F,
    rho: F,
    /// `1 - rho`, rounded from f64.
    rest: F,
    epsilon: F,
}

impl<F: OptimizerFloat> UpdateRule<F, 2> for AdadeltaUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, [a, u]: [F; 2], g: F) -> (F, [F; 2]) {
        let a = a * self.rho + g * g * self.rest;
        let d = (u + self.epsilon).sqrt() / (a + self.epsilon).sqrt() * g;
        let u = u * self.rho + d * d * self.rest;
        (w - d * self.rate, [a, u])
    }
}
