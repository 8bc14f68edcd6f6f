//! What verbs come to: of a pull, of a push, of a save, of a join.

use pushpull_common::protocol::Outcome;
use pushpull_common::protocol::message::CheckpointId;

/// What a pull found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pulled {
    /// The values, of at least this global step.
    Pulled {
        /// The step.
        step: u64,
    },
    /// The token's step has passed (synchronous mode): drop the token and take another.
    Stale,
}

impl Pulled {
    /// Whether the token's step has passed.
    pub fn is_stale(self) -> bool {
        self == Pulled::Stale
    }
}

/// What became of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Push {
    /// Applied to the variables.
    Applied {
        /// The global step after it.
        step: u64,
        /// How many steps others had made since the values were pulled.
        staleness: u64,
    },
    /// Admitted to a step for good (synchronous mode).
    Accepted {
        /// The step.
        step: u64,
    },
    /// Dropped, because its step has passed (synchronous mode).
    Stale {
        /// The step that is current now.
        current: u64,
    },
    /// Dropped at the worker's own wish, before it was whole.
    Withdrawn,
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
pub struct Restored {
    /// The name of its folder, by which what [`crate::Worker::save`] was given can be found.
    pub name: String,
    /// The global step from which the training goes on.
    pub step: u64,
    /// The restore epoch that has begun: higher each time.
    pub epoch: u32,
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
