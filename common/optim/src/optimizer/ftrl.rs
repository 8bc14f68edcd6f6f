//! FTRL-Proximal, as TensorFlow computes it.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, fault_unless,
    impl_loops, not_negative,
};

/// FTRL-Proximal, which keeps weights at exactly 0 until their gradients add up to enough.
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
/// algorithm 1, in the form of TensorFlow's Ftrl, which adds the shrinkage and powers other than
/// the root.
///
/// Two slots: `accum` (`n`), initially 0.1, in the unit of the squared gradient, and `linear`
/// (`z`), initially 0, in the unit of the gradient.
///
/// Notes:
///
/// - Every update computes the value from `z` only. The first update discards the initial value of
///   a variable, so its initializer should give zeros.
/// - The paper divides by `(beta + sqrt(n)) / lr + l2`. Here, as in TensorFlow, l2 and shrinkage
///   count twice, `n` starts above 0, and beta is 0. The shrinkage is not part of `n`.
/// - `p = 0.5` uses a root. Other powers use the platform's `pow`, whose last digit varies, and
///   cost about fifteen times as much.
/// - If the slot starts at 0 and there is no l2, a gradient whose square underflows to 0 makes a
///   value infinite.
/// - A smaller learning rate also scales the sum of all earlier gradients. A falling [`Schedule`]
///   has this effect, and stale gradients cannot be damped.
#[derive(Clone, Debug, PartialEq)]
pub struct Ftrl {
    learning_rate: Schedule,
    learning_rate_power: f64,
    l1: f64,
    l2: f64,
    l2_shrinkage: f64,
    beta: f64,
    slots: [OptimizerSlot; 2],
}

/// Returns the slots, with this initial `accum`.
const fn slots(initial: f64) -> [OptimizerSlot; 2] {
    [OptimizerSlot::new("accum", initial), OptimizerSlot::new("linear", 0.0)]
}

impl Ftrl {
    /// Creates the rule with this learning rate, which must stay above 0 and has no default, a
    /// power of -0.5, a slot that is initially 0.1, and no regularization. The rule divides by the
    /// rate, so an exponential decay stops at 1e-20.
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

    /// Sets the power of the sum of squares by which steps become smaller, at most 0. With 0 the
    /// learning rate stays constant. Default: -0.5.
    pub fn learning_rate_power(self, power: f64) -> Self {
        Ftrl { learning_rate_power: power, ..self }
    }

    /// Sets the initial `accum`, at least 0, in the unit of the squared gradient. Default: 0.1.
    pub fn initial_accumulator(self, initial: f64) -> Self {
        Ftrl { slots: slots(initial), ..self }
    }

    /// Sets the sum that gradients must reach before a weight leaves 0, in the unit of the
    /// gradient, at least 0. Default: 0.
    pub fn l1(self, l1: f64) -> Self {
        Ftrl { l1, ..self }
    }

    /// Sets the factor of the squared weight in the loss, at least 0. Default: 0.
    pub fn l2(self, l2: f64) -> Self {
        Ftrl { l2, ..self }
    }

    /// Sets the factor of the squared weight as an addition to each gradient, which is not part of
    /// `accum`; at least 0. Default: 0.
    pub fn l2_shrinkage(self, l2_shrinkage: f64) -> Self {
        Ftrl { l2_shrinkage, ..self }
    }

    /// Sets the paper's addition to the root, in the unit of the gradient, at least 0. Default: 0.
    pub fn beta(self, beta: f64) -> Self {
        Ftrl { beta, ..self }
    }
}

/// The minimum learning rate. The rule divides by the rate, and the quotient must be finite as an
/// `f32`.
const RATE_MIN: f64 = 1e-20;

impl Optimizer for Ftrl {
    fn kind(&self) -> &'static str {
        "ftrl"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &self.slots
    }

    impl_loops!();

    fn fault(&self) -> HyperparameterFault {
        let power = self.learning_rate_power;
        let min_rate = self.learning_rate.min_rate();
        let usable = power.is_finite() && power <= 0.0;
        fault_unless(usable, "learning_rate_power", power, "it must be finite and at most 0")
            .or(not_negative("initial_accumulator", self.slots[0].initial))
            .or(not_negative("l1", self.l1))
            .or(not_negative("l2", self.l2))
            .or(not_negative("l2_shrinkage", self.l2_shrinkage))
            .or(not_negative("beta", self.beta))
            .or(self.learning_rate.fault())
            .or(fault_unless(
                min_rate >= RATE_MIN,
                "learning_rate",
                min_rate,
                "it must be at least 1e-20",
            ))
    }
}

impl BuiltInRule for Ftrl {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        let rate = self.learning_rate.at(at.step).max(RATE_MIN);
        let root = FtrlUpdate::<F, true> {
            rate: F::of(rate),
            power: F::of(-self.learning_rate_power),
            l1: F::of(self.l1),
            twice_l2: F::of(2.0 * (self.l2 + self.beta / (2.0 * rate))),
            twice_shrinkage: F::of(2.0 * self.l2_shrinkage),
        };
        if self.learning_rate_power == -0.5 {
            return run.update(root);
        }
        let FtrlUpdate { rate, power, l1, twice_l2, twice_shrinkage } = root;
        run.update(FtrlUpdate::<F, false> { rate, power, l1, twice_l2, twice_shrinkage });
    }
}

/// One update, with a root or another power.
#[derive(Clone, Copy)]
struct FtrlUpdate<F, const ROOT: bool> {
    rate: F,
    power: F,
    l1: F,
    twice_l2: F,
    twice_shrinkage: F,
}

impl<F: OptimizerFloat, const ROOT: bool> FtrlUpdate<F, ROOT> {
    #[inline(always)]
    fn power_of(self, n: F) -> F {
        if ROOT { n.sqrt() } else { n.pow(self.power) }
    }
}

impl<F: OptimizerFloat, const ROOT: bool> UpdateRule<F, 2> for FtrlUpdate<F, ROOT> {
    #[inline(always)]
    fn step(self, w: F, [n, z]: [F; 2], g: F) -> (F, [F; 2]) {
        let grown = n + g * g;
        let before = self.power_of(n);
        let after = self.power_of(grown);
        let z = z + (g + self.twice_shrinkage * w - (after - before) / self.rate * w);
        let zero = F::of(0.0);
        let towards = if z < zero { zero - self.l1 } else { self.l1 };
        let w = (towards - z) / (after / self.rate + self.twice_l2);
        (if z.abs() > self.l1 { w } else { zero }, [grown, z])
    }
}
