//! Gradient descent.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, loops, not_negative};

/// Gradient descent without slots: `w -= lr (g + d w)`, where the weight decay `d` is 0 unless it is
/// given. To decay weights and to add the squared weight to the loss (L2) is the same here.
///
/// Source: H. Robbins, S. Monro, "A Stochastic Approximation Method", 1951 (Annals of Mathematical
/// Statistics 22), with the gradient as the function whose zero is sought, in the form of
/// TensorFlow's GradientDescent, which has no decay. That the decay is L2 is proposition 1 of
/// I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019 (arXiv:1711.05101),
/// where the decay is `lr d`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: Schedule,
    weight_decay: f64,
}

impl Sgd {
    /// Gradient descent at this learning rate, which has no sensible default.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Sgd { learning_rate: learning_rate.into(), weight_decay: 0.0 }
    }

    /// Which share of a weight is lost by an update at learning rate 1, not below 0. Default: 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Sgd { weight_decay, ..self }
    }
}

impl Optimizer for Sgd {
    fn kind(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self) -> &[SlotSpec] {
        &[]
    }

    loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> Fault {
        not_negative("weight_decay", self.weight_decay).or(self.learning_rate.fault())
    }
}

impl Dense for Sgd {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        let (rate, decay) = (F::of(self.learning_rate.of(at)), F::of(self.weight_decay));
        match self.weight_decay == 0.0 {
            true => run.update(Update::<F, false> { rate, decay }),
            false => run.update(Update::<F, true> { rate, decay }),
        }
    }
}

/// The choice is made outside of the loop: the compiler makes a branch of each one inside, and hardly a
/// vector of what is around it.
#[derive(Clone, Copy)]
struct Update<F, const DECAYS: bool> {
    rate: F,
    decay: F,
}

impl<F: Float, const DECAYS: bool> Rule<F, 0> for Update<F, DECAYS> {
    #[inline(always)]
    fn step(self, w: F, []: [F; 0], g: F) -> (F, [F; 0]) {
        let g = if DECAYS { g + self.decay * w } else { g };
        (w - self.rate * g, [])
    }
}
