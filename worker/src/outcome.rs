//! What verbs come to: of a pull, of a push, of a save, of a join.

use pushpull_common::protocol::Outcome;
use pushpull_common::protocol::message::CheckpointId;

use crate::error::Error;
use crate::token::Token;

/// What a pull found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pulled {
    /// The values: of at least this global step in asynchronous mode; in synchronous mode all of
    /// this step, the token's.
    Pulled {
        /// The step.
        step: u64,
    },
    /// The token's step has been made without it (synchronous mode), and the parameters are as they
    /// were. Drop the token, which is of no more use, and take another.
    Stale,
}

impl Pulled {
    /// Whether the token's step has passed.
    pub fn is_stale(self) -> bool {
        self == Pulled::Stale
    }
}

/// What became of a push.
///
/// Which of them there are depends on the servers' mode. In asynchronous mode a push is applied, or
/// stale where the servers have a bound and it is older. In
/// synchronous mode it is accepted, or stale if enough others were faster; either way its token is
/// spent, and the loop goes on with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Push {
    /// Applied to the variables (asynchronous mode; `assign` and `assign_add` in both).
    Applied {
        /// The global step after it.
        step: u64,
        /// How many steps others had made since values were pulled under the token, or since it was
        /// granted if none were.
        staleness: u64,
    },
    /// A part of a step, for good (synchronous mode): every shard holds it, and whatever becomes of
    /// this worker, the step is made with it. It is applied together with the others, so that values
    /// with it are those of the next token.
    Accepted {
        /// The step, counted from 0: that of the token.
        step: u64,
    },
    /// Dropped on every shard, because its step was made without it (synchronous mode), or because its
    /// values were older than the servers' bound (asynchronous mode). Nothing is wrong: this gradient
    /// came from one of the slowest replicas.
    Stale {
        /// The step that is current now.
        current: u64,
    },
    /// Dropped at the worker's own wish, before it was whole.
    Withdrawn,
}

/// What came of a step: [`crate::Worker::push_and_pull`].
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutcome {
    /// What became of the push.
    pub push: Push,
    /// The token for the next step, for which values have been pulled; `None` if there are no more. On an
    /// error, which is one of [`crate::Worker::token`] or [`crate::Worker::pull`], the push is what `push`
    /// says all the same, and either can be tried again.
    pub next: Result<Option<Token>, Error>,
}

/// A checkpoint that is saved, verified and published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedCheckpoint {
    /// The name of its folder.
    pub name: String,
    /// The global step it holds.
    pub step: u64,
}

impl From<CheckpointId> for SavedCheckpoint {
    fn from(checkpoint: CheckpointId) -> SavedCheckpoint {
        SavedCheckpoint { name: checkpoint.name.to_string(), step: checkpoint.step.0 }
    }
}

/// The checkpoint that the variables were restored from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredCheckpoint {
    /// The name of its folder, by which what [`crate::Worker::save`] was given can be found.
    pub name: String,
    /// The global step from which the training goes on.
    pub step: u64,
    /// The restore epoch that has begun: higher each time.
    pub epoch: u32,
    /// Newer checkpoints, which are not sound and were passed over; the newest first, 16 at most. Empty where a
    /// server does not tell.
    pub passed_over: Vec<PassedOver>,
}

/// A checkpoint that is not sound, and was passed over for an older one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// The name of its folder.
    pub checkpoint: String,
    /// What is wrong with it: the file, what is there, and what was expected.
    pub cause: String,
}

impl Push {
    /// What an outcome of a push as a whole means; `None` for one of a single shard.
    pub(crate) fn of(outcome: Outcome) -> Option<Push> {
        Some(match outcome {
            Outcome::Applied { step, staleness, .. } => Push::Applied { step: step.0, staleness },
            Outcome::Accepted { step } => Push::Accepted { step: step.0 },
            Outcome::Stale { current } => Push::Stale { current: current.0 },
            Outcome::Withdrawn {} => Push::Withdrawn,
            Outcome::Held {} => return None,
        })
    }
}
