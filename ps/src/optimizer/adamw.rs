//! Adam with decoupled weight decay, as Keras computes it.

use super::adam::{self, Adam};
use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, loops, not_negative};

/// Adam with decoupled weight decay: `w -= lr d w`, then an update of [`Adam`],
/// `w -= a m / (sqrt(v) + e)`, with its `m`, `v` and `a`.
///
/// Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019
/// (arXiv:1711.05101), algorithm 2, in the form of Keras's AdamW.
///
/// Two slots, `m` and `v`, both starting at 0: the decay is no part of the moments.
///
/// The paper multiplies the decay with a schedule alone, and the step with schedule and learning
/// rate. TensorFlow 2 (Keras) multiplies both with the learning rate, and so does this: a decay `d`
/// of the paper is `d / lr` here. All trainable variables decay. The rest is as in [`Adam`], whose
/// epsilon stands outside the root and beside the corrected step size, not beside the corrected
/// moments. A push of some rows changes all, and all decay.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    adam: Adam,
    weight_decay: f64,
}

impl AdamW {
    /// The rule at this learning rate, with the defaults of Keras: a weight decay of 0.004, beta1
    /// 0.9, beta2 0.999 and epsilon 1e-7.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        AdamW { adam: Adam::new(learning_rate).epsilon(1e-7), weight_decay: 0.004 }
    }

    /// Which share of a weight is lost by an update at learning rate 1. Default: 0.004.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        AdamW { weight_decay, ..self }
    }

    /// The decay of the first and of the second moment, each in `[0, 1)`. Default: 0.9, 0.999.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        AdamW { adam: self.adam.betas(beta1, beta2), ..self }
    }

    /// What keeps the division from zero, in the unit of the gradient. Default: 1e-7.
    pub fn epsilon(self, epsilon: f64) -> Self {
        AdamW { adam: self.adam.epsilon(epsilon), ..self }
    }
}

impl Default for AdamW {
    /// The defaults of Keras: learning rate 0.001.
    fn default() -> Self {
        AdamW::new(0.001)
    }
}

impl Optimizer for AdamW {
    fn kind(&self) -> &'static str {
        "adamw"
    }

    fn slots(&self) -> &[SlotSpec] {
        &adam::SLOTS
    }

    loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn moves_absent_rows(&self) -> bool {
        true
    }

    fn fault(&self) -> Fault {
        self.adam.fault().or(not_negative("weight_decay", self.weight_decay))
    }
}

impl Dense for AdamW {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        run.update(Update {
            adam: self.adam.update(at),
            decay: F::of(self.weight_decay),
            rate: F::of(self.adam.rate(at)),
        });
    }
}

#[derive(Clone, Copy)]
struct Update<F> {
    adam: adam::Update<F>,
    decay: F,
    rate: F,
}

impl<F: Float> Rule<F, 2> for Update<F> {
    #[inline(always)]
    fn step(self, w: F, slots: [F; 2], g: F) -> (F, [F; 2]) {
        self.adam.step(w - w * self.decay * self.rate, slots, g)
    }
}
