//! Gradient descent: `w -= lr g`.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, SlotSpec, loops, not_negative};

/// Gradient descent without slots: `w -= lr g`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: f64,
}

impl Sgd {
    /// Gradient descent at this learning rate, which has no sensible default.
    pub const fn new(learning_rate: f64) -> Self {
        Sgd { learning_rate }
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
        not_negative("learning_rate", self.learning_rate)
    }
}

impl Dense for Sgd {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        run.update(Update { rate: F::of(self.learning_rate * at.rate) });
    }
}

#[derive(Clone, Copy)]
struct Update<F> {
    rate: F,
}

impl<F: Float> Rule<F, 0> for Update<F> {
    #[inline(always)]
    fn step(self, w: F, []: [F; 0], g: F) -> (F, [F; 0]) {
        (w - self.rate * g, [])
    }
}
