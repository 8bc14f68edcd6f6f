//! Adagrad, as TensorFlow 1 computes it.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, loops, positive};

/// Adagrad: `a += g^2`, `w -= lr g / sqrt(a)`.
///
/// Source: J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods for Online Learning and
/// Stochastic Optimization", 2011 (Journal of Machine Learning Research 12), with diagonal
/// matrices, in the form of TensorFlow 1's Adagrad.
///
/// One slot, `accumulator`, starting at 0.1, in the unit of the gradient's square. It never falls:
/// steps only grow smaller.
///
/// The paper adds a small number to the root, as Keras does (1e-7, and within the root). TensorFlow
/// 1 adds nothing: what the slot starts with keeps the division from zero, and damps the first
/// steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Adagrad {
    learning_rate: Schedule,
    slots: [SlotSpec; 1],
}

impl Adagrad {
    /// Adagrad at this learning rate, which has no default, and a slot that starts at 0.1.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Adagrad { learning_rate: learning_rate.into(), slots: [SlotSpec::new("accumulator", 0.1)] }
    }

    /// What the slot starts with: above 0, in the unit of the gradient's square. Default: 0.1.
    pub fn initial_accumulator(self, initial: f64) -> Self {
        Adagrad { slots: [SlotSpec::new("accumulator", initial)], ..self }
    }
}

impl Optimizer for Adagrad {
    fn kind(&self) -> &'static str {
        "adagrad"
    }

    fn slots(&self) -> &[SlotSpec] {
        &self.slots
    }

    loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> Fault {
        positive("initial_accumulator", self.slots[0].initial).or(self.learning_rate.fault())
    }
}

impl Dense for Adagrad {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        run.update(Update { rate: F::of(self.learning_rate.of(at)) });
    }
}

#[derive(Clone, Copy)]
struct Update<F> {
    rate: F,
}

impl<F: Float> Rule<F, 1> for Update<F> {
    #[inline(always)]
    fn step(self, w: F, [a]: [F; 1], g: F) -> (F, [F; 1]) {
        let a = a + g * g;
        (w - g * self.rate / a.sqrt(), [a])
    }
}
