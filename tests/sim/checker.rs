//! What must be true of every run.

mod asynchronous;
mod line;
mod synchronous;

use std::ops::Range;

use pushpull_common::ids::{GlobalStep, ShardId, VariableId};
use pushpull_common::protocol::Outcome;
use pushpull_common::variable::VariableSpec;

use asynchronous::Asynchronous;
pub(crate) use asynchronous::Known;
pub(crate) use line::{Line, Numbers};
use synchronous::Synchronous;

use crate::setting::Setting;

/// Watches a run.
#[derive(Debug)]
pub(crate) enum Checker {
    Synchronous(Synchronous),
    Asynchronous(Asynchronous),
}

/// A push that is about to be made.
#[derive(Clone, Debug)]
pub(crate) struct Pushed {
    pub(crate) token: u64,
    /// The worker task.
    pub(crate) task: u32,
    /// The step that the values were read at.
    pub(crate) read: GlobalStep,
    pub(crate) gradient: Numbers,
}

/// Values that a worker has pulled.
pub(crate) struct Pulled<'a, R> {
    /// What was known when they were asked for.
    pub(crate) known: &'a Known,
    /// They are said to be of this step.
    pub(crate) step: GlobalStep,
    pub(crate) bytes: &'a [u8],
    /// Where a variable lies.
    pub(crate) range: R,
}

impl Checker {
    pub(crate) fn new(setting: &Setting) -> Checker {
        match setting.asynchronous {
            true => Checker::Asynchronous(Asynchronous::new(setting)),
            false => Checker::Synchronous(Synchronous::new(setting)),
        }
    }

    /// What a push adds to a variable: exact in any sum, and told apart from what others add, or
    /// from what it adds itself elsewhere. `draw` is a number of the push.
    pub(crate) fn line(&self, variable: &VariableSpec, draw: u64) -> Line {
        let dtype = variable.dtype();
        let length = variable.bytes() as usize / dtype.size();
        match self {
            Checker::Synchronous(_) => Line::of(dtype, length, |element| {
                (draw.wrapping_add(element as u64 * 5) % 17) as i64 - 8
            }),
            Checker::Asynchronous(checker) => checker.line(dtype, length),
        }
    }

    /// A worker is about to push.
    pub(crate) fn pushes(&mut self, push: Pushed) {
        match self {
            Checker::Synchronous(checker) => checker.pushes(push),
            Checker::Asynchronous(checker) => checker.pushes(push),
        }
    }

    /// A worker was told what became of its push.
    pub(crate) fn settled(&mut self, token: u64, outcome: Outcome) {
        match self {
            Checker::Synchronous(checker) => checker.settled(token, outcome),
            Checker::Asynchronous(checker) => checker.settled(token, outcome),
        }
    }

    /// A shard has refused a push.
    pub(crate) fn refused(&mut self, token: u64, shard: ShardId) {
        match self {
            Checker::Synchronous(checker) => checker.refused(token),
            Checker::Asynchronous(checker) => checker.refused(token, shard),
        }
    }

    /// A worker has given a push up before any shard could have it whole.
    pub(crate) fn withdrawn(&mut self, token: u64) {
        match self {
            Checker::Synchronous(checker) => checker.refused(token),
            Checker::Asynchronous(checker) => checker.withdrawn(token),
        }
    }

    /// A worker was told who is missing before its deadline.
    pub(crate) fn told(&mut self, awaited: &str) {
        match self {
            Checker::Synchronous(checker) => checker.told(awaited),
            Checker::Asynchronous(_) => panic!("nobody is waited for: {awaited}"),
        }
    }

    /// How often workers were told.
    pub(crate) fn told_count(&self) -> u64 {
        match self {
            Checker::Synchronous(checker) => checker.told,
            Checker::Asynchronous(_) => 0,
        }
    }

    /// A process has opened a shard, which has made so many steps.
    pub(crate) fn opened(&mut self, shard: ShardId, steps: u64) {
        match self {
            Checker::Synchronous(checker) => checker.opened(shard, steps),
            Checker::Asynchronous(checker) => checker.opened(shard, steps),
        }
    }

    /// A shard has applied a step of synchronous mode.
    pub(crate) fn applied(&mut self, shard: ShardId, step: u64, tokens: Vec<u64>) {
        match self {
            Checker::Synchronous(checker) => checker.applied(shard, step, tokens),
            Checker::Asynchronous(_) => panic!("{shard} has applied step {step}: {tokens:?}"),
        }
    }

    /// What is known now, which values that are asked for now must agree with.
    pub(crate) fn known(&self) -> Known {
        match self {
            Checker::Synchronous(_) => Known::default(),
            Checker::Asynchronous(checker) => checker.known(),
        }
    }

    /// A worker has pulled values.
    pub(crate) fn pulled(&mut self, pulled: Pulled<'_, impl Fn(VariableId) -> Range<usize>>) {
        match self {
            Checker::Synchronous(checker) => checker.pulled(pulled),
            Checker::Asynchronous(checker) => checker.pulled(pulled),
        }
    }

    /// The run is over: what was told agrees with what was done.
    pub(crate) fn finish(&self, last_step: u64) {
        match self {
            Checker::Synchronous(checker) => checker.finish(last_step),
            Checker::Asynchronous(checker) => checker.finish(last_step),
        }
    }

    /// Steps that were made.
    pub(crate) fn steps(&self) -> u64 {
        match self {
            Checker::Synchronous(checker) => checker.steps(),
            Checker::Asynchronous(checker) => checker.steps(),
        }
    }

    /// Pulls that were answered.
    pub(crate) fn pulls(&self) -> u64 {
        match self {
            Checker::Synchronous(checker) => checker.pulls,
            Checker::Asynchronous(checker) => checker.pulls,
        }
    }
}
