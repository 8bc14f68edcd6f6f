//! [`KnownSteps`]: the steps that a worker knows of.

use pushpull_worker::Push;

use super::gradient_outcome::GradientOutcome;
use super::training_error::TrainingError;

/// The steps that a worker knows of.
///
/// Invariant: `applied <= newest`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KnownSteps {
    /// The newest global step, with one that this worker's gradient was accepted for.
    pub(super) newest: u64,
    /// The newest global step that the servers are known to have applied.
    pub(super) applied: u64,
    /// The step of the last token.
    pub(super) granted: u64,
    /// The number of steps that this worker has finished.
    pub(super) local: u64,
    /// The number of gradients in a row that were NaN or infinite.
    non_finite: u32,
}

impl KnownSteps {
    /// Records a join, which may go back.
    pub(super) fn joined(&mut self, step: u64) {
        self.newest = step;
        self.applied = step;
    }

    /// Records a token of this step.
    pub(super) fn granted(&mut self, step: u64) {
        self.granted = step;
        self.learn(step);
    }

    /// Records a step that the servers have applied.
    pub(super) fn learn(&mut self, step: u64) {
        self.applied = self.applied.max(step);
        self.newest = self.newest.max(step);
    }

    /// Fails if more gradients in a row than `limit` were NaN or infinite.
    pub(super) fn check_finite(
        &self,
        outcome: &GradientOutcome,
        limit: u32,
    ) -> Result<(), TrainingError> {
        match outcome {
            GradientOutcome::Skipped(source) if self.non_finite > limit => {
                let in_a_row = self.non_finite;
                let source = source.clone();
                Err(TrainingError::NonFinite { in_a_row, source })
            }
            _ => Ok(()),
        }
    }

    /// Records the end of a step.
    pub(super) fn finished(&mut self, outcome: &GradientOutcome) {
        self.local += 1;
        let step = outcome.global_step().unwrap_or(0);
        self.non_finite = match outcome {
            GradientOutcome::Skipped(error) if error.is_non_finite() => {
                self.non_finite.saturating_add(1)
            }
            GradientOutcome::Pushed(_) => 0,
            _ => self.non_finite,
        };
        match outcome {
            // It is part of a step that may not be applied yet.
            GradientOutcome::Pushed(Push::Accepted { .. }) => self.newest = self.newest.max(step),
            _ => self.learn(step),
        }
    }
}
