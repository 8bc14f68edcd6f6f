//! [`Ending`]: the reason for a training's end, and the order of its session's last steps.

use pushpull_worker::{Params, SavedCheckpoint, WorkerMetrics};

use super::next_action::NextAction;
use crate::checkpoint_plan::SaveOccasion;
use crate::training_end::{StopReason, TrainingEnd};

/// The end of a training: its reason, and the steps that are done for it.
///
/// A training that has not failed ends in this order. First the chief finishes the training for
/// all, if it does. If the training has ended for all, the others are waited for, so that the
/// values are final. Then the values are pulled.
///
/// Invariants: the first reason is kept, unless the servers have gone back to a time before it. A
/// failure, an interrupt or another reason of this worker is never forgotten.
#[derive(Debug, Default)]
pub(super) struct Ending {
    pub(super) reason: Option<StopReason>,
    /// The first reason of this worker, which no restore of the servers can void.
    own_reason: Option<StopReason>,
    pub(super) is_interrupted: bool,
    /// Whether a hook has ended the training instead of another attempt to join.
    pub(super) is_apart: bool,
    pub(super) has_failed: bool,
    /// Whether the servers grant no more tokens to any worker.
    is_for_all: bool,
    /// Whether all workers have ended.
    is_final: bool,
    has_finished: bool,
    has_awaited: bool,
    has_refreshed: bool,
    /// The end of the training, until the caller takes it.
    end: Option<TrainingEnd>,
}

impl Ending {
    /// Asks for the end. Returns whether this changes what the session waits for.
    pub(super) fn stop(&mut self, reason: StopReason) -> bool {
        // An interrupt ends the waits of another end, too.
        let is_interrupt = reason == StopReason::Interrupted;
        let changes_waits = self.reason.is_none() || is_interrupt;
        self.is_interrupted |= is_interrupt;
        if !is_of_servers(&reason) {
            self.own_reason.get_or_insert_with(|| reason.clone());
        }
        self.reason.get_or_insert(reason);
        changes_waits
    }

    /// Whether no step begins any more.
    pub(super) fn has_begun(&self) -> bool {
        self.has_failed || self.reason.is_some()
    }

    /// Returns the occasion of a checkpoint that is asked for now.
    pub(super) fn save_occasion(&self) -> SaveOccasion {
        match (self.has_failed, &self.reason) {
            (true, _) => SaveOccasion::Failure,
            (false, Some(_)) => SaveOccasion::End,
            (false, None) => SaveOccasion::Steps,
        }
    }

    /// Records a join: the servers may have gone back to a time before the end. If they have not,
    /// the next request for a token is answered with the same end.
    pub(super) fn joined(&mut self) {
        if self.reason.as_ref().is_some_and(is_of_servers) {
            self.reason = self.own_reason.clone();
        }
        self.is_for_all = false;
        self.is_final = false;
        self.has_finished = false;
        self.has_awaited = false;
        self.has_refreshed = false;
    }

    /// Returns the next action before the final checkpoint; `None` if there is no more. `finishes`
    /// says whether this worker ends the training for all. Values are pulled once those of the step
    /// `at_least` are there.
    pub(super) fn next_action(&self, finishes: bool, at_least: u64) -> Option<NextAction> {
        match self {
            Ending { has_finished: false, .. } if finishes => Some(NextAction::Finish),
            // An interrupted training waits for nobody.
            Ending { is_interrupted: true, .. } => None,
            Ending { is_for_all: true, has_awaited: false, .. } => Some(NextAction::AwaitEnd),
            Ending { has_refreshed: false, .. } => Some(NextAction::Refresh { at_least }),
            _ => None,
        }
    }

    /// Records that the servers grant no more tokens to any worker.
    pub(super) fn ended_for_all(&mut self) {
        self.is_for_all = true;
    }

    /// Records whether the training is finished for all.
    pub(super) fn finished(&mut self, is_for_all: bool) {
        self.has_finished = true;
        self.is_for_all |= is_for_all;
    }

    /// Records whether all workers have ended.
    pub(super) fn awaited(&mut self, is_final: bool) {
        self.has_awaited = true;
        self.is_final = is_final;
    }

    /// Records that the worker ends without its servers: they may have gone back, and the other
    /// workers may train on.
    pub(super) fn lost_servers(&mut self) {
        self.is_final = false;
    }

    /// Records whether the newest values were pulled.
    pub(super) fn refreshed(&mut self, has_values: bool) {
        self.has_refreshed = true;
        self.is_final &= has_values;
    }

    /// Ends the training with these values.
    pub(super) fn end(
        &mut self,
        step: u64,
        checkpoint: Option<SavedCheckpoint>,
        params: Option<Params>,
        metrics: WorkerMetrics,
    ) -> &TrainingEnd {
        let reason = self.reason.clone().unwrap_or(StopReason::Closed);
        let is_final = self.is_final;
        self.end.insert(TrainingEnd { step, reason, checkpoint, params, is_final, metrics })
    }

    /// Whether the training has ended for all workers, as far as this one knows.
    pub(super) fn is_for_all(&self) -> bool {
        self.is_for_all
    }

    /// Takes how the training ended.
    pub(super) fn take_end(&mut self) -> Option<TrainingEnd> {
        self.end.take()
    }
}

/// Whether a reason is a state of the servers, which a restore may undo.
fn is_of_servers(reason: &StopReason) -> bool {
    match reason {
        StopReason::LastStep | StopReason::DataEnd | StopReason::Finished => true,
        StopReason::Hook { .. } | StopReason::Interrupted | StopReason::Closed => false,
    }
}
