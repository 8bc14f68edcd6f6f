//! [`TrainingRecovery`]: whether and when a training goes on after a failed operation.

use std::time::Duration;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::Refusal;

use super::training_phase::LifecyclePhase;
use crate::error::{Advice, Error};
use crate::training::backoff::Backoff;
use crate::training::gradient_outcome::GradientOutcome;
use crate::training::recovery_window::RecoveryWindow;
use crate::training::training_error::TrainingError;

/// Decides whether, when and in which phase a training goes on after a failed operation.
///
/// Invariants: no attempt begins within the pause after the last failure, unless the training ends.
/// The cause of a join is kept until that join.
#[derive(Debug)]
pub(super) struct TrainingRecovery {
    window: RecoveryWindow,
    /// No action but a wait before this time.
    not_before: Duration,
    has_joined: bool,
    /// The error from which the training recovers by a join.
    pub(super) cause: Option<Error>,
}

/// What follows a failed push.
#[derive(Debug, PartialEq)]
pub(crate) enum PushRecovery {
    /// Wait for this long, then for the push again.
    Resume(Sequence, Duration),
    /// The push has ended.
    Ended(GradientOutcome),
}

impl TrainingRecovery {
    /// `window` is how long a training tries to recover. The seed decides the jitter.
    pub(super) fn new(window: Duration, seed: u64) -> TrainingRecovery {
        let window = RecoveryWindow::new(window, seed);
        TrainingRecovery { window, not_before: Duration::ZERO, has_joined: false, cause: None }
    }

    /// Returns how long to wait for the next action.
    pub(super) fn pause(&self, now: Duration) -> Option<Duration> {
        (now < self.not_before).then(|| self.not_before - now)
    }

    /// Begins a pause.
    pub(super) fn pause_for(&mut self, now: Duration, pause: Duration) {
        self.not_before = now.saturating_add(pause);
    }

    /// Ends the pause: the training ends.
    pub(super) fn end_pause(&mut self) {
        self.not_before = Duration::ZERO;
    }

    /// Returns how long the next attempt to join may take.
    pub(super) fn join_within(&self, now: Duration) -> Duration {
        match self.has_joined {
            true => self.window.remaining(now).max(Backoff::LONGEST),
            false => Duration::MAX,
        }
    }

    /// Records a join. Returns whether it is a later one, and its cause.
    pub(super) fn joined(&mut self) -> (bool, Option<Error>) {
        (std::mem::replace(&mut self.has_joined, true), self.cause.take())
    }

    /// Records progress.
    pub(super) fn progressed(&mut self) {
        self.window.progressed();
    }

    /// Whether the training recovers from servers that have lost their state, so that this
    /// replica's values belong to the past.
    pub(super) fn has_lost_state(&self) -> bool {
        match &self.cause {
            Some(Error::StateLost { .. } | Error::RolledBack { .. }) => true,
            Some(Error::Refused { refusal, .. }) => {
                matches!(refusal, Refusal::NotInitialized {} | Refusal::RestoreEpoch { .. })
            }
            _ => false,
        }
    }

    /// Decides after a failed attempt to join.
    pub(super) fn join_failed(
        &mut self,
        now: Duration,
        error: Error,
        is_chief: bool,
        phase: &mut LifecyclePhase,
    ) -> Result<(), TrainingError> {
        let is_final = match error.advice() {
            Advice::Stop | Advice::SkipBatch => true,
            // The first attempt has its own deadline, which has passed.
            Advice::Retry => !self.has_joined && matches!(error, Error::Timeout { .. }),
            // The chief has found no checkpoint.
            Advice::Rejoin => is_chief && matches!(error, Error::StateLost { .. }),
        };
        match is_final {
            true => Err(error.into()),
            false => self.retry_in(LifecyclePhase::Apart, now, error, phase),
        }
    }

    /// Decides after a failed operation other than a join and a push.
    pub(super) fn operation_failed(
        &mut self,
        now: Duration,
        error: Error,
        phase: &mut LifecyclePhase,
    ) -> Result<(), TrainingError> {
        match error.advice() {
            Advice::Stop => Err(error.into()),
            Advice::Rejoin => self.retry_in(LifecyclePhase::Apart, now, error, phase),
            Advice::Retry | Advice::SkipBatch => {
                self.retry_in(LifecyclePhase::Between, now, error, phase)
            }
        }
    }

    /// Decides after a failed push. An interrupted training waits for no push again.
    pub(super) fn push_failed(
        &mut self,
        now: Duration,
        error: Error,
        is_interrupted: bool,
        phase: &mut LifecyclePhase,
    ) -> Result<PushRecovery, TrainingError> {
        let outcome = match (error.advice(), &error) {
            (_, Error::Interrupted { .. }) => GradientOutcome::Lost(error),
            (Advice::Retry, &Error::Timeout { sequence: Some(sequence), .. }) => {
                match self.window.failed(now) {
                    _ if is_interrupted => GradientOutcome::Lost(error),
                    Some(pause) => return Ok(PushRecovery::Resume(sequence, pause)),
                    None => return Err(self.give_up(now, error)),
                }
            }
            // Nothing is under way that could be waited for.
            (Advice::Retry, _) => {
                self.retry_in(LifecyclePhase::Between, now, error.clone(), phase)?;
                GradientOutcome::Skipped(error)
            }
            (Advice::Rejoin, _) => {
                self.retry_in(LifecyclePhase::Apart, now, error.clone(), phase)?;
                GradientOutcome::Lost(error)
            }
            (Advice::SkipBatch, _) => {
                self.window.progressed();
                GradientOutcome::Skipped(error)
            }
            (Advice::Stop, _) => return Err(error.into()),
        };
        Ok(PushRecovery::Ended(outcome))
    }

    /// Enters a phase, and goes on there after a pause, or gives up.
    pub(super) fn retry_in(
        &mut self,
        next: LifecyclePhase,
        now: Duration,
        error: Error,
        phase: &mut LifecyclePhase,
    ) -> Result<(), TrainingError> {
        *phase = next;
        let Some(pause) = self.window.failed(now) else {
            return Err(self.give_up(now, error));
        };
        self.pause_for(now, pause);
        if next == LifecyclePhase::Apart {
            self.cause = Some(error);
        }
        Ok(())
    }

    fn give_up(&self, now: Duration, source: Error) -> TrainingError {
        let (attempts, waited) = self.window.spent(now);
        TrainingError::GaveUp { attempts, waited, source }
    }
}
