//! Adam, as TensorFlow computes it or as PyTorch does.

use std::cell::Cell;

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, fraction,
    impl_loops, not_negative,
};

/// Adam: `m = b1 m + (1-b1) g`, `v = b2 v + (1-b2) g^2`, `w -= a m / (sqrt(v) + e)` with `a = lr
/// sqrt(1 - b2^t) / (1 - b1^t)`, where `t` counts the gradients of the training.
///
/// Source: D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", 2015
/// (arXiv:1412.6980), algorithm 1 in the form just before section 2.1, which is that of
/// TensorFlow's Adam: `e` is the paper's epsilon hat, added to the root of the uncorrected moment.
/// [`Adam::epsilon_after_correction`] adds it to the root of the corrected one, as algorithm 1
/// itself, PyTorch, Optax, candle and burn do.
///
/// Two slots, `m` and `v`, both initially 0.
///
/// A push of some rows changes all rows, as in TensorFlow: without a gradient both moments decay,
/// and the value still moves by them. That costs as much as a push of the whole variable.
/// [`Adam::lazy`] changes only the pushed rows, and [`Adam::lazy_with_row_counts`] counts for each
/// row as well. Each of these forms is a rule of another kind, such as `lazy_adam`, so that ps tasks
/// cannot mix them, and that the state of one is not continued by another.
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    learning_rate: Schedule,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    /// Whether epsilon is added to the root of the corrected moment.
    epsilon_after_correction: bool,
    rows: RowUpdates,
}

/// The rows that a push of some rows changes, and the meaning of `t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowUpdates {
    All,
    Pushed,
    /// Only the pushed rows, and `t` counts the gradients of the row.
    PushedAndCounted,
}

impl Adam {
    /// Creates the rule with this learning rate, beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Adam {
            learning_rate: learning_rate.into(),
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            epsilon_after_correction: false,
            rows: RowUpdates::All,
        }
    }

    /// Sets the decay of the first and the second moment, each in `[0, 1)`.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Adam { beta1, beta2, ..self }
    }

    /// Sets the number that prevents a division by zero.
    pub fn epsilon(self, epsilon: f64) -> Self {
        Adam { epsilon, ..self }
    }

    /// Adds epsilon to the root of the corrected moment: `w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 -
    /// b2^t)) + e)`. Epsilon is in the unit of the gradient then. Without it, epsilon counts for up
    /// to `1 / sqrt(1 - b2)` times as much in the first updates, 32 by default.
    ///
    /// The kind of the rule ends with `_epsilon_after_correction`.
    ///
    /// Source: algorithm 1 of the paper; PyTorch's `torch.optim.Adam`.
    pub fn epsilon_after_correction(self) -> Self {
        Adam { epsilon_after_correction: true, ..self }
    }

    /// Changes only the rows that are pushed, and leaves the other rows and their moments as they
    /// are. A row that is rarely pushed then keeps its moments until the next push, and moves less.
    /// `t` counts the gradients of the training, not of the row: a row that is pushed for the first
    /// time late in the training moves further than at the first gradient, up to `(1 - b1) / sqrt(1
    /// - b2)` times the rate, 3.2 by default. [`Adam::lazy_with_row_counts`] is the remedy.
    ///
    /// Source: TensorFlow 1's `tf.contrib.opt.LazyAdamOptimizer`; the paper has no such rule.
    pub fn lazy(self) -> Self {
        Adam { rows: RowUpdates::Pushed, ..self }
    }

    /// Changes only the rows that are pushed, and counts `t` for each row: a row that is first
    /// pushed at the thousandth gradient moves as at the first. In a dense variable every element
    /// counts the gradients that contain the variable. The kind of the rule is
    /// `lazy_adam_row_counts`.
    ///
    /// Cost: a third slot, `t`, initially 0, as large as the variable, and a loop that is not
    /// vectorized: 11 to 24 ns an element on two busy cores, where [`Adam::lazy`] takes 1 to 3. In
    /// `f32` a count ends at 2^24, where both corrections are 1 unless a beta is above 0.999999.
    ///
    /// Source: the row-wise counter of FBGEMM's embedding tables; the paper has no such rule.
    pub fn lazy_with_row_counts(self) -> Self {
        Adam { rows: RowUpdates::PushedAndCounted, ..self }
    }

    /// Returns the learning rate of an update.
    pub(super) fn rate(&self, at: ApplyAt) -> f64 {
        self.learning_rate.of(at)
    }

    /// Returns the step size of the `t`-th update at a learning rate, and its epsilon.
    fn correct(&self, rate: f64, t: i32) -> (f64, f64) {
        let root2 = (1.0 - self.beta2.powi(t)).sqrt();
        let alpha = rate * root2 / (1.0 - self.beta1.powi(t));
        // Both sides of the fraction of the corrected form are multiplied by `root2`.
        let factor = if self.epsilon_after_correction { root2 } else { 1.0 };
        (alpha, self.epsilon * factor)
    }

    pub(super) fn update<F: OptimizerFloat>(&self, at: ApplyAt) -> AdamUpdate<F> {
        // Beyond 2^31 updates both powers are zero.
        let t = i32::try_from(at.count).unwrap_or(i32::MAX);
        let (alpha, epsilon) = self.correct(self.rate(at), t);
        AdamUpdate {
            alpha: F::of(alpha),
            beta1: F::of(self.beta1),
            beta2: F::of(self.beta2),
            rest1: F::of(1.0 - self.beta1),
            rest2: F::of(1.0 - self.beta2),
            epsilon: F::of(epsilon),
        }
    }

    /// Returns whether epsilon is added to the root of the corrected moment.
    pub(super) fn adds_epsilon_after_correction(&self) -> bool {
        self.epsilon_after_correction
    }
}

impl Default for Adam {
    /// Creates the rule with the paper's default learning rate, 0.001.
    fn default() -> Self {
        Adam::new(0.001)
    }
}

pub(super) const SLOTS: [OptimizerSlot; 2] =
    [OptimizerSlot::new("m", 0.0), OptimizerSlot::new("v", 0.0)];

/// The slots of the rule that counts for each row.
const COUNTED_SLOTS: [OptimizerSlot; 3] =
    [OptimizerSlot::new("m", 0.0), OptimizerSlot::new("v", 0.0), OptimizerSlot::new("t", 0.0)];

impl Optimizer for Adam {
    fn kind(&self) -> &'static str {
        match (self.rows, self.epsilon_after_correction) {
            (RowUpdates::All, false) => "adam",
            (RowUpdates::All, true) => "adam_epsilon_after_correction",
            (RowUpdates::Pushed, false) => "lazy_adam",
            (RowUpdates::Pushed, true) => "lazy_adam_epsilon_after_correction",
            (RowUpdates::PushedAndCounted, false) => "lazy_adam_row_counts",
            (RowUpdates::PushedAndCounted, true) => "lazy_adam_row_counts_epsilon_after_correction",
        }
    }

    fn slots(&self) -> &[OptimizerSlot] {
        match self.rows {
            RowUpdates::PushedAndCounted => &COUNTED_SLOTS,
            RowUpdates::All | RowUpdates::Pushed => &SLOTS,
        }
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn moves_absent_rows(&self) -> bool {
        self.rows == RowUpdates::All
    }

    fn fault(&self) -> HyperparameterFault {
        fraction("beta1", self.beta1)
            .or(fraction("beta2", self.beta2))
            .or(not_negative("epsilon", self.epsilon))
            .or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Adam {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        if self.rows != RowUpdates::PushedAndCounted {
            return run.update(self.update(at));
        }
        let corrected = Cell::new(CorrectedAt { t: F::of(f64::NAN), update: self.update(at) });
        run.update(RowCountedUpdate { adam: self, rate: self.rate(at), corrected: &corrected });
    }
}

/// One update of Adam.
#[derive(Clone, Copy)]
pub(super) struct AdamUpdate<F> {
    alpha: F,
    beta1: F,
    beta2: F,
    /// `1 - beta`, rounded from f64. In f32, 1 - 0.999 would lose three digits.
    rest1: F,
    rest2: F,
    epsilon: F,
}

impl<F: OptimizerFloat> UpdateRule<F, 2> for AdamUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, [m, v]: [F; 2], g: F) -> (F, [F; 2]) {
        let m = self.beta1 * m + self.rest1 * g;
        let v = self.beta2 * v + self.rest2 * (g * g);
        (w - self.alpha * m / (v.sqrt() + self.epsilon), [m, v])
    }
}

/// One update of the rule that counts for each row. The elements of a row have one count, so the
/// last update is remembered and seldom computed again.
#[derive(Clone, Copy)]
struct RowCountedUpdate<'a, F> {
    adam: &'a Adam,
    rate: f64,
    corrected: &'a Cell<CorrectedAt<F>>,
}

/// The update of a row for the `t`-th time; for a `t` that is no number it is not computed yet.
#[derive(Clone, Copy)]
struct CorrectedAt<F> {
    t: F,
    update: AdamUpdate<F>,
}

impl<F: OptimizerFloat> RowCountedUpdate<'_, F> {
    #[cold]
    fn correct(self, t: F) -> AdamUpdate<F> {
        // Saturates; a count that is no number, from a damaged file, gives a value that is none.
        let (alpha, epsilon) = self.adam.correct(self.rate, Into::<f64>::into(t) as i32);
        let mut corrected = self.corrected.get();
        corrected.t = t;
        corrected.update.alpha = F::of(alpha);
        corrected.update.epsilon = F::of(epsilon);
        self.corrected.set(corrected);
        corrected.update
    }
}

impl<F: OptimizerFloat> UpdateRule<F, 3> for RowCountedUpdate<'_, F> {
    #[inline(always)]
    fn step(self, w: F, [m, v, t]: [F; 3], g: F) -> (F, [F; 3]) {
        let t = t + F::of(1.0);
        let last = self.corrected.get();
        let update = if last.t == t { last.update } else { self.correct(t) };
        let (w, [m, v]) = update.step(w, [m, v], g);
        (w, [m, v, t])
    }
}
