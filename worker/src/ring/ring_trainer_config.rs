//! [`RingTrainerConfig`]: the settings of a training on a ring.

use std::sync::Arc;

use pushpull_checkpoint::{CheckpointStorage, Retention};
use pushpull_common::names::NamePattern;
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::Optimizer;
use pushpull_optim::optimizer::OptimizerRules;

use super::model_checkpoint::ModelCheckpoints;
#[cfg(doc)]
use super::ring_trainer::RingTrainer;
#[cfg(doc)]
use crate::Error;

/// The settings of a [`RingTrainer`].
#[derive(Debug)]
pub struct RingTrainerConfig {
    pub(super) variables: Vec<VariableSpec>,
    pub(super) rules: OptimizerRules,
    pub(super) checkpoints: Option<ModelCheckpoints>,
    pub(super) non_finite: NonFinitePolicy,
    pub(super) regroup_every: u64,
}

impl RingTrainerConfig {
    /// The settings of a training by this rule.
    pub fn new(rule: impl Optimizer) -> RingTrainerConfig {
        RingTrainerConfig {
            variables: Vec::new(),
            rules: OptimizerRules::new(Arc::new(rule)),
            checkpoints: None,
            non_finite: NonFinitePolicy::Reject {},
            regroup_every: 100,
        }
    }

    /// Adds variables. All ranks add the same in the same order. They must be dense.
    #[must_use]
    pub fn variables(mut self, variables: impl IntoIterator<Item = VariableSpec>) -> Self {
        self.variables.extend(variables);
        self
    }

    /// Assigns a rule to the variables whose names match. The last match counts.
    #[must_use]
    pub fn rule_for(mut self, names: impl Into<NamePattern>, rule: impl Optimizer) -> Self {
        self.rules.optimizer_for(names.into(), Arc::new(rule));
        self
    }

    /// Multiplies the learning rate of the variables whose names match by a factor.
    #[must_use]
    pub fn rate_for(mut self, names: impl Into<NamePattern>, factor: f64) -> Self {
        self.rules.rate_for(names.into(), factor);
        self
    }

    /// Saves checkpoints there, in the format of servers, and restores the newest one at the start.
    /// Only rank 0 uses the storage, but any rank may become rank 0: all must reach it.
    #[must_use]
    pub fn checkpoints(
        mut self,
        storage: Arc<dyn CheckpointStorage>,
        retention: Retention,
    ) -> Self {
        self.checkpoints = Some(ModelCheckpoints::new(storage, retention));
        self
    }

    /// Applies mean gradients with NaN and infinities as well. Default: such a gradient is
    /// [`Error::NonFinite`] on every rank, and changes nothing.
    #[must_use]
    pub fn allow_non_finite(mut self) -> Self {
        self.non_finite = NonFinitePolicy::Allow {};
        self
    }

    /// Lets late ranks in after each `steps` steps; 0 means never. Costs a small all-reduce.
    /// Default 100.
    #[must_use]
    pub fn regroup_every(mut self, steps: u64) -> Self {
        self.regroup_every = steps;
        self
    }
}
