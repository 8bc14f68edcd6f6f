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

    fn rule_f64(&self, at: ApplyAt) -> SgdRule<f64> {
        SgdRule { rate: self.learning_rate * at.rate }
    }

    fn rule_f32(&self, at: ApplyAt) -> SgdRule<f32> {
        SgdRule { rate: self.rule_f64(at).rate as f32 }
    }
}

impl Optimizer for Sgd {
    fn kind(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self) -> &[SlotSpec] {
        &[]
    }

    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>) {
        f32::in_place(self.rule_f32(at), run);
    }

    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>) {
        f64::in_place(self.rule_f64(at), run);
    }

    fn stream_f32(&self, at: ApplyAt, run: StreamRun<'_, f32>) -> bool {
        f32::streamed(self.rule_f32(at), run);
        true
    }

    fn stream_f64(&self, at: ApplyAt, run: StreamRun<'_, f64>) -> bool {
        f64::streamed(self.rule_f64(at), run);
        true
    }

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        learning_rate_fault(self.learning_rate)
    }
}
