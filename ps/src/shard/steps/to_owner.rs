//! The connection of a shard to the step owner: reports to it, and its messages.

use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::limits::STEP_PUSHES_MAX;

/// The connection to the step owner. Unused on the step owner itself.
#[derive(Debug, Default)]
pub(in crate::shard) struct ToOwner {
    is_up: bool,
    /// Since when there is none.
    lost_at: Option<Instant>,
    /// When this shard last reported over it.
    reported_at: Option<Instant>,
    /// The last step that the step owner has told.
    heard: HeardStep,
}

/// A step that the step owner has told.
#[derive(Clone, Copy, Debug, Default)]
struct HeardStep {
    epoch: RestoreEpoch,
    step: GlobalStep,
    /// The gradients that the shard had applied then.
    gradients: u64,
}

/// The gradients that the shard has applied in a restore epoch.
#[derive(Clone, Copy, Debug)]
pub(in crate::shard) struct AppliedGradients {
    pub(in crate::shard) epoch: RestoreEpoch,
    /// The step at which the epoch began.
    pub(in crate::shard) restored_step: GlobalStep,
    pub(in crate::shard) gradients: u64,
}

/// By how many steps the step owner can be ahead of what it has told and of the gradients that the
/// shard has applied since: the most pushes that are whole on the owner and not here yet.
const STEPS_IN_FLIGHT: u64 = STEP_PUSHES_MAX as u64;

impl ToOwner {
    pub(in crate::shard) fn is_up(&self) -> bool {
        self.is_up
    }

    /// Returns whether all reports are to be repeated now, and notes it.
    pub(in crate::shard) fn reports_are_due(&mut self, now: Instant, interval: Duration) -> bool {
        let due = self.is_up && self.reported_at.is_none_or(|last| now >= last + interval);
        if due {
            self.reported_at = Some(now);
        }
        due
    }

    /// Returns a step that the step owner cannot have passed yet. Every gradient has a share on
    /// every shard, so the shard counts what the owner has not told.
    pub(in crate::shard) fn newest_step(&self, applied: AppliedGradients) -> GlobalStep {
        let HeardStep { epoch, step, gradients } = self.heard;
        let (step, counted) = match epoch == applied.epoch {
            true => (step, applied.gradients.saturating_sub(gradients)),
            false => (applied.restored_step, applied.gradients),
        };
        GlobalStep(step.0.saturating_add(counted).saturating_add(STEPS_IN_FLIGHT))
    }

    /// Describes since when the step owner cannot be reached. `None` if it can.
    pub(in crate::shard) fn outage(&self, now: Instant) -> Option<String> {
        match self.lost_at {
            _ if self.is_up => None,
            None => Some("has not reached the step owner yet".into()),
            Some(since) => {
                let away = now.saturating_duration_since(since).as_millis();
                Some(format!("has had no connection to the step owner for {away} ms"))
            }
        }
    }

    /// The connection is up or down. Reports are repeated over a new one: a restarted step owner
    /// has lost them, and an owner of another restore epoch has refused them. Returns whether it
    /// was lost.
    pub(in crate::shard) fn set_up(&mut self, now: Instant, is_up: bool) -> bool {
        let is_lost = self.is_up && !is_up;
        self.is_up = is_up;
        self.lost_at = (!is_up).then_some(now);
        self.reported_at = None;
        is_lost
    }

    /// Notes the step that the step owner has told in this restore epoch.
    pub(in crate::shard) fn heard(
        &mut self,
        epoch: RestoreEpoch,
        step: GlobalStep,
        gradients: u64,
    ) {
        if self.heard.epoch != epoch || self.heard.step < step {
            self.heard = HeardStep { epoch, step, gradients };
        }
    }
}
