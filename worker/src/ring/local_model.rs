//! [`LocalModel`]: the variables and optimizer slots of one rank, and the rule that updates them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::tensor::{DType, Element, bf16, f16};
use pushpull_common::variable::{Replication, VariableSpec};
use pushpull_optim::optimizer::{OptimizerRules, SumRun, Sums, VariableRules};
use pushpull_optim::{ApplyAt, Optimizer, Run};

use crate::error::ConfigError;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::params::Params;
use crate::gradients::sharding_plan::ShardingPlan;

/// The only shard of a model that no server holds.
pub(super) const SHARD: ShardId = ShardId { task: 0, shard: 0 };

/// The elements that a rule updates at once: with slots and gradient they stay in the first-level
/// cache, from which the values are copied to the params.
const RUN: usize = 1024;

/// The variables of a model with their optimizer slots, as a server would store them on one shard.
///
/// Invariants: the values and every slot have the bytes of the shard's layout. The params of the
/// caller have the values in the types of the variables.
#[derive(Debug)]
pub(super) struct LocalModel {
    plan: Arc<ShardingPlan>,
    rules: VariableRules,
    values: AlignedBuffer,
    slots: Vec<AlignedBuffer>,
    /// The global step.
    pub(super) step: u64,
    /// The number of gradients that were applied: Adam's t.
    pub(super) gradients: u64,
}

impl LocalModel {
    /// Creates a model whose values and slots are zero.
    ///
    /// # Errors
    /// [`ConfigError`] if the variables or the rules are invalid, or a variable is sparse.
    pub(super) fn new(
        mut variables: Vec<VariableSpec>,
        rules: &OptimizerRules,
    ) -> Result<LocalModel, ConfigError> {
        if let Some((name, value, reason)) = rules.fault() {
            return Err(ConfigError::Hyperparameter { name, value, reason });
        }
        if let Some(sparse) = variables.iter().find(|variable| variable.is_sparse()) {
            return Err(ConfigError::Untrainable {
                variable: sparse.name().to_owned(),
                reason: "a ring holds dense variables: servers hold rows".to_owned(),
            });
        }
        // One process holds everything, so nothing is cut.
        for variable in &mut variables {
            variable.partitioner = pushpull_common::partition::Partitioner::None;
        }
        let map = ShardMap::new([SHARD.task], 1)?;
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin)?;
        let catalogue = Catalogue::new(variables, &placement)?;
        rules.check(&catalogue).map_err(|untrainable| ConfigError::Untrainable {
            variable: untrainable.variable,
            reason: untrainable.reason,
        })?;
        let rules = rules.of_variables(&catalogue);
        let plan = Arc::new(ShardingPlan::new(Arc::new(catalogue)));
        let layout = plan.catalogue().layout(SHARD);
        let bytes = layout.bytes() as usize;
        let slots = rules.most_slots(&layout);
        Ok(LocalModel {
            plan,
            rules,
            values: AlignedBuffer::of_bytes(bytes),
            slots: (0..slots).map(|_| AlignedBuffer::of_bytes(bytes)).collect(),
            step: 0,
            gradients: 0,
        })
    }

    /// Returns the plan of params and gradients.
    pub(super) fn plan(&self) -> &Arc<ShardingPlan> {
        &self.plan
    }

    /// Returns the variables on their only shard.
    pub(super) fn catalogue(&self) -> &Arc<Catalogue> {
        self.plan.catalogue()
    }

    /// Returns the rules of the variables.
    pub(super) fn rules(&self) -> &VariableRules {
        &self.rules
    }

    /// Sets the first values: those of the caller, and the initializers of the other variables.
    pub(super) fn initialize(&mut self, first: &BTreeMap<VariableId, Bytes>) {
        let catalogue = self.catalogue().clone();
        for partition in catalogue.layout(SHARD).partitions() {
            let id = partition.variable;
            let range = stored_range(partition);
            let values = &mut self.values.bytes_mut()[range.clone()];
            match (first.get(&id), partition.dtype) {
                (Some(set), _) => to_stored(catalogue.variable(id), set, values),
                (None, DType::F64) => catalogue.fill::<f64>(id, 0, elements_mut(values)),
                (None, DType::I64) => catalogue.fill::<i64>(id, 0, elements_mut(values)),
                (None, _) => catalogue.fill::<f32>(id, 0, elements_mut(values)),
            }
            if !partition.trainable {
                continue;
            }
            let slots = self.rules.optimizer(id).slots();
            for (buffer, slot) in self.slots.iter_mut().zip(slots) {
                let bytes = &mut buffer.bytes_mut()[range.clone()];
                match partition.dtype {
                    DType::F64 => elements_mut::<f64>(bytes).fill(slot.initial),
                    _ => elements_mut::<f32>(bytes).fill(slot.initial as f32),
                }
            }
        }
    }

    /// Takes the values of variables that each rank changes by itself from its params, if these have
    /// some.
    pub(super) fn take_replicated(&mut self, params: &Params, has_params: bool) {
        let catalogue = self.catalogue().clone();
        let layout = catalogue.layout(SHARD);
        let replicated = layout.partitions().iter().filter(|partition| {
            has_params && catalogue.variable(partition.variable).replication().is_replicated()
        });
        for partition in replicated {
            let own = &params.buffer.bytes()[self.plan.range(partition.variable)];
            let values = &mut self.values.bytes_mut()[stored_range(partition)];
            to_stored(catalogue.variable(partition.variable), own, values);
        }
    }

    /// Copies the values to the params. Those of variables that each rank changes by itself stay,
    /// if the params have some.
    pub(super) fn write_params(&self, params: &mut Params, has_params: bool) {
        params.step.0 = self.step;
        let catalogue = self.catalogue().clone();
        for partition in catalogue.layout(SHARD).partitions() {
            let variable = catalogue.variable(partition.variable);
            if has_params && variable.replication() == Replication::Local {
                continue;
            }
            let values = &self.values.bytes()[stored_range(partition)];
            self.write_values(partition, 0, values, params);
        }
    }

    /// Copies values of a variable, from this element on, to the params.
    fn write_values(
        &self,
        partition: &Partition,
        first: usize,
        values: &[u8],
        params: &mut Params,
    ) {
        let variable = self.catalogue().variable(partition.variable);
        let elements = values.len() / partition.dtype.size();
        let width = variable.dtype().size();
        let begin = self.plan.range(partition.variable).start + first * width;
        let out = &mut params.buffer.bytes_mut()[begin..begin + elements * width];
        match Encoding::of_type(variable.dtype()).and_then(Encoding::codec_of_values) {
            None => out.copy_from_slice(values),
            // Rounds as servers do.
            Some(codec) => {
                let mut encoded = Vec::new();
                let values: &[f32] = bytemuck::cast_slice(values);
                match codec.encode(values, &mut encoded) {
                    Ok(()) => out.copy_from_slice(&encoded[..out.len()]),
                    // A codec of values takes any element.
                    Err(_) => out.fill(0),
                }
            }
        }
    }

    /// Applies the means of these variables' gradients, which ascend, and copies the new values to the params.
    pub(super) fn apply<'a>(
        &mut self,
        present: &[VariableId],
        mean_of: impl Fn(VariableId) -> &'a [u8],
        params: &mut Params,
    ) {
        let catalogue = self.catalogue().clone();
        let layout = catalogue.layout(SHARD);
        let at = ApplyAt::new(self.gradients + 1, self.step);
        for partition in layout.partitions() {
            let id = partition.variable;
            if !partition.trainable || present.binary_search(&id).is_err() {
                continue;
            }
            let variable = catalogue.variable(id);
            let bytes = mean_of(id);
            let at = at.at_rate(self.rules.rate(id));
            match variable.dtype() {
                DType::F64 => {
                    self.apply_to::<f64>(partition, at, bytemuck::cast_slice(bytes), params)
                }
                DType::F32 => {
                    self.apply_to::<f32>(partition, at, bytemuck::cast_slice(bytes), params)
                }
                dtype => {
                    let wide = widened(dtype, bytes);
                    self.apply_to::<f32>(partition, at, &wide, params);
                }
            }
        }
        self.gradients += 1;
        self.step += 1;
        params.step.0 = self.step;
    }

    fn apply_to<T: RuleElement>(
        &mut self,
        partition: &Partition,
        at: ApplyAt,
        gradient: &[T],
        params: &mut Params,
    ) {
        let range = stored_range(partition);
        let count = self.rules.slots(partition);
        let at = at.with_sums(self.sums(partition, at, gradient));
        for begin in (0..gradient.len()).step_by(RUN) {
            let end = gradient.len().min(begin + RUN);
            let bytes = range.start + begin * size_of::<T>()..range.start + end * size_of::<T>();
            let rule = self.rules.optimizer(partition.variable);
            let slots = self.slots.iter_mut().take(count);
            let mut slots: Vec<&mut [T]> =
                slots.map(|slot| elements_mut(&mut slot.bytes_mut()[bytes.clone()])).collect();
            let values = elements_mut(&mut self.values.bytes_mut()[bytes.clone()]);
            let gradient = &gradient[begin..end];
            T::apply(rule, at, Run { values, slots: &mut slots, gradient });
            self.write_values(partition, begin, &self.values.bytes()[bytes], params);
        }
    }

    /// Returns the sums of a rule that needs some over a whole variable; zeros for others.
    fn sums<T: RuleElement>(
        &self,
        partition: &Partition,
        at: ApplyAt,
        gradient: &[T],
    ) -> [f64; ApplyAt::SUMS_MAX] {
        if !self.rules.sums(partition) {
            return at.sums;
        }
        let range = stored_range(partition);
        let rule = self.rules.optimizer(partition.variable);
        let values: &[T] = bytemuck::cast_slice(&self.values.bytes()[range.clone()]);
        let slots = self.slots.iter().take(self.rules.slots(partition));
        let slots: Vec<&[T]> =
            slots.map(|slot| bytemuck::cast_slice(&slot.bytes()[range.clone()])).collect();
        let mut sums = Sums::default();
        T::sum(rule, at, SumRun::new(values, &slots, gradient), &mut sums);
        sums.totals()
    }

    /// Returns the bytes of a stream.
    pub(super) fn stream(&self, stream: StoredStream) -> Option<&[u8]> {
        match stream {
            StoredStream::Values => Some(self.values.bytes()),
            StoredStream::Slot(slot) => self.slots.get(slot).map(AlignedBuffer::bytes),
        }
    }

    /// Returns the bytes of a stream, to be replaced.
    pub(super) fn stream_mut(&mut self, stream: StoredStream) -> Option<&mut [u8]> {
        match stream {
            StoredStream::Values => Some(self.values.bytes_mut()),
            StoredStream::Slot(slot) => self.slots.get_mut(slot).map(AlignedBuffer::bytes_mut),
        }
    }

    /// Returns every stream that the model has.
    pub(super) fn streams(&self) -> impl Iterator<Item = StoredStream> + use<> {
        let slots = (0..self.slots.len()).map(StoredStream::Slot);
        std::iter::once(StoredStream::Values).chain(slots)
    }
}

/// A type in which a rule updates values.
trait RuleElement: Element {
    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, Self>);
    fn sum(rule: &dyn Optimizer, at: ApplyAt, run: SumRun<'_, Self>, sums: &mut Sums);
}

impl RuleElement for f32 {
    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, f32>) {
        rule.apply_f32(at, run);
    }

    fn sum(rule: &dyn Optimizer, at: ApplyAt, run: SumRun<'_, f32>, sums: &mut Sums) {
        rule.sum_f32(at, run, sums);
    }
}

impl RuleElement for f64 {
    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, f64>) {
        rule.apply_f64(at, run);
    }

    fn sum(rule: &dyn Optimizer, at: ApplyAt, run: SumRun<'_, f64>, sums: &mut Sums) {
        rule.sum_f64(at, run, sums);
    }
}

fn stored_range(partition: &Partition) -> Range<usize> {
    partition.offset as usize..(partition.offset + partition.bytes) as usize
}

fn elements_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    crate::gradients::params::cast_elements(bytes)
}

/// Stores elements of a variable's own type.
fn to_stored(variable: &VariableSpec, set: &[u8], values: &mut [u8]) {
    match variable.dtype() {
        DType::F16 | DType::Bf16 => {
            let bytes = &set[..variable.bytes() as usize];
            elements_mut::<f32>(values).copy_from_slice(&widened(variable.dtype(), bytes));
        }
        _ => values.copy_from_slice(&set[..values.len()]),
    }
}

/// Returns elements of a half type in the type in which they are stored.
pub(super) fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Bf16 => {
            bytemuck::cast_slice::<u8, bf16>(bytes).iter().map(|it| it.to_f32()).collect()
        }
        _ => bytemuck::cast_slice::<u8, f16>(bytes).iter().map(|it| it.to_f32()).collect(),
    }
}
