//! [`LifecycleSettings`]: what a lifecycle is configured with.

use std::time::Duration;

use crate::training::checkpoint_cadence::CheckpointInterval;

/// The settings of a [`Lifecycle`](super::Lifecycle).
#[derive(Clone, Copy, Debug)]
pub(in crate::training) struct LifecycleSettings {
    pub(in crate::training) is_chief: bool,
    pub(in crate::training) checkpoints: Option<CheckpointInterval>,
    pub(in crate::training) final_checkpoint_on_error: bool,
    pub(in crate::training) finish_for_all: bool,
    pub(in crate::training) recover_for: Duration,
    /// Decides the jitter of the back-off.
    pub(in crate::training) seed: u64,
}
