//! [`LifecycleSettings`]: the configuration of a lifecycle.

use std::time::Duration;

use crate::cadence::Cadence;

/// The settings of a [`Lifecycle`](super::Lifecycle).
#[derive(Clone, Copy, Debug)]
pub(crate) struct LifecycleSettings {
    pub(crate) is_chief: bool,
    pub(crate) checkpoints: Option<Cadence>,
    pub(crate) final_checkpoint_on_error: bool,
    pub(crate) finish_for_all: bool,
    /// Whether the end of one replica is that of all, as on a ring.
    pub(crate) ends_together: bool,
    /// The longest time of the first join.
    pub(crate) connect_timeout: Duration,
    pub(crate) recover_for: Duration,
    /// The most gradients in a row that may be NaN or infinite.
    pub(crate) non_finite_max: u32,
    /// Decides the jitter of the back-off.
    pub(crate) seed: u64,
}
