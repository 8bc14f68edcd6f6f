//! The update modes, each with the settings that apply to it alone.

use std::time::Duration;

use pushpull_optim::SparseReduction;

/// Whether gradients are applied one by one or averaged over several replicas.
///
/// A mode has only its own settings. Asynchronous servers do not clip, and synchronous steps have
/// no staleness:
///
/// ```compile_fail,E0599
/// pushpull_ps::Asynchronous::default().clip_by_global_norm(1.0);
/// ```
///
/// ```compile_fail,E0599
/// pushpull_ps::Synchronous::new(2).wait_ahead(1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// Each push is applied immediately, independently of other workers.
    Asynchronous(Asynchronous),
    /// Each step applies the mean of several gradients.
    Synchronous(Synchronous),
}

impl Mode {
    /// Returns the settings of synchronous mode, if this is the mode.
    pub(crate) fn synchronous(&self) -> Option<&Synchronous> {
        match self {
            Mode::Synchronous(synchronous) => Some(synchronous),
            Mode::Asynchronous(_) => None,
        }
    }

    /// Returns the settings of asynchronous mode, if this is the mode.
    pub(crate) fn asynchronous(&self) -> Option<&Asynchronous> {
        match self {
            Mode::Asynchronous(asynchronous) => Some(asynchronous),
            Mode::Synchronous(_) => None,
        }
    }

    /// Returns the treatment of stale gradients; a synchronous step takes none.
    pub(crate) fn staleness(&self) -> StalenessPolicy {
        self.asynchronous().map_or(StalenessPolicy::Ignore, |mode| mode.staleness)
    }

    /// Returns the bound of the gradients' global norm, if the servers clip.
    pub(crate) fn clip_by_global_norm(&self) -> Option<f64> {
        self.synchronous()?.clip_by_global_norm
    }

    /// Returns how rows of several gradients are combined.
    pub(crate) fn sparse_reduction(&self) -> SparseReduction {
        self.synchronous().map_or_else(SparseReduction::default, |mode| mode.sparse_reduction)
    }
}

impl Default for Mode {
    fn default() -> Mode {
        Mode::Asynchronous(Asynchronous::default())
    }
}

impl From<Asynchronous> for Mode {
    fn from(mode: Asynchronous) -> Mode {
        Mode::Asynchronous(mode)
    }
}

impl From<Synchronous> for Mode {
    fn from(mode: Synchronous) -> Mode {
        Mode::Synchronous(mode)
    }
}

/// Asynchronous mode: each push is applied immediately, independently of other workers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Asynchronous {
    pub(crate) staleness: StalenessPolicy,
    pub(crate) wait_ahead: Option<u64>,
    pub(crate) reject_older: Option<u64>,
}

impl Asynchronous {
    /// Bounds how far workers run ahead (stale synchronous parallel). A worker
    /// that is `gradients` ahead of the slowest waits for a token until the slowest has caught up.
    /// Tokens in hand count as gradients made, so a worker holds at most `gradients` tokens. A
    /// bound of 1 keeps all workers in step. Must be at least 1.
    ///
    /// Only workers that have requested a token and have neither left nor been lost count. A worker
    /// that joins later starts level with the slowest; one that returns is at most the bound ahead.
    /// Only the step owner's setting counts. Default: no bound.
    pub fn wait_ahead(self, gradients: u64) -> Self {
        Asynchronous { wait_ahead: Some(gradients), ..self }
    }

    /// Drops stale gradients: those computed from values more than `steps`
    /// global steps old, on all shards. The worker is told that its gradient was stale. The other
    /// shards wait for the step owner's decision before they apply a gradient, which costs an extra
    /// round trip. Only the step owner's setting counts; a change applies to pushes that begin
    /// after the restart. Default: every gradient is applied.
    pub fn reject_older(self, steps: u64) -> Self {
        Asynchronous { reject_older: Some(steps), ..self }
    }

    /// Sets the treatment of stale gradients. Each task applies its own
    /// setting to its own variables, so all should have the same. Default
    /// [`StalenessPolicy::Ignore`].
    pub fn staleness(self, policy: StalenessPolicy) -> Self {
        Asynchronous { staleness: policy, ..self }
    }
}

/// The adjustment of a gradient that was computed from older values than those it is applied to.
///
/// The staleness is the number of gradients that the shard has applied in between. Every policy
/// leaves a gradient of staleness 0 unchanged, to the bit. `docs/asynchronous.md` has the
/// mathematics and the sources.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum StalenessPolicy {
    /// The gradient is applied unchanged.
    #[default]
    Ignore,
    /// The learning rate of the gradient is divided by `1 + staleness` (Zhang et al. 2016). The
    /// optimizer slots receive the whole gradient. Costs nothing.
    ///
    /// Requires an optimizer with [`crate::optim::Optimizer::scales_rate`]; all built-in ones
    /// except FTRL have it. With another optimizer the server does not start.
    Damp,
    /// `lambda g g (w - w_read)` is added to each element, where `w_read` are the values that the
    /// gradient was computed from and `w` those that it is applied to (DC-ASGD with a constant
    /// lambda, Zheng et al. 2017).
    ///
    /// Costs a copy of the shard's values for each worker, on the heap and within the byte limit of
    /// [`crate::Storage`]. Each pull of a worker makes one more pass over the values. Each stale
    /// gradient makes one more pass over the gradient, the copy and the values. A gradient whose
    /// values have no copy is applied unchanged and counted in
    /// [`crate::Metrics::gradients_uncompensated`].
    DelayCompensation {
        /// The weight of the compensation: finite and not negative. [`StalenessPolicy::LAMBDA`] is
        /// a usual value.
        lambda: f64,
    },
}

impl StalenessPolicy {
    /// The default lambda of MXNet's `DCASGD`: 0.04.
    pub const LAMBDA: f64 = 0.04;

    /// Returns the value that cannot be used and the reason, if there is one.
    pub(crate) fn fault(self) -> Option<(String, &'static str)> {
        match self {
            StalenessPolicy::DelayCompensation { lambda }
                if !(lambda.is_finite() && lambda >= 0.0) =>
            {
                Some((lambda.to_string(), "lambda must be finite and not negative"))
            }
            _ => None,
        }
    }

    /// Returns the factor that the learning rate is multiplied by.
    pub(crate) fn rate(self, staleness: u64) -> f64 {
        match self {
            StalenessPolicy::Damp => 1.0 / (1.0 + staleness as f64),
            _ => 1.0,
        }
    }
}

/// Synchronous mode: each step applies the mean of several gradients, from the fastest replicas
/// (TensorFlow's `SyncReplicasOptimizer`). Gradients of older steps are dropped and reported to
/// their workers as stale.
///
/// A replica contributes at most `ceil(replicas_to_aggregate / total_num_replicas)` gradients to a
/// step. The update waits until every shard holds every gradient of the step. Each shard reserves a
/// push slot, as large as its variables, for each of those gradients of every replica.
#[doc(alias = "SyncReplicasOptimizer")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synchronous {
    pub(crate) replicas_to_aggregate: u32,
    pub(crate) total_num_replicas: u32,
    pub(crate) on_loss: OnLoss,
    pub(crate) join_timeout: Duration,
    pub(crate) deterministic: bool,
    pub(crate) sparse_reduction: SparseReduction,
    pub(crate) clip_by_global_norm: Option<f64>,
}

impl Synchronous {
    /// Configures steps of this many gradients, from as many replicas.
    pub const fn new(replicas_to_aggregate: u32) -> Self {
        Synchronous {
            replicas_to_aggregate,
            total_num_replicas: replicas_to_aggregate,
            on_loss: OnLoss::Shrink { min: 1 },
            join_timeout: Duration::from_secs(60),
            deterministic: false,
            sparse_reduction: SparseReduction::ReplicaMean,
            clip_by_global_norm: None,
        }
    }

    /// Sets the number of expected replicas. If it exceeds the number of gradients in a step, the
    /// surplus are backup replicas. If it is smaller, each replica contributes several gradients to
    /// a step. Default: the number of gradients in a step.
    pub const fn total_num_replicas(self, replicas: u32) -> Self {
        Synchronous { total_num_replicas: replicas, ..self }
    }

    /// Sets what happens to a synchronous step when a replica leaves or is lost. Only the step
    /// owner's setting counts. Default [`OnLoss::Shrink`] with a `min` of 1.
    pub fn on_loss(self, policy: OnLoss) -> Self {
        Synchronous { on_loss: policy, ..self }
    }

    /// Sets how long the first synchronous step waits for replicas that have not joined yet,
    /// counted from the first join. Only the step owner's setting counts. Default 60 s.
    pub fn join_timeout(self, timeout: Duration) -> Self {
        Synchronous { join_timeout: timeout, ..self }
    }

    /// Sets whether the gradients of a synchronous step are added in the order of the worker tasks,
    /// so that two runs over the same data are bitwise equal. Requires that
    /// `total_num_replicas` equals `replicas_to_aggregate`, worker tasks from 0 on, and no loss: a
    /// lost replica is waited for, regardless of [`Synchronous::on_loss`]. Default false.
    pub fn deterministic(self, deterministic: bool) -> Self {
        Synchronous { deterministic, ..self }
    }

    /// Sets how a synchronous step combines the rows of sparse gradients. All tasks should have the
    /// same. Default [`SparseReduction::ReplicaMean`], which equals the result for a dense
    /// variable.
    pub fn sparse_reduction(self, reduction: SparseReduction) -> Self {
        Synchronous { sparse_reduction: reduction, ..self }
    }

    /// Clips gradients by their global norm. A gradient whose Euclidean norm, over all variables on
    /// all shards, exceeds the bound is scaled down to it before the step takes the mean. Each
    /// replica's gradient is clipped by itself, as the workers' `Gradients::clip_by_global_norm`
    /// does, so the mean does not exceed the bound either. All shards scale a gradient by the same
    /// factor, which the step owner computes from the norms that they report. Rows of sparse
    /// variables count as pushed. A gradient whose norm is not finite is not scaled.
    ///
    /// The bound must be finite and above 0. Either all tasks clip or none; the step owner's bound
    /// counts. Costs a pass over each complete gradient. Default: no clipping. In asynchronous mode
    /// workers clip, because a shard applies its part before the other shards have theirs.
    pub fn clip_by_global_norm(self, bound: f64) -> Self {
        Synchronous { clip_by_global_norm: Some(bound), ..self }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damping_divides_the_rate_by_one_plus_the_staleness() {
        for (staleness, rate) in [(0, 1.0), (1, 0.5), (3, 0.25), (7, 0.125), (9, 0.1)] {
            assert_eq!(StalenessPolicy::Damp.rate(staleness), rate);
        }
        assert!(StalenessPolicy::Damp.rate(u64::MAX) > 0.0);
        let lambda = StalenessPolicy::LAMBDA;
        for policy in [StalenessPolicy::Ignore, StalenessPolicy::DelayCompensation { lambda }] {
            assert_eq!((policy.rate(0), policy.rate(9)), (1.0, 1.0));
        }
    }

    #[test]
    fn an_invalid_lambda_is_reported() {
        let fault = |lambda| StalenessPolicy::DelayCompensation { lambda }.fault();
        for lambda in [-0.1, f64::NAN, f64::INFINITY] {
            assert_eq!(fault(lambda).unwrap().0, lambda.to_string());
        }
        assert_eq!((fault(0.0), fault(0.04), StalenessPolicy::Damp.fault()), (None, None, None));
    }
}
