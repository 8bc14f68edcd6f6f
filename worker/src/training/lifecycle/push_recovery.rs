//! [`PushRecovery`]: what follows a failed push.

use std::time::Duration;

use pushpull_common::ids::Sequence;

use crate::training::gradient_outcome::GradientOutcome;

/// What follows a failed push.
#[derive(Debug, PartialEq)]
pub(crate) enum PushRecovery {
    /// Wait for this long, then for the push again.
    Resume(Sequence, Duration),
    /// The push has ended.
    Ended(GradientOutcome),
}
