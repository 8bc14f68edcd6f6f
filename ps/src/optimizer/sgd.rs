//! Gradient descent: `w -= lr g`.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, loops};

/// Gradient descent without slots: `w -= lr g`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: Schedule,
}

impl Sgd {
    /// Gradient descent at this learning rate, which has no sensible default.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Sgd { learning_rate: learning_rate.into() }
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
        self.learning_rate.fault()
    }
}

impl Dense for Sgd {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        run.update(Update { rate: F::of(self.learning_rate.of(at)) });
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
