//! Adam, as TensorFlow computes it.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, Schedule, SlotSpec, fraction, impl_loops,
    not_negative,
};

/// Adam: `m = b1 m + (1-b1) g`, `v = b2 v + (1-b2) g^2`, `w -= a m / (sqrt(v) + e)` with `a = lr
/// sqrt(1 - b2^t) / (1 - b1^t)`, where `t` counts the gradients that the shard has applied.
///
/// Source: D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", 2015
/// (arXiv:1412.6980), algorithm 1 in the form just before section 2.1, which is that of
/// TensorFlow's Adam: `e` is the paper's epsilon hat, added to the root of the uncorrected moment.
///
/// Two slots, `m` and `v`, both initially 0.
///
/// A push of some rows changes all rows, as in TensorFlow: without a gradient both moments decay,
/// and the value still moves by them. That costs as much as a push of the whole variable.
/// [`Adam::lazy`] changes only the pushed rows. It is a rule of another kind, `lazy_adam`, so that
/// ps tasks cannot mix them.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    learning_rate: Schedule,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    lazy: bool,
}

impl Adam {
    /// Creates the rule with this learning rate, beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Adam {
            learning_rate: learning_rate.into(),
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            lazy: false,
        }
    }

    /// Sets the decay of the first and the second moment, each in `[0, 1)`.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Adam { beta1, beta2, ..self }
    }

    /// Sets the number that prevents a division by zero.
    pub fn epsilon(self, epsilon: f64) -> Self {
        Adam { epsilon, ..self }
    }

    /// Changes only the rows that are pushed, and leaves the other rows and their moments as they
    /// are. A row that is rarely pushed then keeps its moments until the next push, and moves less.
    /// `t` counts the gradients of the shard, not of the row.
    ///
    /// Source: TensorFlow 1's `tf.contrib.opt.LazyAdamOptimizer`; the paper has no such rule.
    pub fn lazy(self) -> Self {
        Adam { lazy: true, ..self }
    }

    /// Returns the learning rate of an update.
    pub(super) fn rate(&self, at: ApplyAt) -> f64 {
        self.learning_rate.of(at)
    }

    /// Returns the step size of the `t`-th update.
    fn alpha(&self, at: ApplyAt) -> f64 {
        // Beyond 2^31 updates both powers are zero.
        let t = i32::try_from(at.count).unwrap_or(i32::MAX);
        self.rate(at) * (1.0 - self.beta2.powi(t)).sqrt() / (1.0 - self.beta1.powi(t))
    }

    pub(super) fn update<F: OptimizerFloat>(&self, at: ApplyAt) -> AdamUpdate<F> {
        AdamUpdate {
            alpha: F::of(self.alpha(at)),
            beta1: F::of(self.beta1),
            beta2: F::of(self.beta2),
            rest1: F::of(1.0 - self.beta1),
            rest2: F::of(1.0 - self.beta2),
            epsilon: F::of(self.epsilon),
        }
    }
}

impl Default for Adam {
    /// Creates the rule with the paper's default learning rate, 0.001.
    fn default() -> Self {
        Adam::new(0.001)
    }
}

pub(super) const SLOTS: [SlotSpec; 2] = [SlotSpec::new("m", 0.0), SlotSpec::new("v", 0.0)];

impl Optimizer for Adam {
    fn kind(&self) -> &'static str {
        if self.lazy { "lazy_adam" } else { "adam" }
    }

    fn slots(&self) -> &[SlotSpec] {
        &SLOTS
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn moves_absent_rows(&self) -> bool {
        !self.lazy
    }

    fn fault(&self) -> HyperparameterFault {
        fraction("beta1", self.beta1)
            .or(fraction("beta2", self.beta2))
            .or(not_negative("epsilon", self.epsilon))
            .or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Adam {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        run.update(self.update(at));
    }
}

/// One update of Adam.
#[derive(Clone, Copy)]
pub(super) struct AdamUpdate<F> {
    alpha: F,
    beta1: F,
    beta2: F,
    /// `1 - beta`, rounded from f64. In f32, 1 - 0.999 would lose three digits.
    rest1: F,
    rest2: F,
    epsilon: F,
}

impl<F: OptimizerFloat> UpdateRule<F, 2> for AdamUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, [m, v]: [F; 2], g: F) -> (F, [F; 2]) {
        let m = self.beta1 * m + self.rest1 * g;
        let v = self.beta2 * v + self.rest2 * (g * g);
        (w - self.alpha * m / (v.sqrt() + self.epsilon), [m, v])
    }
}
