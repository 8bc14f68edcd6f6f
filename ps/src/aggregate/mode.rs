//! How gradients are taken, and what becomes of a step when somebody is lost.

use std::time::Duration;

/// How updates are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Each push is applied at once, whatever other workers do.
    #[default]
    Asynchronous,
    /// Steps are made of several gradients, of which the mean is applied: those of the fastest
    /// replicas (TensorFlow's `SyncReplicasOptimizer`). Gradients of older steps are dropped, and
    /// their workers are told.
    ///
    /// A replica gives at most `ceil(replicas_to_aggregate / total_num_replicas)` gradients to a
    /// step. The update waits for every shard to hold every gradient of it. Each shard has room for
    /// that many gradients of every replica, of its own size in memory.
    Synchronous {
        /// Gradients that make a step.
        replicas_to_aggregate: u32,
        /// Replicas that are expected: if more than `replicas_to_aggregate`, the others are backups;
        /// if fewer, each gives several gradients to a step.
        total_num_replicas: u32,
    },
}

/// What becomes of a synchronous step when a replica leaves, or is silent for longer than its
/// lease. What it has given to the step stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLoss {
    /// The step takes as many gradients as those who are left can give, if these are at least
    /// `min`; below that it waits for replicas to come. Replicas that come later make the next step
    /// larger again.
    Shrink {
        /// The fewest gradients that make a step.
        min: u32,
    },
    /// The step waits for another replica. Once it has waited for so long, whoever waits with it is
    /// told which replicas are missing.
    Wait {
        /// How long.
        timeout: Duration,
    },
    /// Whoever waits for the step is told at once which replicas are missing.
    Fail,
}

impl Default for OnLoss {
    fn default() -> OnLoss {
        OnLoss::Shrink { min: 1 }
    }
}
