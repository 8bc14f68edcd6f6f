//! Momentum and Nesterov momentum, as TensorFlow computes them.

use super::kernel::{Elements, Float, Rule};
use super::{ApplyAt, Dense, Fault, Optimizer, Schedule, SlotSpec, fraction, loops, not_negative};

/// Momentum: `m = u m + g`, `w -= lr m`; with Nesterov's look ahead `w -= lr g + lr u m`.
///
/// Source: B. T. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964
/// (USSR Computational Mathematics and Mathematical Physics 4), and, for the look ahead,
/// I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum
/// in deep learning", 2013 (ICML), in the form of TensorFlow's Momentum: values are the point at
/// which the latter takes the gradient, as in Y. Bengio, N. Boulanger-Lewandowski, R. Pascanu,
/// "Advances in Optimizing Recurrent Networks", 2012 (arXiv:1212.0901).
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
    l2: f64,
    weight_decay: f64,
}

impl Momentum {
    /// Momentum at this learning rate, with so much of the slot kept by each update, in `[0, 1)`.
    /// Neither has a default; 0.9 is common, which is as if each gradient counted ten times.
    pub fn new(learning_rate: impl Into<Schedule>, momentum: f64) -> Self {
        let learning_rate = learning_rate.into();
        Momentum { learning_rate, momentum, nesterov: false, l2: 0.0, weight_decay: 0.0 }
    }

    /// The same with Nesterov's look ahead: the gradient counts as if the values had already gone
    /// on by the momentum.
    pub fn nesterov(learning_rate: impl Into<Schedule>, momentum: f64) -> Self {
        Momentum { nesterov: true, ..Momentum::new(learning_rate, momentum) }
    }

    /// The factor of half the squared weight in the loss, not below 0: `g + l2 w` for each gradient,
    /// which gathers in the slot. Default: 0.
    pub fn l2(self, l2: f64) -> Self {
        Momentum { l2, ..self }
    }

    /// Which share of a weight is lost by an update at learning rate 1, not below 0, beside the
    /// gradient and the slot: `w -= lr d w`. Default: 0.
    ///
    /// Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019
    /// (arXiv:1711.05101), algorithm 1, which multiplies the decay with a schedule alone: a decay
    /// `d` of the paper is `d / lr` here, as in [`AdamW`](super::AdamW).
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Momentum { weight_decay, ..self }
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
        fraction("momentum", self.momentum)
            .or(not_negative("l2", self.l2))
            .or(not_negative("weight_decay", self.weight_decay))
            .or(self.learning_rate.fault())
    }
}

impl Dense for Momentum {
    fn drive<F: Float>(&self, at: ApplyAt, run: impl Elements<F>) {
        let decays = self.l2 != 0.0 || self.weight_decay != 0.0;
        let plain = Plain::<F, true> {
            rate: F::of(self.learning_rate.of(at)),
            momentum: F::of(self.momentum),
            l2: F::of(self.l2),
            decay: F::of(self.weight_decay),
        };
        match (self.nesterov, decays) {
            (true, true) => run.update(Nesterov(plain)),
            (true, false) => run.update(Nesterov(plain.bare())),
            (false, true) => run.update(plain),
            (false, false) => run.update(plain.bare()),
        }
    }
}

/// Without what is hardly ever asked for, most loops are vectors that else are not: the compiler makes a
/// branch of each choice.
#[derive(Clone, Copy)]
struct Plain<F, const DECAYS: bool> {
    rate: F,
    momentum: F,
    l2: F,
    decay: F,
}

impl<F: Float, const DECAYS: bool> Plain<F, DECAYS> {
    /// The same, of a rule without any decay.
    fn bare(self) -> Plain<F, false> {
        let Plain { rate, momentum, l2, decay } = self;
        Plain { rate, momentum, l2, decay }
    }

    /// The gradient, the slot after it, and the value after its decay.
    #[inline(always)]
    fn gathered(self, w: F, m: F, g: F) -> (F, F, F) {
        if !DECAYS {
            return (g, m * self.momentum + g, w);
        }
        let g = g.plus(self.l2, w);
        (g, m * self.momentum + g, w.plus(F::of(0.0) - self.decay * self.rate, w))
    }
}

impl<F: Float, const DECAYS: bool> Rule<F, 1> for Plain<F, DECAYS> {
    #[inline(always)]
    fn step(self, w: F, [m]: [F; 1], g: F) -> (F, [F; 1]) {
        let (_, m, w) = self.gathered(w, m, g);
        (w - m * self.rate, [m])
    }
}

#[derive(Clone, Copy)]
struct Nesterov<F, const DECAYS: bool>(Plain<F, DECAYS>);

impl<F: Float, const DECAYS: bool> Rule<F, 1> for Nesterov<F, DECAYS> {
    #[inline(always)]
    fn step(self, w: F, [m]: [F; 1], g: F) -> (F, [F; 1]) {
        let Plain { rate, momentum, .. } = self.0;
        let (g, m, w) = self.0.gathered(w, m, g);
        (w - (g * rate + m * momentum * rate), [m])
    }
}
