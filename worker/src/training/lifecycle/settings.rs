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
    /// How long the first join may take.
    pub(in crate::training) connect_timeout: Duration,
    pub(in crate::training) recover_for: Duration,
    /// How many gradients in a row may be NaN or infinite.
    pub(in crate::training) non_finite_max: u32,
    /// Decides the jitter of the back-off.
    pub(in crate::training) seed: u64,
}
