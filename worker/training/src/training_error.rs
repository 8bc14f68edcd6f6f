//! [`TrainingError`]: the errors that end a training before its end.

use std::fmt;
use std::time::Duration;

use thiserror::Error as ThisError;

use super::hook::HookError;
use pushpull_common::rounding::rounded;
use pushpull_worker::Error;

/// The failure of a training. Hooks see it before the caller.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum TrainingError {
    /// An operation of the worker failed, and neither another attempt nor a rejoin can help:
    /// [`Advice::Stop`](pushpull_worker::Advice::Stop).
    #[error(transparent)]
    Worker(#[from] Error),
    /// The training failed again and again for longer than
    /// [`TrainingConfig::recover_for`](super::TrainingConfig::recover_for).
    #[error(
        "cannot recover: gave up after {attempts} attempts in {:?}",
        rounded(.waited)
    )]
    GaveUp {
        /// The number of attempts since the first failure.
        attempts: u32,
        /// The time since the first failure.
        waited: Duration,
        /// The error of the last attempt.
        source: Error,
    },
    /// More gradients in a row were NaN or infinite than
    /// [`TrainingConfig::non_finite_max`](super::TrainingConfig::non_finite_max) allows.
    #[error("cannot continue: {in_a_row} gradients in a row were refused")]
    NonFinite {
        /// The number of gradients in a row.
        in_a_row: u32,
        /// The reason for the refusal of the last one.
        source: Error,
    },
    /// The servers cannot save checkpoints, or not the final one.
    #[error("cannot continue without the checkpoint")]
    Save {
        /// The error of the worker.
        source: Error,
    },
    /// A hook returned an error.
    #[error("cannot continue: the hook {hook} failed in {place}")]
    Hook {
        /// The name of the hook.
        hook: String,
        /// The method of the hook that was called.
        place: HookPlace,
        /// The error that the hook returned.
        source: HookError,
    },
    /// A hook panicked, which ends the training.
    #[error("cannot continue: the hook {hook} panicked in {place}: {message}")]
    HookPanicked {
        /// The name of the hook.
        hook: String,
        /// The method of the hook that was called.
        place: HookPlace,
        /// The message of the panic, or words that say that it has none.
        message: String,
    },
    /// The function of [`TrainingSession::run`](super::TrainingSession::run) returned an error.
    #[error("cannot compute a gradient for step {step}")]
    Step {
        /// The global step of its token.
        step: u64,
        /// The error that the function returned.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint would be due at all times.
    #[error("cannot save a checkpoint every {interval}: it must be longer")]
    CheckpointInterval {
        /// The interval, with its unit.
        interval: String,
    },
    /// The session was dropped before its end, for example because the program returned an error.
    /// Only hooks see this.
    #[error("cannot continue: the training session was dropped before its end")]
    Dropped,
    /// The training has failed before, with an error that was returned then.
    #[error("cannot continue: the training has failed before")]
    Failed,
}

impl TrainingError {
    /// Returns the error of the worker that caused this one, whichever variant has it.
    pub fn worker_error(&self) -> Option<&Error> {
        match self {
            TrainingError::Worker(source)
            | TrainingError::GaveUp { source, .. }
            | TrainingError::NonFinite { source, .. }
            | TrainingError::Save { source } => Some(source),
            _ => None,
        }
    }
}

/// A method of a [`Hook`](super::Hook). `Display` writes its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HookPlace {
    /// [`Hook::begin`](super::Hook::begin).
    Begin,
    /// [`Hook::joined`](super::Hook::joined).
    Joined,
    /// [`Hook::before_step`](super::Hook::before_step).
    BeforeStep,
    /// [`Hook::before_push`](super::Hook::before_push).
    BeforePush,
    /// [`Hook::after_step`](super::Hook::after_step).
    AfterStep,
    /// [`Hook::saved`](super::Hook::saved).
    Saved,
    /// [`Hook::save_failed`](super::Hook::save_failed).
    SaveFailed,
    /// [`Hook::retrying`](super::Hook::retrying).
    Retrying,
    /// [`Hook::end`](super::Hook::end).
    End,
}

impl fmt::Display for HookPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HookPlace::Begin => "begin",
            HookPlace::Joined => "joined",
            HookPlace::BeforeStep => "before_step",
            HookPlace::BeforePush => "before_push",
            HookPlace::AfterStep => "after_step",
            HookPlace::Saved => "saved",
            HookPlace::SaveFailed => "save_failed",
            HookPlace::Retrying => "retrying",
            HookPlace::End => "end",
        })
    }
}
