//! Momentum (Polyak, 1964) and Nesterov momentum (Sutskever and others, 2013), as TensorFlow
//! computes them: the learning rate is no part of the slot.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, fraction, loops};

/// Momentum: `m = u m + g`, `w -= lr m`; with Nesterov's look ahead `w -= lr g + lr u m`.
///
/// One slot, `momentum`, starting at 0, in the unit of the gradient.
///
/// The papers, and Keras, have the learning rate in the slot (`m = u m - lr g`, `w += m`). That is
/// the same for a learning rate that does not change; here, as in TensorFlow 1, a change of it
/// counts at once, for what has gathered too. TensorFlow has Nesterov's momentum as a switch of the
/// one rule; here they are two kinds, `momentum` and `nesterov`, so that ps tasks cannot mix them.
#[derive(Clone, Debug, PartialEq)]
pub struct Momentum {
    learning_rate: Schedule,
    momentum: f64,
    nesterov: bool,
}

impl Momentum {
    /// Momentum at this learning rate, with so much of the slot kept by each update, in `[0, 1)`.
    /// Neither has a default; 0.9 is common, which is as if each gradient counted ten times.
    pub fn new(learning_rate: impl Into<Schedule>, momentum: f64) -> Self {
        Momentum { learning_rate: learning_rate.into(), momentum, nesterov: false }
    }

    /// The same with Nesterov's look ahead: the gradient counts as if the values had already gone
    /// on by the momentum.
    pub fn nesterov(learning_rate: impl Into<Schedule>, momentum: f64) -> Self {
        Momentum { learning_rate: learning_rate.into(), momentum, nesterov: true }
    }
}

impl Optimizer for Momentum {
    fn kind(&self) -> &'static str {
        if self.nesterov { "nesterov" } else { "momentum" }
    }

    fn slots(&self) -> &[SlotSpec] {
        const { &[SlotSpec::new("momentum", 0.0)] }
    }

    loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> Fault {
        fraction("momentum", self.momentum).or(self.learning_rate.fault())
    }
}

impl Dense for Momentum {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        let (rate, momentum) = (F::of(self.learning_rate.of(at)), F::of(self.momentum));
        if self.nesterov {
            run.update(Update::<F, true> { rate, momentum });
        } else {
            run.update(Update::<F, false> { rate, momentum });
        }
    }
}

#[derive(Clone, Copy)]
struct Update<F, const NESTEROV: bool> {
    rate: F,
    momentum: F,
}

impl<F: Float, const NESTEROV: bool> Rule<F, 1> for Update<F, NESTEROV> {
    #[inline(always)]
    fn step(self, w: F, [m]: [F; 1], g: F) -> (F, [F; 1]) {
        let m = m * self.momentum + g;
        let change =
            if NESTEROV { g * self.rate + m * self.momentum * self.rate } else { m * self.rate };
        (w - change, [m])
    }
}
