//! Momentum and Nesterov momentum, as TensorFlow computes them.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, fraction,
    impl_loops, not_negative,
};

/// Momentum: `m = u m + g`, `w -= lr m`. With Nesterov's look-ahead: `w -= lr g + lr u m`.
///
/// Source: B. T. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964
/// (USSR Computational Mathematics and Mathematical Physics 4). The look-ahead is from I.
/// Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in
/// deep learning", 2013 (ICML), in the form of TensorFlow's Momentum: the values are the point at
/// which the gradient is taken, as in Y. Bengio, N. Boulanger-Lewandowski, R. Pascanu, "Advances in
/// Optimizing Recurrent Networks", 2012 (arXiv:1212.0901).
///
/// One slot, `momentum`, initially 0, in the unit of the gradient.
///
/// In the papers and in Keras the slot contains the learning rate (`m = u m - lr g`, `w += m`). For
/// a constant learning rate that is the same. Here, as in TensorFlow 1, a new rate also applies to
/// the accumulated momentum at once. In TensorFlow Nesterov's momentum is a switch of one rule.
/// Here the kinds are two, `momentum` and `nesterov`, so that ps tasks cannot mix them.
#[derive(Clone, Debug, PartialEq)]
pub struct Momentum {
    learning_rate: Schedule,
    momentum: f64,
    nesterov: bool,
    l2: f64,
    weight_decay: f64,
}

impl Momentum {
    /// Creates the rule with this learning rate. `momentum` is the share of the slot that an update
    /// keeps, in `[0, 1)`. Neither has a default. A common share is 0.9, with which each gradient
    /// counts ten times in total.
    pub fn new(learning_rate: impl Into<Schedule>, momentum: f64) -> Self {
        let learning_rate = learning_rate.into();
        Momentum { learning_rate, momentum, nesterov: false, l2: 0.0, weight_decay: 0.0 }
    }

    /// Creates the rule with Nesterov's look-ahead: the gradient counts as if the momentum had
    /// already been applied to the values.
    pub fn nesterov(learning_rate: impl Into<Schedule>, momentum: f64) -> Self {
        Momentum { nesterov: true, ..Momentum::new(learning_rate, momentum) }
    }

    /// Sets the factor of half the squared weight in the loss, at least 0: each gradient becomes `g
    /// + l2 w`, which accumulates in the slot. Default: 0.
    pub fn l2(self, l2: f64) -> Self {
        Momentum { l2, ..self }
    }

    /// Sets the share of a weight that an update at learning rate 1 removes, at least 0,
    /// independent of gradient and slot: `w -= lr d w`. Default: 0.
    ///
    /// Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", 2019
    /// (arXiv:1711.05101), algorithm 1. It multiplies the decay by a schedule only, so its `d` is
    /// `d / lr` here, as in [`AdamW`](super::AdamW).
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Momentum { weight_decay, ..self }
    }
}

impl Optimizer for Momentum {
    fn kind(&self) -> &'static str {
        if self.nesterov { "nesterov" } else { "momentum" }
    }

    fn slots(&self) -> &[OptimizerSlot] {
        const { &[OptimizerSlot::new("momentum", 0.0)] }
    }

    impl_loops!();

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        fraction("momentum", self.momentum)
            .or(not_negative("l2", self.l2))
            .or(not_negative("weight_decay", self.weight_decay))
            .or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Momentum {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        let decays = self.l2 != 0.0 || self.weight_decay != 0.0;
        let update = MomentumUpdate::<F, true> {
            rate: F::of(self.learning_rate.of(at)),
            momentum: F::of(self.momentum),
            l2: F::of(self.l2),
            decay: F::of(self.weight_decay),
        };
        match (self.nesterov, decays) {
            (true, true) => run.update(NesterovUpdate(update)),
            (true, false) => run.update(NesterovUpdate(update.without_decay())),
            (false, true) => run.update(update),
            (false, false) => run.update(update.without_decay()),
        }
    }
}

/// Whether there is a decay is a constant: a branch in the loop would prevent vectorization of the
/// common case.
#[derive(Clone, Copy)]
struct MomentumUpdate<F, const DECAYS: bool> {
    rate: F,
    momentum: F,
    l2: F,
    decay: F,
}

impl<F: OptimizerFloat, const DECAYS: bool> MomentumUpdate<F, DECAYS> {
    /// Returns the update of a rule without any decay.
    fn without_decay(self) -> MomentumUpdate<F, false> {
        let MomentumUpdate { rate, momentum, l2, decay } = self;
        MomentumUpdate { rate, momentum, l2, decay }
    }

    /// Returns the gradient, the new slot, and the value after its decay.
    #[inline(always)]
    fn accumulated(self, w: F, m: F, g: F) -> (F, F, F) {
        if !DECAYS {
            return (g, m * self.momentum + g, w);
        }
        let g = g.plus(self.l2, w);
        (g, m * self.momentum + g, w.plus(F::of(0.0) - self.decay * self.rate, w))
    }
}

impl<F: OptimizerFloat, const DECAYS: bool> UpdateRule<F, 1> for MomentumUpdate<F, DECAYS> {
    #[inline(always)]
    fn step(self, w: F, [m]: [F; 1], g: F) -> (F, [F; 1]) {
        let (_, m, w) = self.accumulated(w, m, g);
        (w - m * self.rate, [m])
    }
}

#[derive(Clone, Copy)]
struct NesterovUpdate<F, const DECAYS: bool>(MomentumUpdate<F, DECAYS>);

impl<F: OptimizerFloat, const DECAYS: bool> UpdateRule<F, 1> for NesterovUpdate<F, DECAYS> {
    #[inline(always)]
    fn step(self, w: F, [m]: [F; 1], g: F) -> (F, [F; 1]) {
        let MomentumUpdate { rate, momentum, .. } = self.0;
        let (g, m, w) = self.0.accumulated(w, m, g);
        (w - (g * rate + m * momentum * rate), [m])
    }
}
