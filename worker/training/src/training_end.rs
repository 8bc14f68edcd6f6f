//! [`TrainingEnd`]: the end of a training without an error.

use std::fmt;

use pushpull_common::protocol::message::EndReason;
use pushpull_worker::{Params, SavedCheckpoint, WorkerMetrics};

use super::scalars::Scalars;

/// The end of a training without an error.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TrainingEnd {
    /// The newest global step that this worker knows.
    pub step: u64,
    /// The reason for the end of the training.
    pub reason: StopReason,
    /// The newest checkpoint that this session has saved; `None` on workers other than the chief.
    pub checkpoint: Option<SavedCheckpoint>,
    /// The values, pulled again for the end. If the servers could not be reached any more, those of
    /// the last step; [`Params::step`] tells. `None` if this worker never joined, or ended while it
    /// was trying to join again.
    pub params: Option<Params>,
    /// Whether the training has ended on all workers. Then `params` are the final values, the same
    /// on each of them.
    ///
    /// False if the training goes on without this worker, and if another worker had not ended
    /// within [`WorkerConfig::timeout`](pushpull_worker::WorkerConfig::timeout). Also if a gradient of a lost
    /// worker is applied on some servers only.
    pub is_final: bool,
    /// The metrics of this worker in the whole session, through all its joins.
    pub metrics: WorkerMetrics,
}

/// The reason for the end of a training.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The last step is reached.
    LastStep,
    /// All samples of the last epoch are spent.
    DataEnd,
    /// The chief or the servers have finished the training.
    Finished,
    /// A hook asked for the end.
    Hook {
        /// The name of the hook.
        hook: String,
        /// The reason that the hook gave.
        reason: String,
    },
    /// The [`Interrupt`](pushpull_worker::Interrupt) was raised.
    Interrupted,
    /// The program closed the session.
    Closed,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopReason::LastStep => f.write_str("the last step is reached"),
            StopReason::DataEnd => f.write_str("all samples of the last epoch are spent"),
            StopReason::Finished => f.write_str("the chief or the servers have finished it"),
            StopReason::Hook { hook, reason } => write!(f, "{hook}: {reason}"),
            StopReason::Interrupted => f.write_str("interrupted"),
            StopReason::Closed => f.write_str("the session was closed"),
        }
    }
}

impl From<EndReason> for StopReason {
    fn from(reason: EndReason) -> StopReason {
        match reason {
            EndReason::LastStep {} => StopReason::LastStep,
            EndReason::DataEnd {} => StopReason::DataEnd,
            EndReason::Finished {} => StopReason::Finished,
        }
    }
}

/// The view that a hook has of the end of a training.
#[derive(Debug)]
#[non_exhaustive]
pub struct FinalValues<'a> {
    /// The end of the training.
    pub end: &'a TrainingEnd,
    /// The numbers of the last step.
    pub scalars: &'a Scalars,
}
