//! Adam, as TensorFlow computes it.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, fraction, loops, not_negative};

/// Adam: `m = b1 m + (1-b1) g`, `v = b2 v + (1-b2) g^2`, `w -= a m / (sqrt(v) + e)` with
/// `a = lr sqrt(1 - b2^t) / (1 - b1^t)`, where `t` counts the gradients the shard has applied.
///
/// Source: D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", 2015
/// (arXiv:1412.6980), algorithm 1 in the form just before section 2.1, which is that of
/// TensorFlow's Adam: `e` is the paper's epsilon hat, beside the root of the moment that is not
/// corrected.
///
/// Two slots, `m` and `v`, both starting at 0.
///
/// A push of some rows changes all, as in TensorFlow: where there is no gradient, both moments decay
/// and the value goes on by what is left of them. That costs as much as a push of the whole
/// variable. [`Adam::lazy`] changes the rows that are pushed and no other; it is another rule, of
/// the kind `lazy_adam`, so that ps tasks cannot mix them.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    learning_rate: Schedule,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    lazy: bool,
}

impl Adam {
    /// Adam at this learning rate, with beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Adam {
            learning_rate: learning_rate.into(),
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            lazy: false,
        }
    }

    /// The decay of the first and of the second moment, each in `[0, 1)`.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Adam { beta1, beta2, ..self }
    }

    /// What keeps the division from zero.
    pub fn epsilon(self, epsilon: f64) -> Self {
        Adam { epsilon, ..self }
    }

    /// The same but for pushes of rows, which leave other rows and their moments as they are. A row
    /// that is seldom pushed then keeps its moments for as long, and moves less; `t` counts the
    /// gradients of the shard, not of the row.
    ///
    /// Source: TensorFlow 1's `tf.contrib.opt.LazyAdamOptimizer`; the paper has no such rule.
    pub fn lazy(self) -> Self {
        Adam { lazy: true, ..self }
    }

    /// The learning rate of an update.
    pub(super) fn rate(&self, at: ApplyAt) -> f64 {
        self.learning_rate.of(at)
    }

    /// The step size of the `t`-th update.
    fn alpha(&self, at: ApplyAt) -> f64 {
        // Beyond 2^31 updates both powers have long been zero.
        let t = i32::try_from(at.count).unwrap_or(i32::MAX);
        self.rate(at) * (1.0 - self.beta2.powi(t)).sqrt() / (1.0 - self.beta1.powi(t))
    }

    pub(super) fn update<F: Float>(&self, at: ApplyAt) -> Update<F> {
        Update {
            alpha: F::of(self.alpha(at)),
            beta1: F::of(self.beta1),
            beta2: F::of(self.beta2),
            rest1: F::of(1.0 - self.beta1),
            rest2: F::of(1.0 - self.beta2),
            epsilon: F::of(self.epsilon),
        }
    }
}

impl Default for Adam {
    /// The defaults of the paper: learning rate 0.001.
    fn default() -> Self {
        Adam::new(0.001)
    }
}

pub(super) const SLOTS: [SlotSpec; 2] = [SlotSpec::new("m", 0.0), SlotSpec::new("v", 0.0)];

impl Optimizer for Adam {
    fn kind(&self) -> &'static str {
        if self.lazy { "lazy_adam" } else { "adam" }
    }

    fn slots(&self) -> &[SlotSpec] {
        &SLOTS
    }

    loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn moves_absent_rows(&self) -> bool {
        !self.lazy
    }

    fn fault(&self) -> Fault {
        fraction("beta1", self.beta1)
            .or(fraction("beta2", self.beta2))
            .or(not_negative("epsilon", self.epsilon))
            .or(self.learning_rate.fault())
    }
}

impl Dense for Adam {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        run.update(self.update(at));
    }
}

/// One update of Adam.
#[derive(Clone, Copy)]
pub(super) struct Update<F> {
    alpha: F,
    beta1: F,
    beta2: F,
    /// `1 - beta`, rounded from f64: in f32, 1 - 0.999 would lose three digits.
    rest1: F,
    rest2: F,
    epsilon: F,
}

impl<F: Float> Rule<F, 2> for Update<F> {
    #[inline(always)]
    fn step(self, w: F, [m, v]: [F; 2], g: F) -> (F, [F; 2]) {
        let m = self.beta1 * m + self.rest1 * g;
        let v = self.beta2 * v + self.rest2 * (g * g);
        (w - self.alpha * m / (v.sqrt() + self.epsilon), [m, v])
    }
}
