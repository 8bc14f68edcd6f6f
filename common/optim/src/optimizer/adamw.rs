//! Adam with decoupled weight decay, as Keras computes it.

use super::adam::{self, Adam};
use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, impl_loops,
    not_negative,
};

/// Adam with decoupled weight decay: `w -= lr d w`, followed by an update of [`Adam`], `w -= a m /
/// (sqrt(v) + e)`, with the same `m`, `v` and `a`.
///
/// Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019
/// (arXiv:1711.05101), algorithm 2, in the form of Keras's AdamW.
///
/// Two slots, `m` and `v`, both initially 0. The decay is not part of the moments.
///
/// The paper multiplies the decay by a schedule only, and the step by schedule and learning rate.
/// TensorFlow 2 (Keras) multiplies both by the learning rate, as this rule does: a decay `d` of the
/// paper is `d / lr` here. All trainable variables decay. The rest is as in [`Adam`], including its
/// epsilon, which is added to the root of the uncorrected moment unless
/// [`AdamW::epsilon_after_correction`] is set. A push of some rows changes all rows, and all of them
/// decay.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    adam: Adam,
    weight_decay: f64,
}

impl AdamW {
    /// Creates the rule with this learning rate and the defaults of Keras: weight decay 0.004,
    /// beta1 0.9, beta2 0.999 and epsilon 1e-7.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        AdamW { adam: Adam::new(learning_rate).epsilon(1e-7), weight_decay: 0.004 }
    }

    /// Sets the share of a weight that an update at learning rate 1 removes. Default: 0.004.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        AdamW { weight_decay, ..self }
    }

    /// Sets the decay of the first and the second moment, each in `[0, 1)`. Default: 0.9, 0.999.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        AdamW { adam: self.adam.betas(beta1, beta2), ..self }
    }

    /// Sets the number that prevents a division by zero, in the unit of the gradient. Default:
    /// 1e-7.
    pub fn epsilon(self, epsilon: f64) -> Self {
        AdamW { adam: self.adam.epsilon(epsilon), ..self }
    }

    /// Adds epsilon to the root of the corrected moment, as [`Adam::epsilon_after_correction`] does
    /// and as PyTorch's `torch.optim.AdamW`. It is a rule of another kind,
    /// `adamw_epsilon_after_correction`.
    pub fn epsilon_after_correction(self) -> Self {
        AdamW { adam: self.adam.epsilon_after_correction(), ..self }
    }
}

impl Default for AdamW {
    /// Creates the rule with Keras's default learning rate, 0.001.
    fn default() -> Self {
        AdamW::new(0.001)
    }
}

impl Optimizer for AdamW {
    fn kind(&self) -> &'static str {
        match self.adam.adds_epsilon_after_correction() {
            false => "adamw",
            true => "adamw_epsilon_after_correction",
        }
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &adam::SLOTS
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn moves_absent_rows(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        self.adam.fault().or(not_negative("weight_decay", self.weight_decay))
    }
}

impl BuiltInRule for AdamW {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        run.update(AdamWUpdate {
            adam: self.adam.update(at),
            decay: F::of(self.weight_decay),
            rate: F::of(self.adam.rate(at)),
        });
    }
}

#[derive(Clone, Copy)]
struct AdamWUpdate<F> {
    adam: adam::AdamUpdate<F>,
    decay: F,
    rate: F,
}

impl<F: OptimizerFloat> UpdateRule<F, 2> for AdamWUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, slots: [F; 2], g: F) -> (F, [F; 2]) {
        self.adam.step(w - w * self.decay * self.rate, slots, g)
    }
}
