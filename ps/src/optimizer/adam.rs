//! Adam (Kingma and Ba, 2015, algorithm 1 in the form before section 2.1), as TensorFlow computes
//! it: epsilon stands outside the root.

use super::kernel::{AdamRule, Float};
use super::{ApplyAt, Optimizer, Run, SlotSpec, StreamRun, learning_rate_fault};

/// Adam: `m = b1 m + (1-b1) g`, `v = b2 v + (1-b2) g^2`, `w -= a m / (sqrt(v) + e)` with
/// `a = lr sqrt(1 - b2^t) / (1 - b1^t)`, where `t` counts the gradients the shard has applied.
///
/// Two slots, `m` and `v`, both starting at 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
}

impl Adam {
    /// Adam at this learning rate, with beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub const fn new(learning_rate: f64) -> Self {
        Adam { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }

    /// The decay of the first and of the second moment, each in `[0, 1)`.
    pub const fn betas(self, beta1: f64, beta2: f64) -> Self {
        Adam { beta1, beta2, ..self }
    }

    /// What keeps the division from zero.
    pub const fn epsilon(self, epsilon: f64) -> Self {
        Adam { epsilon, ..self }
    }

    /// The step size of the `t`-th update.
    fn alpha(&self, at: ApplyAt) -> f64 {
        // Beyond 2^31 updates both powers have long been zero.
        let t = i32::try_from(at.count).unwrap_or(i32::MAX);
        let rate = self.learning_rate * at.rate;
        rate * (1.0 - self.beta2.powi(t)).sqrt() / (1.0 - self.beta1.powi(t))
    }

    fn rule_f64(&self, at: ApplyAt) -> AdamRule<f64> {
        AdamRule {
            alpha: self.alpha(at),
            beta1: self.beta1,
            beta2: self.beta2,
            rest1: 1.0 - self.beta1,
            rest2: 1.0 - self.beta2,
            epsilon: self.epsilon,
        }
    }

    fn rule_f32(&self, at: ApplyAt) -> AdamRule<f32> {
        let AdamRule { alpha, beta1, beta2, rest1, rest2, epsilon } = self.rule_f64(at);
        AdamRule {
            alpha: alpha as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: rest1 as f32,
            rest2: rest2 as f32,
            epsilon: epsilon as f32,
        }
    }
}

impl Default for Adam {
    /// The defaults of the paper: learning rate 0.001.
    fn default() -> Self {
        Adam::new(0.001)
    }
}

const SLOTS: [SlotSpec; 2] = [SlotSpec::new("m", 0.0), SlotSpec::new("v", 0.0)];

impl Optimizer for Adam {
    fn kind(&self) -> &'static str {
        "adam"
    }

    fn slots(&self) -> &[SlotSpec] {
        &SLOTS
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
        let unit = |beta: f64| (0.0..1.0).contains(&beta);
        if !unit(self.beta1) {
            return Some(("beta1", self.beta1, "it must be at least 0 and below 1"));
        }
        if !unit(self.beta2) {
            return Some(("beta2", self.beta2, "it must be at least 0 and below 1"));
        }
        if !(self.epsilon.is_finite() && self.epsilon >= 0.0) {
            return Some(("epsilon", self.epsilon, "it must be finite and not negative"));
        }
        learning_rate_fault(self.learning_rate)
    }
}
