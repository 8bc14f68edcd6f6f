//! [`LifecyclePhase`]: where a training stands.

/// Where a training stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LifecyclePhase {
    /// There is no joined worker.
    Apart,
    /// Joined, between two steps.
    Between,
    /// A token is held.
    Granted,
    /// The caller has token and values.
    Computing,
    /// The hooks have heard of the end. The worker leaves.
    Leaving,
    /// There is nothing left to do.
    Over,
}
