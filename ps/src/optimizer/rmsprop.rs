//! RMSProp, with momentum and centered, as TensorFlow 1 computes it.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, fraction, loops, positive};

/// RMSProp: `r += (1-d) (g^2 - r)`, `m = u m + lr g / sqrt(r + e)`, `w -= m`. Centered, with the
/// gradient's variance for its square: `c += (1-d) (g - c)` and `sqrt(r - c^2 + e)`.
///
/// Source: T. Tieleman, G. Hinton, "Lecture 6.5 - rmsprop: Divide the gradient by a running average
/// of its recent magnitude", 2012 (Coursera, Neural Networks for Machine Learning), and, centered
/// and with this momentum, A. Graves, "Generating Sequences With Recurrent Neural Networks", 2013
/// (arXiv:1308.0850), equations 38 to 41, in the form of TensorFlow 1's RMSProp.
///
/// Slots: `rms` (`r`), starting at **1**, in the unit of the gradient's square; `momentum` (`m`),
/// starting at 0, in that of the value, kept for a momentum of 0 too; centered also `mg` (`c`),
/// starting at 0, in that of the gradient.
///
/// The lecture names neither a start of `rms` nor an epsilon, and Keras starts it at 0; that it
/// starts at 1 here, as in TensorFlow 1, damps the first steps. The learning rate is a part of
/// `momentum`, other than in [`Momentum`](super::Momentum). Where rounding makes the variance
/// negative, TensorFlow takes the root all the same, and gets NaN or a step without bound; here the
/// variance is then 0.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsProp {
    learning_rate: Schedule,
    decay: f64,
    momentum: f64,
    epsilon: f64,
    centered: bool,
}

impl RmsProp {
    /// RMSProp at this learning rate, which has no default, with a decay of 0.9, no momentum and
    /// epsilon 1e-10, not centered.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        RmsProp {
            learning_rate: learning_rate.into(),
            decay: 0.9,
            momentum: 0.0,
            epsilon: 1e-10,
            centered: false,
        }
    }

    /// How much of the mean square, and of the mean, each update keeps, in `[0, 1)`. Default: 0.9.
    pub fn decay(self, decay: f64) -> Self {
        RmsProp { decay, ..self }
    }

    /// How much of the step before is in the next, in `[0, 1)`. Default: 0.
    pub fn momentum(self, momentum: f64) -> Self {
        RmsProp { momentum, ..self }
    }

    /// What is added within the root, above 0, in the unit of the gradient's square. Default:
    /// 1e-10.
    pub fn epsilon(self, epsilon: f64) -> Self {
        RmsProp { epsilon, ..self }
    }

    /// Divides by the root of the variance and not of the mean square: a third slot.
    pub fn centered(self) -> Self {
        RmsProp { centered: true, ..self }
    }
}

const SLOTS: [SlotSpec; 3] =
    [SlotSpec::new("rms", 1.0), SlotSpec::new("momentum", 0.0), SlotSpec::new("mg", 0.0)];

impl Optimizer for RmsProp {
    fn kind(&self) -> &'static str {
        if self.centered { "rmsprop_centered" } else { "rmsprop" }
    }

    fn slots(&self) -> &[SlotSpec] {
        if self.centered { &SLOTS } else { &SLOTS[..2] }
    }

    loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> Fault {
        fraction("decay", self.decay)
            .or(fraction("momentum", self.momentum))
            .or(positive("epsilon", self.epsilon))
            .or(self.learning_rate.fault())
    }
}

impl Dense for RmsProp {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        let plain = Plain {
            rate: F::of(self.learning_rate.of(at)),
            rest: F::of(1.0 - self.decay),
            momentum: F::of(self.momentum),
            epsilon: F::of(self.epsilon),
        };
        if self.centered { run.update(Centered(plain)) } else { run.update(plain) }
    }
}

#[derive(Clone, Copy)]
struct Plain<F> {
    rate: F,
    /// `1 - decay`, rounded from f64.
    rest: F,
    momentum: F,
    epsilon: F,
}

impl<F: Float> Plain<F> {
    /// A mean that has moved towards a number.
    #[inline(always)]
    fn towards(self, mean: F, number: F) -> F {
        mean + (number - mean) * self.rest
    }

    /// The momentum after a gradient whose square is about so much.
    #[inline(always)]
    fn moved(self, momentum: F, g: F, square: F) -> F {
        momentum * self.momentum + g * self.rate / (square + self.epsilon).sqrt()
    }
}

impl<F: Float> Rule<F, 2> for Plain<F> {
    #[inline(always)]
    fn step(self, w: F, [r, m]: [F; 2], g: F) -> (F, [F; 2]) {
        let r = self.towards(r, g * g);
        let m = self.moved(m, g, r);
        (w - m, [r, m])
    }
}

#[derive(Clone, Copy)]
struct Centered<F>(Plain<F>);

impl<F: Float> Rule<F, 3> for Centered<F> {
    #[inline(always)]
    fn step(self, w: F, [r, m, c]: [F; 3], g: F) -> (F, [F; 3]) {
        let (r, c) = (self.0.towards(r, g * g), self.0.towards(c, g));
        let (variance, zero) = (r - c * c, F::of(0.0));
        // Not the greater of the two: NaN is to stay NaN.
        let variance = if variance < zero { zero } else { variance };
        let m = self.0.moved(m, g, variance);
        (w - m, [r, m, c])
    }
}
