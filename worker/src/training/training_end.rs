//! [`TrainingEnd`]: how a training ended.

use std::fmt;

use super::scalars::Scalars;
use crate::gradients::params::Params;
use crate::outcome::SavedCheckpoint;

/// How a training ended, if it ended without an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TrainingEnd {
    /// The newest global step that this worker knows.
    pub step: u64,
    /// Why the training ended.
    pub reason: StopReason,
    /// The newest checkpoint that this session has saved; `None` on workers other than the chief.
    pub checkpoint: Option<SavedCheckpoint>,
}

/// Why a training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The servers grant no more tokens: the last step is reached, all samples of the last epoch are
    /// spent, or the chief has finished the training.
    LastStep,
    /// A hook asked for the end.
    Hook {
        /// The hook.
        hook: String,
        /// Its reason.
        reason: String,
    },
    /// The [`Interrupt`](super::Interrupt) was raised.
    Interrupted,
    /// The program closed the session.
    Closed,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopReason::LastStep => f.write_str("the servers grant no more tokens"),
            StopReason::Hook { hook, reason } => write!(f, "{hook}: {reason}"),
            StopReason::Interrupted => f.write_str("interrupted"),
            StopReason::Closed => f.write_str("the session was closed"),
        }
    }
}

/// What a hook sees at the end.
#[derive(Debug)]
#[non_exhaustive]
pub struct FinalValues<'a> {
    /// How the training ended.
    pub end: &'a TrainingEnd,
    /// The values, pulled again for the end. If the servers could not be reached any more, those of
    /// the last step; [`Params::step`] tells. `None` if this worker never joined.
    pub params: Option<&'a Params>,
    /// The numbers of the last step.
    pub scalars: &'a Scalars,
}
