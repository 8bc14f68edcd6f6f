//! [`LifecyclePhase`]: the phase of a training session.

/// The phase of a training session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LifecyclePhase {
    /// There is no joined worker.
    Apart,
    /// Joined, between two steps.
    Between,
    /// The session holds a token.
    Granted,
    /// The caller has token and values.
    Computing,
    /// The hooks have heard of the end. The worker leaves.
    Leaving,
    /// There is nothing left to do.
    Over,
}

impl LifecyclePhase {
    /// Returns the phase after the end of a step.
    pub(super) fn after_step(self) -> LifecyclePhase {
        match self {
            LifecyclePhase::Granted | LifecyclePhase::Computing => LifecyclePhase::Between,
            other => other,
        }
    }

    /// Returns the phase after the end of the training.
    pub(super) fn after_end(self) -> LifecyclePhase {
        match self {
            LifecyclePhase::Apart => LifecyclePhase::Over,
            _ => LifecyclePhase::Leaving,
        }
    }
}
