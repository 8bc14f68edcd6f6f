//! Update modes, and the policies for a synchronous step that loses a replica.

use std::time::Duration;

/// Whether gradients are applied one by one or averaged over several replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Each push is applied immediately, independently of other workers.
    #[default]
    Asynchronous,
    /// Each step applies the mean of several gradients, from the fastest replicas (TensorFlow's
    /// `SyncReplicasOptimizer`). Gradients of older steps are dropped and reported to their workers
    /// as stale.
    ///
    /// A replica contributes at most `ceil(replicas_to_aggregate / total_num_replicas)` gradients
    /// to a step. The update waits until every shard holds every gradient of the step. Each shard
    /// reserves a push slot, as large as its variables, for each of those gradients of every
    /// replica.
    Synchronous {
        /// The number of gradients in a step.
        replicas_to_aggregate: u32,
        /// The number of expected replicas. If it exceeds `replicas_to_aggregate`, the surplus are
        /// backup replicas. If it is smaller, each replica contributes several gradients to a step.
        total_num_replicas: u32,
    },
}

/// The policy for a synchronous step when a replica leaves or its lease expires. Gradients of the
/// replica that were already admitted to the step remain in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLoss {
    /// The step takes as many gradients as the remaining replicas can give, but at least `min`.
    /// With fewer replicas it waits for others to join. Replicas that join later enlarge the next
    /// step.
    Shrink {
        /// The minimum number of gradients in a step.
        min: u32,
    },
    /// The step waits for another replica. After `timeout`, calls that wait for the step fail with
    /// an error that names the absent replicas.
    Wait {
        /// How long calls wait before they fail.
        timeout: Duration,
    },
    /// Calls that wait for the step fail at once, with an error that names the absent replicas.
    Fail,
}

impl Default for OnLoss {
    fn default() -> OnLoss {
        OnLoss::Shrink { min: 1 }
    }
}
