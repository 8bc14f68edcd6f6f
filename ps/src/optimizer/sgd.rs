//! Gradient descent: `w -= lr * g`.

use super::kernel::{Float, SgdRule};
use super::{ApplyAt, Optimizer, Run, SlotSpec, StreamRun, learning_rate_fault};

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
        f32::in_place(SgdRule { rate: self.learning_rate as f32 }, run);
    }

    fn apply_f64(&self, _at: ApplyAt, run: Run<'_, f64>) {
        f64::in_place(SgdRule { rate: self.learning_rate }, run);
    }

    fn stream_f32(&self, _at: ApplyAt, run: StreamRun<'_, f32>) -> bool {
        f32::streamed(SgdRule { rate: self.learning_rate as f32 }, run);
        true
    }

    fn stream_f64(&self, _at: ApplyAt, run: StreamRun<'_, f64>) -> bool {
        f64::streamed(SgdRule { rate: self.learning_rate }, run);
        true
    }

    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        learning_rate_fault(self.learning_rate)
    }
}
