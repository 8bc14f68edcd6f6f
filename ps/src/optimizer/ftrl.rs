//! FTRL-Proximal, as TensorFlow computes it.

use super::kernel::{Elements, Float, Rule};
use super::{
    ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, fault_unless, loops, not_negative,
};

/// FTRL-Proximal, which keeps weights at exactly 0 until their gradients add up to something.
///
/// With `p = -learning_rate_power` and `L = l2 + beta / (2 lr)`:
///
/// ```text
/// n' = n + g^2
/// z += g + 2 l2_shrinkage w - (n'^p - n^p) / lr w
/// w  = if |z| > l1 { (sign(z) l1 - z) / (n'^p / lr + 2 L) } else { 0 }
/// n  = n'
/// ```
///
/// Source: H. B. McMahan and others, "Ad Click Prediction: a View from the Trenches", 2013 (KDD),
/// algorithm 1, in the form of TensorFlow's Ftrl, from which the shrinkage and powers other than
/// the root come.
///
/// Two slots: `accum` (`n`), starting at 0.1, in the unit of the gradient's square; `linear` (`z`),
/// starting at 0, in that of the gradient.
///
/// A value is made anew of `z` by every update: what a variable starts with is forgotten by the
/// first, so that its initializer should give zeros. The paper divides by `(beta + sqrt(n)) / lr +
/// l2`; here, as in TensorFlow, l2 and shrinkage count twice, `n` starts above 0, and beta is 0.
/// The shrinkage is no part of `n`. A root is taken for `p = 0.5`; other powers are the platform's
/// `pow`, with its last digit, and cost some fifteen times as much. With a slot that starts at 0
/// and no l2, a gradient so small that its square is 0 makes a value infinite. A smaller learning
/// rate moves all that the gradients before have added up to: a [`Schedule`] that falls does so, and
/// stale gradients cannot be damped.
#[derive(Clone, Debug, PartialEq)]
pub struct Ftrl {
    learning_rate: Schedule,
    learning_rate_power: f64,
    l1: f64,
    l2: f64,
    l2_shrinkage: f64,
    beta: f64,
    slots: [SlotSpec; 2],
}

/// The slots, of which the first starts with so much.
const fn slots(initial: f64) -> [SlotSpec; 2] {
    [SlotSpec::new("accum", initial), SlotSpec::new("linear", 0.0)]
}

impl Ftrl {
    /// FTRL at this learning rate, which stays above 0 and has no default, with a power of -0.5, a
    /// slot that starts at 0.1, and no regularization. Of a rate that decays exponentially 1e-20 is
    /// left at the least, as the rule divides by it.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        Ftrl {
            learning_rate: learning_rate.into(),
            learning_rate_power: -0.5,
            l1: 0.0,
            l2: 0.0,
            l2_shrinkage: 0.0,
            beta: 0.0,
            slots: slots(0.1),
        }
    }

    /// The power of the squares' sum with which steps become smaller, not above 0; 0 keeps the
    /// learning rate as it is. Default: -0.5.
    pub fn learning_rate_power(self, power: f64) -> Self {
        Ftrl { learning_rate_power: power, ..self }
    }

    /// What `accum` starts with, not below 0, in the unit of the gradient's square. Default: 0.1.
    pub fn initial_accumulator(self, initial: f64) -> Self {
        Ftrl { slots: slots(initial), ..self }
    }

    /// How far the gradients must add up before a weight leaves 0, in their unit, not below 0.
    /// Default: 0.
    pub fn l1(self, l1: f64) -> Self {
        Ftrl { l1, ..self }
    }

    /// The factor of the squared weight in the loss, not below 0. Default: 0.
    pub fn l2(self, l2: f64) -> Self {
        Ftrl { l2, ..self }
    }

    /// The same as an addition to each gradient, which `accum` does not see, not below 0. Default:
    /// 0.
    pub fn l2_shrinkage(self, l2_shrinkage: f64) -> Self {
        Ftrl { l2_shrinkage, ..self }
    }

    /// What the paper adds to the root, in the unit of the gradient, not below 0. Default: 0.
    pub fn beta(self, beta: f64) -> Self {
        Ftrl { beta, ..self }
    }
}

/// The rule divides by the rate, and what it divides must stay finite as an `f32`.
const LEAST_RATE: f64 = 1e-20;

impl Optimizer for Ftrl {
    fn kind(&self) -> &'static str {
        "ftrl"
    }

    fn slots(&self) -> &[SlotSpec] {
        &self.slots
    }

    loops!();

    fn fault(&self) -> Fault {
        let (power, least) = (self.learning_rate_power, self.learning_rate.least());
        let usable = power.is_finite() && power <= 0.0;
        fault_unless(usable, "learning_rate_power", power, "it must be finite and not above 0")
            .or(not_negative("initial_accumulator", self.slots[0].initial))
            .or(not_negative("l1", self.l1))
            .or(not_negative("l2", self.l2))
            .or(not_negative("l2_shrinkage", self.l2_shrinkage))
            .or(not_negative("beta", self.beta))
            .or(self.learning_rate.fault())
            .or(fault_unless(
                least >= LEAST_RATE,
                "learning_rate",
                least,
                "it must stay above 0, and be 1e-20 at the least",
            ))
    }
}

impl Dense for Ftrl {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        let rate = self.learning_rate.at(at.step).max(LEAST_RATE);
        let root = Update::<F, true> {
            rate: F::of(rate),
            power: F::of(-self.learning_rate_power),
            l1: F::of(self.l1),
            twice_l2: F::of(2.0 * (self.l2 + self.beta / (2.0 * rate))),
            twice_shrinkage: F::of(2.0 * self.l2_shrinkage),
        };
        if self.learning_rate_power == -0.5 {
            return run.update(root);
        }
        let Update { rate, power, l1, twice_l2, twice_shrinkage } = root;
        run.update(Update::<F, false> { rate, power, l1, twice_l2, twice_shrinkage });
    }
}

/// One update, with a root or with a power.
#[derive(Clone, Copy)]
struct Update<F, const ROOT: bool> {
    rate: F,
    power: F,
    l1: F,
    twice_l2: F,
    twice_shrinkage: F,
}

impl<F: Float, const ROOT: bool> Update<F, ROOT> {
    #[inline(always)]
    fn raised(self, n: F) -> F {
        if ROOT { n.sqrt() } else { n.pow(self.power) }
    }
}

impl<F: Float, const ROOT: bool> Rule<F, 2> for Update<F, ROOT> {
    #[inline(always)]
    fn step(self, w: F, [n, z]: [F; 2], g: F) -> (F, [F; 2]) {
        let grown = n + g * g;
        let (before, after) = (self.raised(n), self.raised(grown));
        let z = z + (g + self.twice_shrinkage * w - (after - before) / self.rate * w);
        let zero = F::of(0.0);
        let towards = if z < zero { zero - self.l1 } else { self.l1 };
        let w = (towards - z) / (after / self.rate + self.twice_l2);
        (if z.abs() > self.l1 { w } else { zero }, [grown, z])
    }
}
