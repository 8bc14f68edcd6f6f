//! The checker: asserts what must hold in every run of the simulator.

mod asynchronous;
pub(crate) mod digits;
mod final_values;
mod line;
mod samples;
mod synchronous;

use std::ops::Range;

use pushpull_common::data_set::SampleRange;
use pushpull_common::ids::{GlobalStep, ShardId, VariableId};
use pushpull_common::protocol::{Grant, Outcome};
use pushpull_common::variable::VariableSpec;

use crate::setting::Setting;
use asynchronous::AsynchronousChecker;
pub(crate) use asynchronous::Known;
pub(crate) use line::{Elements, Tensors};
use synchronous::SynchronousChecker;

/// The checker of one run, for its update mode.
#[derive(Debug)]
pub(crate) enum Checker {
    Synchronous(SynchronousChecker),
    Asynchronous(AsynchronousChecker),
}

/// A push that a worker is about to start.
#[derive(Clone, Debug)]
pub(crate) struct Pushed {
    pub(crate) token: u64,
    /// The worker task.
    pub(crate) task: u32,
    /// The step at which the worker read its values.
    pub(crate) read: GlobalStep,
    /// The samples from which the gradient was computed.
    pub(crate) samples: Option<SampleRange>,
    pub(crate) gradient: Tensors,
}

/// The values that a worker has pulled.
pub(crate) struct CheckedPull<'a, R> {
    /// The pushes that were known to be applied when the pull began.
    pub(crate) known: &'a Known,
    /// The step that the answer names.
    pub(crate) step: GlobalStep,
    pub(crate) bytes: &'a [u8],
    /// Maps a variable to its range of `bytes`.
    pub(crate) range: R,
}

impl Checker {
    pub(crate) fn new(setting: &Setting) -> Checker {
        match setting.asynchronous {
            true => Checker::Asynchronous(AsynchronousChecker::new(setting)),
            false => Checker::Synchronous(SynchronousChecker::new(setting)),
        }
    }

    /// Returns the next push's gradient for a variable.
    ///
    /// Its elements are integers, so every sum of gradients is exact. They differ between pushes
    /// and between elements. `draw` is a number that differs from push to push.
    pub(crate) fn line(&self, variable: &VariableSpec, draw: u64) -> Elements {
        let dtype = variable.dtype();
        let length = variable.bytes() as usize / dtype.size();
        match self {
            Checker::Synchronous(_) => Elements::of(dtype, length, |element| {
                (draw.wrapping_add(element as u64 * 5) % 17) as i64 - 8
            }),
            Checker::Asynchronous(checker) => checker.line(dtype, length),
        }
    }

    /// Records a push before a worker starts it.
    pub(crate) fn pushes(&mut self, push: Pushed) {
        match self {
            Checker::Synchronous(checker) => checker.pushes(push),
            Checker::Asynchronous(checker) => checker.pushes(push),
        }
    }

    /// Checks the outcome that a worker received for its push.
    pub(crate) fn settled(&mut self, token: u64, outcome: Outcome) {
        match self {
            Checker::Synchronous(checker) => checker.settled(token, outcome),
            Checker::Asynchronous(checker) => checker.settled(token, outcome),
        }
    }

    /// Records that a shard has refused a push.
    pub(crate) fn refused(&mut self, token: u64, shard: ShardId) {
        match self {
            Checker::Synchronous(checker) => checker.refused(token),
            Checker::Asynchronous(checker) => checker.refused(token, shard),
        }
    }

    /// Records that a worker has abandoned a push before any shard could have all of it.
    pub(crate) fn withdrawn(&mut self, token: u64) {
        match self {
            Checker::Synchronous(checker) => checker.refused(token),
            Checker::Asynchronous(checker) => checker.withdrawn(token),
        }
    }

    /// Checks an error that names stragglers and arrived before the worker's deadline.
    pub(crate) fn early_error(&mut self, awaited: &str) {
        match self {
            Checker::Synchronous(checker) => checker.early_error(awaited),
            Checker::Asynchronous(_) => panic!("no push waits for a straggler: {awaited}"),
        }
    }

    /// Returns how many errors named stragglers before the deadline.
    pub(crate) fn early_errors(&self) -> u64 {
        match self {
            Checker::Synchronous(checker) => checker.early_errors,
            Checker::Asynchronous(_) => 0,
        }
    }

    /// Checks the step count of a shard that a new process has opened.
    pub(crate) fn opened(&mut self, shard: ShardId, steps: u64) {
        match self {
            Checker::Synchronous(checker) => checker.opened(shard, steps),
            Checker::Asynchronous(checker) => checker.counts(shard, steps),
        }
    }

    /// Checks a synchronous step that a shard has applied, with its tokens in order.
    pub(crate) fn applied(&mut self, shard: ShardId, step: u64, tokens: Vec<u64>) {
        match self {
            Checker::Synchronous(checker) => checker.applied(shard, step, tokens),
            Checker::Asynchronous(_) => panic!("{shard} has applied step {step}: {tokens:?}"),
        }
    }

    /// Returns the pushes that are known to be applied now. A pull that begins now must show them.
    pub(crate) fn known(&self) -> Known {
        match self {
            Checker::Synchronous(_) => Known::default(),
            Checker::Asynchronous(checker) => checker.known(),
        }
    }

    /// Checks values that a worker has pulled.
    pub(crate) fn pulled(&mut self, pulled: CheckedPull<'_, impl Fn(VariableId) -> Range<usize>>) {
        match self {
            Checker::Synchronous(checker) => checker.pulled(pulled),
            Checker::Asynchronous(checker) => checker.pulled(pulled),
        }
    }

    /// Checks the values that a worker has pulled after the end of the training on all workers.
    pub(crate) fn pulled_final(&mut self, step: GlobalStep, bytes: Vec<u8>) {
        match self {
            Checker::Synchronous(checker) => checker.final_values.pulled(step, bytes),
            Checker::Asynchronous(checker) => checker.final_values.pulled(step, bytes),
        }
    }

    /// Records that the step owner has reported a gradient that is applied on some shards only.
    pub(crate) fn partly_applied(&mut self, token: u64) {
        match self {
            Checker::Synchronous(_) => panic!("a step counts on all shards or on none: {token}"),
            Checker::Asynchronous(checker) => checker.partly_applied(token),
        }
    }

    /// Checks that a worker may be told that there are no final values.
    pub(crate) fn not_final(&self, pushes: u64) {
        match self {
            Checker::Synchronous(_) => panic!("{pushes} gradients are not on all shards"),
            Checker::Asynchronous(checker) => checker.not_final(pushes),
        }
    }

    /// Records that a worker spends the batch of a token without a gradient.
    pub(crate) fn skipped(&mut self, grant: Grant) {
        match self {
            Checker::Synchronous(checker) => checker.samples.skipped(grant),
            Checker::Asynchronous(checker) => checker.samples.skipped(grant),
        }
    }

    /// Checks, at the end of the run, that all reported outcomes agree with the steps made, and
    /// that every batch of a data set counts once. `counts` has the step counts of the shards that
    /// are up.
    pub(crate) fn finish(&mut self, setting: &Setting, counts: &[(ShardId, u64)]) {
        if let Checker::Asynchronous(checker) = self {
            counts.iter().for_each(|&(shard, steps)| checker.counts(shard, steps));
        }
        let last_step = if setting.data.is_some() { self.steps() } else { setting.last_step };
        match self {
            Checker::Synchronous(checker) => checker.finish(last_step),
            Checker::Asynchronous(checker) => checker.finish(last_step),
        }
    }

    /// Returns how many steps were made.
    pub(crate) fn steps(&self) -> u64 {
        match self {
            Checker::Synchronous(checker) => checker.steps(),
            Checker::Asynchronous(checker) => checker.steps(),
        }
    }

    /// Returns how many pulls were answered.
    pub(crate) fn pulls(&self) -> u64 {
        match self {
            Checker::Synchronous(checker) => checker.pulls,
            Checker::Asynchronous(checker) => checker.pulls,
        }
    }
}
