//! [`RingWorker`]: one rank of a training on a ring, with params and gradients of its caller.

use std::sync::Arc;

use pushpull_checkpoint::CheckpointError;
use pushpull_collective::Ring;
use pushpull_common::error::Chain;
use pushpull_common::ids::{RestoreEpoch, VariableId};
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::tensor::Element;
use pushpull_common::variable::Replication;

use super::bucket_plan::BucketPlan;
use super::bucket_reducer::ReducedBuckets;
use super::gradient_codecs::GradientCodecs;
use super::gradient_stream::{BucketMeans, GradientStream};
use super::local_model::LocalModel;
use super::model_checkpoint::ModelCheckpoints;
use super::reductions::{Agreement, agree, average_as, reduce};
use super::ring_trainer_config::RingTrainerConfig;
use crate::contained::contained;
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::params::{GradientMemory, Gradients, Params};
use crate::initial_values::InitialValues;
use crate::joined_model::check_finite;
use crate::outcome::{RestoredCheckpoint, SavedCheckpoint};

/// One rank of a training on a ring. The params and the gradients are its caller's: a
/// [`super::RingTrainer`], or a training session.
///
/// Invariants: `has_values` and `has_params` are true once the first `share_newest` has
/// ended. After each of its methods that returns no error, all ranks have the same model. While a
/// step is streamed its thread has the ring.
#[derive(Debug)]
pub struct RingWorker {
    ring: Ring,
    /// The facts on which all ranks must agree: variables and rules.
    facts: String,
    model: LocalModel,
    codecs: GradientCodecs,
    /// The variables that are reduced together.
    buckets: Arc<BucketPlan>,
    /// The step that is streamed.
    stream: Option<GradientStream>,
    /// The means of a streamed step; memory for the next one.
    means: BucketMeans,
    /// Whether the model has values.
    has_values: bool,
    /// Whether the params have values, of which those of local variables are this rank's own.
    has_params: bool,
    checkpoints: Option<ModelCheckpoints>,
    /// The restore epoch of the checkpoints that are saved.
    epoch: RestoreEpoch,
    restored: Option<RestoredCheckpoint>,
    non_finite: NonFinitePolicy,
}

/// What a rank wants for the next step. Of several wishes the last one in this list counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RingWish {
    /// To apply the mean of the gradients of all ranks.
    Step,
    /// To leave the step out: this rank has no gradient.
    Drop,
    /// To end the training on all ranks.
    End,
}

impl RingWish {
    /// Returns the number of the wish: of several, the highest one counts.
    pub(super) fn code(self) -> i32 {
        match self {
            RingWish::Step => 0,
            RingWish::Drop => 1,
            RingWish::End => 2,
        }
    }

    pub(super) fn of_code(code: i32) -> RingWish {
        match code {
            0 => RingWish::Step,
            1 => RingWish::Drop,
            _ => RingWish::End,
        }
    }
}

impl RingWorker {
    /// Joins a training, see [`super::RingTrainer::start`]. Returns the values as well.
    ///
    /// # Errors
    /// As there.
    pub async fn join(
        ring: Ring,
        config: RingTrainerConfig,
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<(RingWorker, Params), Error> {
        let rules = config.rules.settings();
        let model = LocalModel::new(config.variables, &config.rules)?;
        let codecs = GradientCodecs::new(model.catalogue(), &config.codecs)?;
        let encoded = codecs.facts(model.catalogue());
        let mut params = Params::new(model.plan().clone());
        let policy = config.non_finite;
        let mut worker = RingWorker {
            ring,
            facts: facts(&model, &format!("{rules}, non-finite values: {policy:?}{encoded}")),
            buckets: Arc::new(BucketPlan::new(model.plan(), |id| codecs.covers(id))),
            model,
            codecs,
            stream: None,
            means: BucketMeans::default(),
            has_values: false,
            has_params: false,
            checkpoints: config.checkpoints,
            epoch: RestoreEpoch(1),
            restored: None,
            non_finite: config.non_finite,
        };
        let mut fill = Some(fill);
        while let Err(error) = worker.share_newest(&mut params, &mut fill).await {
            match error {
                // A rank was lost before the training has begun.
                Error::Ring(lost) if lost.may_shrink() => worker.ring.shrink().await?,
                error => return Err(error),
            }
        }
        Ok((worker, params))
    }

    /// Gives this rank's model the values of the newest checkpoint, or the first values.
    fn first_values(&mut self, fill: impl FnOnce(&mut InitialValues<'_>)) -> Result<(), Error> {
        if let Some(checkpoints) = &mut self.checkpoints {
            let restored = checkpoints.restore(&mut self.model);
            self.restored = restored.map_err(|error| failed("restore a checkpoint", &error))?;
        }
        match &self.restored {
            Some(restored) => self.epoch = RestoreEpoch(restored.epoch),
            None => {
                let plan = self.model.plan().clone();
                let mut initial = InitialValues::new(&plan);
                contained("the function that sets first values", || fill(&mut initial))?;
                self.model.initialize(&initial.finish()?.dense);
            }
        }
        self.has_values = true;
        Ok(())
    }

    /// Brings all ranks to the state of the one that has the newest. If none has values, rank 0 takes
    /// the first ones. Every rank of a new ring begins with this, whether it has just come or was in
    /// the ring before.
    async fn share_newest<F>(
        &mut self,
        params: &mut Params,
        fill: &mut Option<F>,
    ) -> Result<(), Error>
    where
        F: FnOnce(&mut InitialValues<'_>),
    {
        self.ring.barrier_as(&self.facts).await?;
        // A rank without values is behind one whose values are those of step 0.
        let number = if self.has_values { self.model.step + 1 } else { 0 };
        let (root, highest) = self.ring.newest(number).await?;
        let is_root = self.ring.rank() == root;
        if highest == 0 && is_root {
            let first = match fill.take() {
                Some(fill) => self.first_values(fill),
                None => Err(Error::NotJoined { doing: "share first values" }),
            };
            if let Err(error) = first {
                let cause = Chain(&error).to_string();
                self.ring.give_up(&format!("its first values: {cause}")).await;
                return Err(error);
            }
        }
        let epoch = i64::from(self.epoch.0);
        let mut counts = [self.model.step as i64, self.model.gradients as i64, epoch];
        self.ring.broadcast(&mut counts, root).await?;
        match is_root {
            true => self.model.take_replicated(params, self.has_params),
            // What follows overwrites the model stream by stream.
            false => self.has_values = false,
        }
        for stream in self.model.streams() {
            if let Some(bytes) = self.model.stream_mut(stream) {
                // Every layout is a whole number of words.
                self.ring.broadcast::<i64>(bytemuck::cast_slice_mut(bytes), root).await?;
            }
        }
        let [step, gradients, epoch] = counts;
        self.model.step = step as u64;
        self.model.gradients = gradients as u64;
        self.epoch = RestoreEpoch(epoch as u32);
        self.model.write_params(params, self.has_params);
        self.has_values = true;
        self.has_params = true;
        if self.ring.rank() != 0
            && let Some(checkpoints) = &mut self.checkpoints
        {
            checkpoints.release();
        }
        Ok(())
    }

    /// Shares the newest state among ranks of which at least one has values.
    async fn share_again(&mut self, params: &mut Params) -> Result<(), Error> {
        self.share_newest(params, &mut None::<fn(&mut InitialValues<'_>)>).await
    }

    /// Checks gradients before the ranks agree on a step.
    ///
    /// # Errors
    /// [`Error::EmptyPush`].
    pub fn check(&self, gradients: &Gradients) -> Result<(), Error> {
        match gradients.present().next() {
            Some(_) => Ok(()),
            None => Err(Error::EmptyPush),
        }
    }

    /// The ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// The ring, for operations of the program's own.
    pub fn ring_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The number of steps that were made.
    pub fn global_step(&self) -> u64 {
        self.model.step
    }

    /// The checkpoint from which the training was restored, on rank 0.
    pub fn restored(&self) -> Option<&RestoredCheckpoint> {
        self.restored.as_ref()
    }

    /// Returns an empty set of gradients.
    pub fn gradients(&self) -> Gradients {
        let memory = GradientMemory::new(self.model.plan(), Arc::default());
        Gradients::new(self.model.plan().clone(), memory)
    }

    /// Agrees with all ranks on the next step. Costs one small all-reduce.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn agree(&mut self, wish: RingWish) -> Result<Agreement, Error> {
        Ok(agree(&mut self.ring, self.model.step, wish).await?)
    }

    /// Lets late ranks in, if there are some. Every rank calls it at the same step.
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn regroup(&mut self, params: &mut Params) -> Result<bool, Error> {
        let has_changed = self.ring.regroup().await?;
        if has_changed {
            self.share_again(params).await?;
        }
        Ok(has_changed)
    }

    /// Reduces the gradients of all ranks to their mean, applies it, and empties the gradients; see
    /// [`super::RingTrainer::apply`].
    ///
    /// # Errors
    /// As there.
    pub async fn apply(
        &mut self,
        gradients: &mut Gradients,
        params: &mut Params,
    ) -> Result<u64, Error> {
        let present: Vec<VariableId> = gradients.present().collect();
        if present.is_empty() {
            return Err(Error::EmptyPush);
        }
        for &id in &present {
            gradients.apply_factor(id);
        }
        let updated = match self.reduce(&present, gradients).await {
            Ok(()) => self.update(&present, |id| gradients.bytes_of(id), params),
            Err(Error::Ring(error)) => return Err(error.into()),
            Err(error) => Err(error),
        };
        gradients.reset();
        updated?;
        self.average(params).await?;
        Ok(self.model.step)
    }

    /// Updates the values by the means of these variables' gradients. Changes nothing if one of them
    /// is not to be applied.
    fn update<'a>(
        &mut self,
        present: &[VariableId],
        mean_of: impl Fn(VariableId) -> &'a [u8],
        params: &mut Params,
    ) -> Result<(), Error> {
        let plan = self.model.plan().clone();
        for &id in present {
            check_finite(self.non_finite, &plan, id, mean_of(id), 1.0)?;
        }
        self.model.apply(present, mean_of, params);
        Ok(())
    }

    /// Averages the gradients of these variables, in ascending order, bucket by bucket: a streamed
    /// step has the same means. Neighbours in a bucket travel together: usually all do.
    async fn reduce(
        &mut self,
        present: &[VariableId],
        gradients: &mut Gradients,
    ) -> Result<(), Error> {
        let plan = self.model.plan().clone();
        let buffer = gradients.memory.buffer_mut();
        for bucket in self.buckets.buckets() {
            let is_present = |id: &VariableId| present.binary_search(id).is_ok();
            let variables: Vec<VariableId> =
                bucket.variables.iter().copied().filter(is_present).collect();
            let follow = |&a: &VariableId, &b: &VariableId| {
                plan.range(a).end.next_multiple_of(8) == plan.range(b).start
            };
            for group in variables.chunk_by(follow) {
                let (Some(&first), Some(&last)) = (group.first(), group.last()) else { continue };
                for pair in group.windows(2) {
                    // What lies between two variables is nobody's.
                    buffer.slice_mut(plan.range(pair[0]).end..plan.range(pair[1]).start).fill(0);
                }
                let bytes = buffer.slice_mut(plan.range(first).start..plan.range(last).end);
                reduce(&mut self.ring, &mut self.codecs, &plan, group, bytes).await?;
            }
        }
        Ok(())
    }

    /// Begins a streamed step; see [`super::RingTrainer::begin`]. If `agrees`, the ranks agree on the
    /// step before they reduce its first bucket. A step before that was not finished is dropped.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn begin(&mut self, agrees: bool) -> Result<(), Error> {
        self.drop_stream();
        let agrees_on = agrees.then_some(self.model.step);
        let memory = std::mem::take(&mut self.means.0);
        let plan = self.model.plan().clone();
        let buckets = self.buckets.clone();
        let stream = GradientStream::begin(
            &mut self.ring,
            &mut self.codecs,
            plan,
            buckets,
            agrees_on,
            memory,
        )?;
        self.stream = Some(stream);
        Ok(())
    }

    /// Takes the gradient of a variable of the streamed step; see [`super::StreamedStep::variable`].
    ///
    /// # Errors
    /// As there.
    pub fn stream_variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        match &mut self.stream {
            Some(stream) => stream.variable(name, gradient),
            None => Err(Error::Ended { doing: STREAM }),
        }
    }

    /// Waits until the gradients of the streamed step are reduced, and ends the step. Returns the
    /// agreement of the ranks, and whether the gradients are reduced: if they are and all ranks want
    /// the step, [`RingWorker::apply_streamed`] comes next.
    ///
    /// # Errors
    /// Those of [`super::StreamedStep::finish`], from before the ranks have agreed. Dropping the
    /// future leaves the step as it is.
    pub async fn end_stream(&mut self) -> Result<(Agreement, Result<(), Error>), Error> {
        let Some(stream) = &mut self.stream else { return Err(Error::Ended { doing: STREAM }) };
        let ended = match stream.reduced().await {
            Err(Error::EmptyPush) => {
                self.drop_stream();
                return Err(Error::EmptyPush);
            }
            ended => ended,
        };
        let (agreement, result) = self.take_back(ended)?;
        match agreement {
            Some(agreed) => Ok((agreed, result)),
            None => Err(result.err().unwrap_or(Error::Ended { doing: STREAM })),
        }
    }

    /// Applies the means of the streamed step; see [`RingWorker::apply`].
    ///
    /// # Errors
    /// [`Error::Ring`] and [`Error::NonFinite`].
    pub async fn apply_streamed(&mut self, params: &mut Params) -> Result<u64, Error> {
        let means = std::mem::take(&mut self.means);
        let plan = self.model.plan().clone();
        let buckets = self.buckets.clone();
        let mut present: Vec<VariableId> =
            buckets.buckets().iter().flat_map(|bucket| bucket.variables.iter().copied()).collect();
        present.sort_unstable();
        let updated = self.update(&present, |id| means.bytes_of(&plan, &buckets, id), params);
        self.means = means;
        updated?;
        self.average(params).await?;
        Ok(self.model.step)
    }

    /// Drops the streamed step, if there is one. The ring is given up if other ranks have a part of
    /// the gradients. Returns the agreement of the ranks if the step is over for all of them anyway.
    ///
    /// Blocks the thread until that of the step has stopped: for the bucket under way, and for some
    /// 50 ms if that stands still.
    pub fn drop_stream(&mut self) -> Option<Agreement> {
        let stream = self.stream.take()?;
        // The next operation of the ring has the reason of an error.
        let (agreement, result) = self.take_back(stream.stop()).ok()?;
        let agreed = agreement?;
        match result {
            Ok(()) if agreed.wish == RingWish::Step => {
                self.ring.try_give_up("its streamed step was dropped");
                None
            }
            Ok(()) | Err(Error::NonFinite { .. }) => Some(agreed),
            Err(_) => None,
        }
    }

    /// Takes the ring back from a streamed step. Returns the agreement of the ranks, and whether the
    /// gradients are reduced.
    ///
    /// # Errors
    /// [`Error::Thread`] if the ring is gone.
    fn take_back(
        &mut self,
        ended: Result<ReducedBuckets, Error>,
    ) -> Result<(Option<Agreement>, Result<(), Error>), Error> {
        let stream = self.stream.take();
        let ReducedBuckets { ring, codecs, buckets, agreement, result } = ended?;
        self.ring = ring;
        self.codecs = codecs;
        if let Some(stream) = stream {
            self.means = BucketMeans(stream.memory_with(buckets));
        }
        Ok((agreement, result))
    }

    /// Averages the variables that each rank changes by itself and whose interval has passed.
    async fn average(&mut self, params: &mut Params) -> Result<(), Error> {
        let plan = self.model.plan().clone();
        let step = self.model.step;
        for (index, variable) in plan.catalogue().variables().iter().enumerate() {
            let Replication::Mean { every } = variable.replication() else { continue };
            if !step.is_multiple_of(every) {
                continue;
            }
            let range = plan.range(VariableId(index as u32));
            // A mean that does not come about leaves the values as they are.
            let mut mean = AlignedBuffer::of_bytes(range.len());
            let bytes = &mut mean.bytes_mut()[..range.len()];
            bytes.copy_from_slice(&params.buffer.bytes()[range.clone()]);
            average_as(&mut self.ring, variable.dtype(), variable.name(), bytes).await?;
            params.buffer.bytes_mut()[range].copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Forms the next ring with the ranks that are left; see [`super::RingTrainer::recover`].
    ///
    /// # Errors
    /// [`Error::Ring`].
    pub async fn recover(&mut self, params: &mut Params) -> Result<(), Error> {
        self.ring.shrink().await?;
        self.share_again(params).await
    }

    /// Saves a checkpoint, on rank 0; see [`super::RingTrainer::save`].
    ///
    /// # Errors
    /// [`Error::Checkpoint`].
    pub fn save(&mut self, params: &Params, user: &[u8]) -> Result<Option<SavedCheckpoint>, Error> {
        let doing = "save a checkpoint";
        let Some(checkpoints) = &mut self.checkpoints else {
            let cause = "no checkpoints are configured".to_owned();
            return Err(Error::Checkpoint { doing, cause });
        };
        if self.ring.rank() != 0 {
            return Ok(None);
        }
        self.model.take_replicated(params, self.has_params);
        let saved = checkpoints.save(&self.model, self.epoch, user);
        saved.map(Some).map_err(|error| failed(doing, &error))
    }

    /// Returns the residuals of this rank; see [`super::RingTrainer::residuals`].
    ///
    /// # Errors
    /// As there.
    pub fn residuals(&self) -> Result<Vec<u8>, Error> {
        self.codecs.save(self.model.catalogue())
    }

    /// Restores the residuals of a rank; see [`super::RingTrainer::restore_residuals`].
    ///
    /// # Errors
    /// As there.
    pub fn restore_residuals(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.codecs.restore(self.model.catalogue(), bytes)
    }

    /// Ends the training for all ranks by a fault of this one.
    pub async fn give_up(&mut self, reason: &str) {
        self.ring.give_up(reason).await;
    }

    /// Leaves the ring.
    pub async fn leave(self) {
        self.ring.leave().await;
    }
}

/// Returns a text that differs between two ranks with other variables or settings, also where it is
/// shortened.
fn facts(model: &LocalModel, settings: &str) -> String {
    let digest = model.catalogue().digest();
    let variables: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let crc = crc32c::crc32c(settings.as_bytes());
    format!("variables {variables}, rules {crc:08x}: {settings}")
}

fn failed(doing: &'static str, error: &CheckpointError) -> Error {
    Error::Checkpoint { doing, cause: Chain(error).to_string() }
}

const STREAM: &str = "push gradients one by one";
