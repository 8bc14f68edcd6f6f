//! [`CheckpointPlan`]: the checkpoints of a session, and the one under way.

use std::time::Duration;

use pushpull_worker::SavedCheckpoint;

use super::cadence::Cadence;
use super::checkpoint_cadence::CheckpointCadence;

/// The checkpoints of a session: when one is due, whether one is under way, and which was the last.
///
/// Invariant: at most one is under way, and the final one of a join is not asked for again once it
/// is saved.
#[derive(Debug)]
pub(super) struct CheckpointPlan {
    cadence: CheckpointCadence,
    pub(super) is_under_way: bool,
    last_save: LastSave,
    /// The newest checkpoint of this session.
    pub(super) newest: Option<SavedCheckpoint>,
}

/// The state of the final checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastSave {
    Due,
    Asked,
    Done,
}

/// The occasion of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SaveOccasion {
    /// A pause between two steps.
    Steps,
    /// The end of the training.
    End,
    /// After an error. It is tried once.
    Failure,
}

impl CheckpointPlan {
    pub(super) fn new(interval: Option<Cadence>) -> CheckpointPlan {
        let cadence = CheckpointCadence::new(interval);
        CheckpointPlan { cadence, is_under_way: false, last_save: LastSave::Due, newest: None }
    }

    /// Sets the interval of checkpoints, before a join.
    pub(super) fn set_interval(&mut self, interval: Option<Cadence>) {
        self.cadence = CheckpointCadence::new(interval);
    }

    /// Records a join at this step, and the step of the checkpoint that it restored.
    pub(super) fn joined(&mut self, now: Duration, step: u64, restored: Option<u64>) {
        // The answer to a save of an earlier session does not come.
        self.is_under_way = false;
        // The training may go on, and end with another final checkpoint.
        self.last_save = LastSave::Due;
        self.cadence.joined(now, step, restored);
    }

    /// Whether to ask for a checkpoint between two steps.
    pub(super) fn is_due(&self, now: Duration, step: u64) -> bool {
        !self.is_under_way && self.cadence.is_due(now, step)
    }

    /// Whether to ask for the final checkpoint.
    pub(super) fn is_due_at_end(&self, step: u64) -> bool {
        self.last_save != LastSave::Done && self.cadence.is_due_at_end(step)
    }

    /// Records that the servers were asked.
    pub(super) fn asked(&mut self, now: Duration, step: u64, occasion: SaveOccasion) {
        self.is_under_way = true;
        self.last_save = match occasion {
            SaveOccasion::Steps => self.last_save,
            SaveOccasion::End => LastSave::Asked,
            SaveOccasion::Failure => LastSave::Done,
        };
        self.cadence.asked(now, step);
    }

    /// Records the checkpoint that the servers have saved.
    pub(super) fn saved(&mut self, checkpoint: SavedCheckpoint) {
        self.is_under_way = false;
        if self.last_save == LastSave::Asked {
            self.last_save = LastSave::Done;
        }
        self.cadence.saved(checkpoint.step);
        self.newest = Some(checkpoint);
    }
}
