//! [`TrainingRecovery`]: the recovery of a training after a failed operation, and its time.

use std::time::Duration;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::Refusal;
use pushpull_worker::{Advice, Error};

use super::settings::LifecycleSettings;
use super::training_phase::LifecyclePhase;
use crate::backoff::Backoff;
use crate::gradient_outcome::GradientOutcome;
use crate::hook::RetryReport;
use crate::recovery_window::{LAST_ATTEMPT, RecoveryWindow};
use crate::training_error::TrainingError;

/// Decides whether, when and in which phase a training goes on after a failed operation.
///
/// Invariants: no attempt begins within the pause after the last failure, unless the training fails
/// or is interrupted. The cause of a join is kept until that join.
#[derive(Debug)]
pub(super) struct TrainingRecovery {
    window: RecoveryWindow,
    /// The time before which the session only waits, because of a failure.
    not_before: Duration,
    /// The time before which the session only waits, because a hook delays the step.
    gate_until: Duration,
    has_joined: bool,
    /// The longest time of the first join.
    connect_timeout: Duration,
    /// The last failure, until the hooks have heard of it.
    retry: Option<RetryReport>,
    /// The error from which the training recovers by a join.
    pub(super) cause: Option<Error>,
}

/// The consequence of a failed push.
#[derive(Debug, PartialEq)]
pub(crate) enum PushRecovery {
    /// Wait for this long, then for the push again.
    Resume(Sequence, Duration),
    /// The push has ended, with this outcome.
    Ended(GradientOutcome),
}

impl TrainingRecovery {
    pub(super) fn new(settings: &LifecycleSettings) -> TrainingRecovery {
        TrainingRecovery {
            window: RecoveryWindow::new(settings.recover_for, settings.seed),
            not_before: Duration::ZERO,
            gate_until: Duration::ZERO,
            has_joined: false,
            connect_timeout: settings.connect_timeout,
            retry: None,
            cause: None,
        }
    }

    /// Returns how long to wait for the next action.
    pub(super) fn pause(&self, now: Duration) -> Option<Duration> {
        let until = self.not_before.max(self.gate_until);
        (now < until).then(|| until - now)
    }

    /// Begins the pause of a hook that delays the step.
    pub(super) fn delay_step(&mut self, now: Duration, pause: Duration) {
        self.gate_until = now.saturating_add(pause);
    }

    /// Ends the pause of a hook: no step begins any more.
    pub(super) fn end_delay(&mut self) {
        self.gate_until = Duration::ZERO;
    }

    /// Ends all pauses: the training waits for its servers no longer.
    pub(super) fn end_pauses(&mut self) {
        self.not_before = Duration::ZERO;
        self.gate_until = Duration::ZERO;
    }

    /// Returns how long the next attempt to join may take.
    pub(super) fn join_within(&self, now: Duration) -> Duration {
        match self.has_joined {
            true => self.window.remaining(now).max(LAST_ATTEMPT),
            // The first attempt: finding a checkpoint and restoring it have a timeout each.
            false if self.window.spent(now).0 == 0 => Duration::MAX,
            false => self.connect_timeout.saturating_sub(now).max(LAST_ATTEMPT),
        }
    }

    /// Returns until when an operation that begins now may last; `None` if its own timeout decides.
    pub(super) fn deadline(&self, now: Duration) -> Option<Duration> {
        self.window.deadline(now).filter(|_| self.has_joined)
    }

    /// Returns until when an operation after the failure of the training may last; `None` if its
    /// own timeout decides.
    pub(super) fn deadline_after_failure(&self, now: Duration) -> Option<Duration> {
        self.is_under_way().then(|| now.saturating_add(LAST_ATTEMPT))
    }

    /// Whether the servers have failed since the last progress.
    pub(super) fn is_under_way(&self) -> bool {
        self.window.is_open()
    }

    /// Takes the failure that the hooks have not heard of.
    pub(super) fn take_retry(&mut self) -> Option<RetryReport> {
        self.retry.take()
    }

    /// Records a join. Returns whether it is a later one, and its cause.
    pub(super) fn joined(&mut self) -> (bool, Option<Error>) {
        (std::mem::replace(&mut self.has_joined, true), self.cause.take())
    }

    /// Records progress, which closes the recovery window.
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
        phase: &mut LifecyclePhase,
    ) -> Result<(), TrainingError> {
        let is_final = match error.advice() {
            Advice::Stop | Advice::SkipBatch => true,
            // The first join has a deadline of its own.
            Advice::Retry => !self.has_joined && error.is_wait() && self.is_late(now),
            Advice::Rejoin => false,
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
                if is_interrupted {
                    return Ok(PushRecovery::Ended(GradientOutcome::Lost(error)));
                }
                let pause = self.failed(now, error)?;
                return Ok(PushRecovery::Resume(sequence, pause));
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
        if next == LifecyclePhase::Apart {
            self.cause = Some(error.clone());
        }
        let pause = self.failed(now, error)?;
        self.not_before = now.saturating_add(pause);
        Ok(())
    }

    /// Records a failure, and returns the pause before the next attempt, or gives up.
    fn failed(&mut self, now: Duration, cause: Error) -> Result<Duration, TrainingError> {
        let pause = self.window.failed(now);
        let (attempts, waited) = self.window.spent(now);
        match pause {
            None => Err(TrainingError::GaveUp { attempts, waited, source: cause }),
            Some(pause) => {
                self.retry = Some(RetryReport { cause, attempts, waited, pause, at: now });
                Ok(pause)
            }
        }
    }

    /// Whether the time of the first join has passed. A server refuses a wait a little before its
    /// deadline.
    fn is_late(&self, now: Duration) -> bool {
        now.saturating_add(Backoff::FIRST) >= self.connect_timeout
    }
}
