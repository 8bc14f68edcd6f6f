//! [`RingTrainer`]: a model that the ranks of a ring train together.

use std::sync::Arc;

use pushpull_checkpoint::{CheckpointError, CheckpointStorage, Retention};
use pushpull_collective::{Reduction, Ring, RingError, RingMetrics};
use pushpull_common::error::Chain;
use pushpull_common::ids::{RestoreEpoch, VariableId};
use pushpull_common::names::NamePattern;
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::tensor::{DType, bf16, f16};
use pushpull_common::variable::{Replication, VariableSpec};
use pushpull_optim::Optimizer;
use pushpull_optim::optimizer::OptimizerRules;

use super::local_model::LocalModel;
use super::model_checkpoint::ModelCheckpoints;
use crate::contained::contained;
use crate::error::Error;
use crate::gradients::params::{GradientMemory, Gradients, Params, cast_elements};
use crate::initial_values::InitialValues;
use crate::joined_model::check_finite;
use crate::outcome::{RestoredCheckpoint, SavedCheckpoint};

/// The settings of a [`RingTrainer`].
#[derive(Debug)]
pub struct RingTrainerConfig {
    variables: Vec<VariableSpec>,
    rules: OptimizerRules,
    checkpoints: Option<ModelCheckpoints>,
    non_finite: NonFinitePolicy,
    regroup_every: u64,
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
        self.checkpoints = Some(ModelCheckpoints { storage, retention });
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

/// A model that the ranks of a ring train together: each computes the gradient of its share of a
/// batch, the mean goes around the ring, and the rule updates the values on each rank.
///
/// - **Start.** The rank with the newest values has all others take them: after a restart that is
///   rank 0 with the newest checkpoint, or with the first values. No program can forget that.
/// - **Step.** [`RingTrainer::apply`] reduces and applies the gradients. All ranks have the same
///   bits afterwards.
/// - **Loss.** After an error for which [`RingError::may_shrink`], [`RingTrainer::recover`] goes on
///   with the ranks that are left.
/// - **Checkpoints.** Rank 0 saves, in the format of servers: they can go on with it, and a ring
///   with theirs.
#[derive(Debug)]
#[doc(alias = "hvd.DistributedOptimizer")]
#[doc(alias = "DistributedOptimizer")]
#[doc(alias = "BroadcastGlobalVariablesHook")]
pub struct RingTrainer {
    ring: Ring,
    /// The facts on which all ranks must agree: variables and rules.
    facts: String,
    model: LocalModel,
    /// Whether the model has values.
    has_values: bool,
    params: Params,
    /// Whether the params have values, of which those of local variables are this rank's own.
    has_params: bool,
    gradients: Gradients,
    checkpoints: Option<ModelCheckpoints>,
    /// The restore epoch of the checkpoints that are saved.
    epoch: RestoreEpoch,
    restored: Option<RestoredCheckpoint>,
    non_finite: NonFinitePolicy,
    regroup_every: u64,
}

impl RingTrainer {
    /// Starts a training on a ring: restores the newest checkpoint or sets the first values, and
    /// brings all ranks to them. Rank 0 calls `fill` if there is no checkpoint; other variables
    /// have the values of their initializers.
    ///
    /// # Errors
    /// - [`Error::Config`] for invalid variables and rules.
    /// - [`Error::Checkpoint`] on rank 0 if the checkpoints cannot be read; the others get
    ///   [`RingError::GivenUp`] with the cause.
    /// - [`Error::Ring`] for faults of the ring. Ranks with other variables or rules get
    ///   [`RingError::Difference`].
    pub async fn start(
        ring: Ring,
        config: RingTrainerConfig,
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<RingTrainer, Error> {
        let rules = config.rules.settings();
        let model = LocalModel::new(config.variables, &config.rules)?;
        let params = Params::new(model.plan().clone());
        let memory = GradientMemory::new(model.plan(), Arc::default());
        let gradients = Gradients::new(model.plan().clone(), memory);
        let digest = model.catalogue().digest();
        let digest: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let mut trainer = RingTrainer {
            ring,
            facts: format!("variables {digest}, rules {rules}"),
            model,
            has_values: false,
            params,
            has_params: false,
            gradients,
            checkpoints: config.checkpoints,
            epoch: RestoreEpoch(1),
            restored: None,
            non_finite: config.non_finite,
            regroup_every: config.regroup_every,
        };
        if trainer.ring.rank() == 0
            && let Err(error) = trainer.first_values(fill)
        {
            let cause = Chain(&error).to_string();
            trainer.ring.give_up(&format!("its first values: {cause}")).await;
            return Err(error);
        }
        trainer.share_newest().await?;
        Ok(trainer)
    }

    /// Gives this rank's model the values of the newest checkpoint, or the first values.
    fn first_values(&mut self, fill: impl FnOnce(&mut InitialValues<'_>)) -> Result<(), Error> {
        if let Some(checkpoints) = &self.checkpoints {
            let restored = checkpoints.restore(&mut self.model);
            self.restored = restored.map_err(|error| failed("restore a checkpoint", &error))?;
        }
        match &self.restored {
            Some(restored) => self.epoch = RestoreEpoch(restored.epoch),
            None => {
                let plan = self.model.plan().clone();
                let mut initial = InitialValues::new(&plan);
                contained("the function that sets first values", || fill(&mut initial))?;
                self.model.initialize(&initial.finish()?);
            }
        }
        self.has_values = true;
        Ok(())
    }

    /// Brings all ranks to the state of the one that has the newest. Every rank of a new ring begins
    /// with this, whether it has just come or was in the ring before.
    async fn share_newest(&mut self) -> Result<(), Error> {
        self.ring.barrier_as(&self.facts).await?;
        // A rank without values is behind one whose values are those of step 0.
        let number = if self.has_values { self.model.step + 1 } else { 0 };
        let root = self.ring.newest(number).await?;
        let epoch = i64::from(self.epoch.0);
        let mut counts = [self.model.step as i64, self.model.gradients as i64, epoch];
        self.ring.broadcast(&mut counts, root).await?;
        let [step, gradients, epoch] = counts;
        self.model.step = step as u64;
        self.model.gradients = gradients as u64;
        self.epoch = RestoreEpoch(epoch as u32);
        if self.ring.rank() == root {
            self.model.take_replicated(&self.params, self.has_params);
        }
        for stream in self.model.streams() {
            if let Some(bytes) = self.model.stream_mut(stream) {
                // Every layout is a whole number of words.
                self.ring.broadcast::<i64>(bytemuck::cast_slice_mut(bytes), root).await?;
            }
        }
        self.model.write_params(&mut self.params, self.has_params);
        self.has_values = true;
        self.has_params = true;
        Ok(())
    }

    /// The ring. Operations of the program's own must come in the same order on all ranks.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The number of steps that were made, by this training and those whose checkpoints it
    /// continues.
    pub fn global_step(&self) -> u64 {
        self.model.step
    }

    /// The checkpoint from which the training was restored, on rank 0.
    pub fn restored(&self) -> Option<&RestoredCheckpoint> {
        self.restored.as_ref()
    }

    /// Returns the counts and times of this rank.
    pub fn metrics(&self) -> RingMetrics {
        self.ring.metrics()
    }

    /// Returns the values, and the gradients of the next step, which are empty after each
    /// [`RingTrainer::apply`].
    pub fn parts(&mut self) -> (&Params, &mut Gradients) {
        (&self.params, &mut self.gradients)
    }

    /// Reduces the gradients of all ranks to their mean and applies it. Every rank gives gradients
    /// of the same variables. Returns the global step.
    ///
    /// # Errors
    /// - [`Error::Ring`]: see [`RingTrainer::recover`].
    /// - [`Error::NonFinite`] on every rank, if the mean is NaN or infinite: nothing has changed, and
    ///   the training may go on.
    /// - [`Error::EmptyPush`] if no variable has a gradient.
    pub async fn apply(&mut self) -> Result<u64, Error> {
        let present: Vec<VariableId> = self.gradients.present().collect();
        if present.is_empty() {
            return Err(Error::EmptyPush);
        }
        for &id in &present {
            self.gradients.apply_factor(id);
        }
        self.reduce(&present).await?;
        let plan = self.model.plan().clone();
        let checked = present.iter().try_for_each(|&id| {
            check_finite(self.non_finite, &plan, id, self.gradients.bytes_of(id), 1.0)
        });
        if checked.is_ok() {
            self.model.apply(&self.gradients, &mut self.params);
        }
        self.gradients.reset();
        checked?;
        self.average().await?;
        let step = self.model.step;
        if self.regroup_every > 0 && step.is_multiple_of(self.regroup_every) {
            self.regroup().await?;
        }
        Ok(step)
    }

    /// Averages the gradients of these variables. Neighbours of one type travel together: usually
    /// all do.
    async fn reduce(&mut self, present: &[VariableId]) -> Result<(), Error> {
        let plan = self.model.plan().clone();
        let catalogue = plan.catalogue();
        let mut order: Vec<VariableId> = present.to_vec();
        order.sort_by_key(|&id| plan.range(id).start);
        let dtype = |id: VariableId| catalogue.variable(id).dtype();
        let groups = order.chunk_by(|&a, &b| {
            dtype(a) == dtype(b) && plan.range(a).end.next_multiple_of(8) == plan.range(b).start
        });
        for group in groups {
            let (Some(&first), Some(&last)) = (group.first(), group.last()) else { continue };
            let range = plan.range(first).start..plan.range(last).end;
            let names = group.iter().map(|&id| catalogue.variable(id).name());
            let names = names.collect::<Vec<_>>().join(", ");
            let buffer = self.gradients.memory.buffer_mut();
            for pair in group.windows(2) {
                // What lies between two variables is nobody's.
                buffer.slice_mut(plan.range(pair[0]).end..plan.range(pair[1]).start).fill(0);
            }
            reduce_as(&mut self.ring, dtype(first), &names, buffer.slice_mut(range)).await?;
        }
        Ok(())
    }

    /// Averages the variables that each rank changes by itself and whose interval has passed.
    async fn average(&mut self) -> Result<(), Error> {
        let plan = self.model.plan().clone();
        let step = self.model.step;
        for (index, variable) in plan.catalogue().variables().iter().enumerate() {
            let Replication::Mean { every } = variable.replication() else { continue };
            if !step.is_multiple_of(every) {
                continue;
            }
            let range = plan.range(VariableId(index as u32));
            let bytes = &mut self.params.buffer.bytes_mut()[range];
            reduce_as(&mut self.ring, variable.dtype(), variable.name(), bytes).await?;
        }
        Ok(())
    }

    /// Forms the next ring with the ranks that are left, after [`RingError::may_shrink`], and brings
    /// all to the newest state. Every rank that goes on calls it. Gradients that were not applied on
    /// the rank with the newest state do not count.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn recover(&mut self) -> Result<(), Error> {
        self.gradients.reset();
        self.ring.shrink().await?;
        self.share_newest().await
    }

    /// Lets late ranks in, if there are some. [`RingTrainer::apply`] does so by itself, see
    /// [`RingTrainerConfig::regroup_every`]. Returns whether the ring has changed.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn regroup(&mut self) -> Result<bool, Error> {
        let changed = self.ring.regroup().await?;
        if changed {
            self.share_newest().await?;
        }
        Ok(changed)
    }

    /// Saves a checkpoint, on rank 0; `None` on the others, which do not wait. `user` is kept with
    /// it, at most 1 MiB. Blocks the thread while it writes.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it cannot be written, or no storage is configured.
    pub fn save(&mut self, user: &[u8]) -> Result<Option<SavedCheckpoint>, Error> {
        let doing = "save a checkpoint";
        let Some(checkpoints) = &self.checkpoints else {
            let cause = "no checkpoints are configured".to_owned();
            return Err(Error::Checkpoint { doing, cause });
        };
        if self.ring.rank() != 0 {
            return Ok(None);
        }
        self.model.take_replicated(&self.params, self.has_params);
        let saved = checkpoints.save(&self.model, self.epoch, user);
        saved.map(Some).map_err(|error| failed(doing, &error))
    }

    /// Leaves the ring. Returns the values.
    pub async fn leave(self) -> Params {
        self.ring.leave().await;
        self.params
    }
}

/// Averages elements of this type.
async fn reduce_as(
    ring: &mut Ring,
    dtype: DType,
    name: &str,
    bytes: &mut [u8],
) -> Result<(), RingError> {
    let mean = Reduction::Mean;
    match dtype {
        DType::F64 => ring.all_reduce_as::<f64>(name, cast_elements(bytes), mean).await,
        DType::F16 => ring.all_reduce_as::<f16>(name, cast_elements(bytes), mean).await,
        DType::Bf16 => ring.all_reduce_as::<bf16>(name, cast_elements(bytes), mean).await,
        _ => ring.all_reduce_as::<f32>(name, cast_elements(bytes), mean).await,
    }
}

fn failed(doing: &'static str, error: &CheckpointError) -> Error {
    Error::Checkpoint { doing, cause: Chain(error).to_string() }
}
