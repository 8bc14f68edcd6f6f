//! [`RingTrainerConfig`]: the settings of a training on a ring.

use std::sync::Arc;

use pushpull_checkpoint::{CheckpointStorage, Retention};
use pushpull_common::codec::Codec;
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
use crate::compression::CodecRule;

/// The settings of a [`RingTrainer`].
#[derive(Debug)]
pub struct RingTrainerConfig {
    pub(super) variables: Vec<VariableSpec>,
    pub(super) rules: OptimizerRules,
    pub(super) codecs: Vec<CodecRule>,
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
            codecs: Vec::new(),
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

    /// Encodes the gradients of some variables, so that each step moves fewer bytes. `names` is the
    /// name of a variable, or a name with one `*` for any text. The last call that matches a
    /// variable decides; `None` leaves its gradients unencoded. Default: none is encoded. All ranks
    /// choose the same.
    ///
    /// Each rank keeps what its encodings leave out, and adds it to its next gradient: its residual
    /// ([`RingTrainer::residuals`]). All ranks apply the same mean, bit for bit.
    ///
    /// Cost: memory for one more gradient and its encoded form, and on each rank one encoding and
    /// two decodings of it in each step. Each variable with a codec is an operation of its own, of
    /// 2(n-1) passes, so small variables are better left unencoded. Codecs other than f16 and bf16
    /// add one gather of 24 bytes in each step, by which a gradient with NaN is refused on all ranks.
    ///
    /// The start fails with [`Error::Config`] for [`Codec::Threshold`], if no variable has such a
    /// name, or if none of these variables is trained.
    #[doc(alias = "hvd.Compression")]
    #[must_use]
    pub fn codec(mut self, names: impl Into<NamePattern>, codec: impl Into<Option<Codec>>) -> Self {
        self.codecs.push(CodecRule { names: names.into(), codec: codec.into() });
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
