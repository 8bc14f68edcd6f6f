//! Outcomes of operations: of pulls, pushes, checkpoints and joins.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::{Message, Outcome};

use crate::error::Error;
use crate::runtime::OperationFuture;
use crate::session::Reply;
use crate::token::Token;

/// The result of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pulled {
    /// The values were pulled. In asynchronous mode they are of at least this global step; in
    /// synchronous mode all are of this step, the token's.
    Pulled {
        /// The global step.
        step: u64,
    },
    /// The token's step was made without it (synchronous mode). The values are unchanged, unless
    /// pulls are in place ([`WorkerConfig::in_place_pulls`](crate::WorkerConfig::in_place_pulls)).
    /// Drop the token and take another.
    Stale,
}

impl Pulled {
    /// Whether the token's step has passed.
    pub fn is_stale(self) -> bool {
        self == Pulled::Stale
    }
}

/// The outcome of a push.
///
/// Asynchronous mode: `Applied`, or `Stale` if the servers bound the age of gradients. Synchronous
/// mode: `Accepted`, or `Stale` if enough other replicas were faster. In every case the token is
/// gone, and the loop continues with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Push {
    /// The variables were updated (asynchronous mode; assignments in both modes).
    Applied {
        /// The number of steps made, including this push.
        step: u64,
        /// The number of steps by other workers since values were pulled under the token, or since
        /// it was granted if none were.
        staleness: u64,
    },
    /// The push is part of a step (synchronous mode). Every shard holds it, and the step includes
    /// it even if this worker dies. The values of the next token's step include it.
    Accepted {
        /// The number of steps made, including the one that the push is part of.
        step: u64,
    },
    /// No shard applied the gradient: its step was made without it (synchronous mode), or it was
    /// older than the servers' bound (asynchronous mode). This is not an error; this replica was
    /// among the slowest.
    Stale {
        /// The current global step.
        current: u64,
    },
    /// The worker withdrew the push before any shard had all of its share.
    Withdrawn,
    /// Another execution of the call that made the gradient had counted before, so this one did not
    /// advance the step. Every shard has counted the call once.
    Repeated,
}

/// The result of [`crate::Worker::push_and_pull`].
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutcome {
    /// The outcome of the push.
    pub push: Push,
    /// The token for the next step, whose values have been pulled; `None` if there are no more
    /// tokens.
    ///
    /// An error is one of [`crate::Worker::token`] or [`crate::Worker::pull`]. It does not affect
    /// the push; call them again.
    pub next: Result<Option<Token>, Error>,
}

/// A checkpoint under way: a future of its name and step.
///
/// Dropping the handle does not stop a save that the servers have begun.
#[derive(Debug)]
#[must_use = "only the handle tells whether the checkpoint was saved"]
pub struct SaveHandle {
    save: SaveUnderWay,
}

/// A save that servers do, or one that has ended.
#[derive(Debug)]
enum SaveUnderWay {
    Requested(OperationFuture),
    Ended(Result<SavedCheckpoint, Error>),
}

impl SaveHandle {
    pub(crate) fn new(call: OperationFuture) -> SaveHandle {
        SaveHandle { save: SaveUnderWay::Requested(call) }
    }

    /// Returns the handle of a save that has ended.
    #[doc(hidden)]
    pub fn ended(result: Result<SavedCheckpoint, Error>) -> SaveHandle {
        SaveHandle { save: SaveUnderWay::Ended(result) }
    }
}

impl Future for SaveHandle {
    type Output = Result<SavedCheckpoint, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let call = match &mut self.save {
            SaveUnderWay::Requested(call) => call,
            SaveUnderWay::Ended(result) => return Poll::Ready(result.clone()),
        };
        Poll::Ready(match ready!(Pin::new(call).poll(context)) {
            Ok(Reply::Answer { message: Message::Saved(saved), .. }) => Ok(saved.checkpoint.into()),
            Ok(_) => Err(Error::Ended { doing: "save a checkpoint" }),
            Err(error) => Err(error),
        })
    }
}

/// A checkpoint that is saved, verified and published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedCheckpoint {
    /// The name of its folder.
    pub name: String,
    /// The global step of its values.
    pub step: u64,
}

impl From<CheckpointId> for SavedCheckpoint {
    fn from(checkpoint: CheckpointId) -> SavedCheckpoint {
        SavedCheckpoint { name: checkpoint.name.to_string(), step: checkpoint.step.0 }
    }
}

/// How much of the declared data set had been granted when a worker joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataBegun {
    /// The number of batches, of all epochs, that were granted or reserved at least once.
    pub batches: u64,
    /// The number of those that were not spent yet.
    pub unspent: u64,
}

/// The checkpoint from which the variables were restored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoredCheckpoint {
    /// The name of its folder, which also contains the user data of [`crate::Worker::save`].
    pub name: String,
    /// The global step at which training resumes.
    pub step: u64,
    /// The restore epoch that has begun. Each restore increases it.
    pub epoch: u32,
    /// Damaged newer checkpoints, the newest first, at most 16. Empty if the server does not report
    /// them.
    pub passed_over: Vec<PassedOver>,
}

/// A damaged checkpoint that was passed over for an older one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// The name of its folder.
    pub checkpoint: String,
    /// The damage: the file, what it contains, and what was expected.
    pub cause: String,
}

impl Push {
    /// Converts the outcome of a whole push; `None` for an outcome of a single shard.
    #[doc(hidden)]
    pub fn of(outcome: Outcome) -> Option<Push> {
        Some(match outcome {
            Outcome::Applied { step, staleness, .. } => Push::Applied { step: step.0, staleness },
            // The wire counts steps from 0, and names the one that the push is part of.
            Outcome::Accepted { step } => Push::Accepted { step: step.0.saturating_add(1) },
            Outcome::Stale { current } => Push::Stale { current: current.0 },
            Outcome::Withdrawn {} => Push::Withdrawn,
            Outcome::Repeated {} => Push::Repeated,
            Outcome::Held {} => return None,
        })
    }
}
