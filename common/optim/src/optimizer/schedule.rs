//! Learning-rate schedules over the global step.

use super::{ApplyAt, HyperparameterFault, fault_unless, not_negative};

/// A learning rate for each global step. A plain number is a constant schedule.
///
/// The step is that of the gradient's token ([`ApplyAt::step`]): 0 for the first, and the same for
/// all gradients of a synchronous step and on every shard. Rates are computed in `f64` and rounded
/// to the variable's type by the rule. Powers and cosines are those of the platform, whose last
/// digit may differ between machines.
///
/// ```
/// use pushpull_optim::optimizer::{Momentum, Schedule};
///
/// // Up to 0.4 in 500 steps, and down to a tenth of it 10,000 steps later.
/// let rate = Schedule::steps(0.4, [(10_000, 0.04)]).warm_up(500);
/// assert_eq!(rate.at(249), 0.2);
/// let rule = Momentum::new(rate, 0.9);
/// ```
#[doc(alias = "exponential_decay")]
#[doc(alias = "piecewise_constant")]
#[doc(alias = "cosine_decay")]
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    course: Course,
    warm_up: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Course {
    Constant(f64),
    Steps { first: f64, then: Vec<(u64, f64)> },
    Exponential { initial: f64, decay_rate: f64, decay_steps: u64, staircase: bool },
    Cosine { initial: f64, last: f64, decay_steps: u64 },
}

impl From<f64> for Schedule {
    fn from(rate: f64) -> Self {
        Course::Constant(rate).into()
    }
}

impl From<Course> for Schedule {
    fn from(course: Course) -> Self {
        Schedule { course, warm_up: 0 }
    }
}

impl Schedule {
    /// Returns a piecewise constant schedule: the `first` rate up to and including the first named
    /// step, then the rate named with it up to the next, and so on. This is TensorFlow's
    /// `piecewise_constant`, in which a boundary belongs to the rate before it.
    pub fn steps(first: f64, then: impl IntoIterator<Item = (u64, f64)>) -> Self {
        Course::Steps { first, then: then.into_iter().collect() }.into()
    }

    /// Returns the schedule `initial decay_rate^(step / decay_steps)`: TensorFlow's
    /// `exponential_decay`. The decay rate must be above 0 and at most 1.
    pub fn exponential(initial: f64, decay_rate: f64, decay_steps: u64) -> Self {
        Course::Exponential { initial, decay_rate, decay_steps, staircase: false }.into()
    }

    /// Returns an exponential schedule whose exponent is rounded down: the rate falls every
    /// `decay_steps` steps.
    pub fn staircase(initial: f64, decay_rate: f64, decay_steps: u64) -> Self {
        Course::Exponential { initial, decay_rate, decay_steps, staircase: true }.into()
    }

    /// Returns half a cosine from the `initial` rate to the `last` over `decay_steps` steps, which
    /// then stays at the last: `last + (initial - last) (1 + cos(pi step / decay_steps)) / 2`. This
    /// is TensorFlow's `cosine_decay`, whose `alpha` is `last / initial`.
    ///
    /// Source: I. Loshchilov, F. Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    /// 2017 (arXiv:1608.03983), equation 5, without restarts.
    pub fn cosine(initial: f64, last: f64, decay_steps: u64) -> Self {
        Course::Cosine { initial, last, decay_steps }.into()
    }

    /// Prepends a linear warm-up of `steps` steps: the rate is `(step + 1) / steps` of the
    /// schedule's first rate, from an equal share in the first step to all of it in the last. The
    /// steps of the schedule itself count from its end. Default: none.
    ///
    /// Source: P. Goyal and others, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    /// 2017 (arXiv:1706.02677), section 2.2, gradual warmup, which starts at the rate for one
    /// worker instead of an equal share.
    pub fn warm_up(self, steps: u64) -> Self {
        Schedule { warm_up: steps, ..self }
    }

    /// Returns the rate at a step.
    pub fn at(&self, step: u64) -> f64 {
        match step.checked_sub(self.warm_up) {
            Some(step) => self.course.at(step),
            None => self.course.at(0) * ((step + 1) as f64 / self.warm_up as f64),
        }
    }

    /// Returns the rate of an update.
    pub(super) fn of(&self, at: ApplyAt) -> f64 {
        self.at(at.step) * at.rate
    }

    /// Returns the first invalid parameter: a rate that is negative or not finite, steps that do
    /// not rise, or a decay over no steps.
    pub(super) fn fault(&self) -> HyperparameterFault {
        let rate = |rate| not_negative("learning_rate", rate);
        let steps = |steps| fault_unless(steps > 0, "decay_steps", 0.0, "it must be above 0");
        match &self.course {
            Course::Constant(constant) => rate(*constant),
            Course::Steps { first, then } => {
                let falls = then.windows(2).find(|pair| pair[0].0 >= pair[1].0);
                let falls = falls.map(|pair| ("steps", pair[1].0 as f64, "steps must rise"));
                rate(*first).or(then.iter().find_map(|then| rate(then.1))).or(falls)
            }
            Course::Exponential { initial, decay_rate, decay_steps, .. } => {
                let usable = *decay_rate > 0.0 && *decay_rate <= 1.0;
                let reason = "it must be above 0 and at most 1";
                let decay = fault_unless(usable, "decay_rate", *decay_rate, reason);
                rate(*initial).or(decay).or(steps(*decay_steps))
            }
            Course::Cosine { initial, last, decay_steps } => {
                rate(*initial).or(rate(*last)).or(steps(*decay_steps))
            }
        }
    }

    /// Returns the lowest rate that the schedule names. An exponential schedule names only its
    /// first rate, and falls from there towards 0.
    pub(super) fn min_rate(&self) -> f64 {
        match &self.course {
            Course::Constant(rate) => *rate,
            Course::Steps { first, then } => then.iter().map(|then| then.1).fold(*first, f64::min),
            Course::Exponential { initial, .. } => *initial,
            Course::Cosine { initial, last, .. } => initial.min(*last),
        }
    }
}

impl Course {
    fn at(&self, step: u64) -> f64 {
        match *self {
            Course::Constant(rate) => rate,
            Course::Steps { first, ref then } => {
                let passed = then.partition_point(|&(boundary, _)| boundary < step);
                passed.checked_sub(1).map_or(first, |last| then[last].1)
            }
            Course::Exponential { initial, decay_rate, decay_steps, staircase } => {
                let exponent = step as f64 / decay_steps as f64;
                let exponent = if staircase { exponent.floor() } else { exponent };
                initial * decay_rate.powf(exponent)
            }
            Course::Cosine { initial, last, decay_steps } => {
                let part = step.min(decay_steps) as f64 / decay_steps as f64;
                let left = 0.5 * (1.0 + (std::f64::consts::PI * part).cos());
                // Never below both rates, as a formula with their difference could be.
                initial * left + last * (1.0 - left)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: &Schedule, expected: &[(u64, f64)]) {
        assert_eq!(schedule.fault(), None);
        for &(step, expected) in expected {
            let found = schedule.at(step);
            assert!((found - expected).abs() < 1e-15, "{found} at {step}, not {expected}");
            let falls = matches!(schedule.course, Course::Exponential { .. });
            assert!(falls || found >= schedule.min_rate(), "{found} at {step} of {schedule:?}");
        }
    }

    #[test]
    fn rates_follow_their_formulas() {
        check(&0.1.into(), &[(0, 0.1), (u64::MAX, 0.1)]);
        let steps = Schedule::steps(1.0, [(10, 0.5), (20, 0.1)]);
        check(&steps, &[(0, 1.0), (10, 1.0), (11, 0.5), (20, 0.5), (21, 0.1), (u64::MAX, 0.1)]);
        let exponential = Schedule::exponential(0.5, 0.25, 100);
        check(&exponential, &[(0, 0.5), (50, 0.25), (100, 0.125), (200, 0.03125), (u64::MAX, 0.0)]);
        let staircase = Schedule::staircase(0.5, 0.25, 100);
        check(&staircase, &[(0, 0.5), (99, 0.5), (100, 0.125), (199, 0.125), (200, 0.03125)]);
        let cosine = Schedule::cosine(1.0, 0.25, 60);
        let sixth = 0.25 + 0.75 * 0.75;
        check(&cosine, &[(0, 1.0), (20, sixth), (30, 0.625), (60, 0.25), (61, 0.25)]);
    }

    #[test]
    fn a_schedule_starts_after_its_warm_up() {
        let schedule = Schedule::staircase(0.5, 0.25, 100).warm_up(5);
        check(&schedule.clone().warm_up(0), &[(0, 0.5)]);
        let rises = [(0, 0.1), (1, 0.2), (3, 0.4), (4, 0.5), (5, 0.5)];
        for (step, expected) in rises.into_iter().chain([(104, 0.5), (105, 0.125)]) {
            assert!((schedule.at(step) - expected).abs() < 1e-15, "at {step}");
        }
    }

    #[test]
    fn invalid_schedules_are_rejected_by_parameter() {
        let faults = [
            (f64::NAN.into(), "learning_rate"),
            (Schedule::from(-0.1).warm_up(5), "learning_rate"),
            (Schedule::steps(-1.0, []), "learning_rate"),
            (Schedule::steps(1.0, [(5, 0.5), (9, f64::INFINITY)]), "learning_rate"),
            (Schedule::steps(1.0, [(5, 0.5), (5, 0.1)]), "steps"),
            (Schedule::exponential(f64::INFINITY, 0.5, 1), "learning_rate"),
            (Schedule::exponential(1.0, 0.0, 1), "decay_rate"),
            (Schedule::exponential(1.0, f64::NAN, 1), "decay_rate"),
            (Schedule::staircase(1.0, 1.5, 1), "decay_rate"),
            (Schedule::staircase(1.0, 0.5, 0), "decay_steps"),
            (Schedule::cosine(-1.0, 0.0, 1), "learning_rate"),
            (Schedule::cosine(1.0, -1.0, 1), "learning_rate"),
            (Schedule::cosine(1.0, 0.0, 0), "decay_steps"),
        ];
        for (schedule, name) in faults {
            assert_eq!(schedule.fault().map(|fault| fault.0), Some(name), "{schedule:?}");
        }
    }
}
