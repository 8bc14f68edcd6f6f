//! Gradient descent: `w -= lr * g`.

use super::{ApplyAt, Optimizer, Run, SlotSpec, kernel, learning_rate_fault};

/// Gradient descent without slots: `w -= lr * g`.
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

    fn apply_f32(&self, _at: ApplyAt, run: Run<'_, f32>) {
        kernel::sgd_f32(run.values, run.gradient, self.learning_rate as f32);
    }

    fn apply_f64(&self, _at: ApplyAt, run: Run<'_, f64>) {
        kernel::sgd_f64(run.values, run.gradient, self.learning_rate);
    }

    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        learning_rate_fault(self.learning_rate)
    }
}
