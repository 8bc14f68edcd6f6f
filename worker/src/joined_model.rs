//! What a worker has once it has joined: the variables, how their gradients travel, and the way to the
//! session. Pushes that are under way share it, so that they borrow nothing of the worker.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_common::catalogue::Partition;
use pushpull_common::finite::first_non_finite;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::message::NonFinitePolicy;
use pushpull_common::tensor::DType;

use crate::client::Client;
use crate::compression::{Compression, find_in_singles};
use crate::error::Error;
use crate::handles::PushHandle;
use crate::params::Gradients;
use crate::parts::{Scatter, Scattered};
use crate::push_buffers::{GradientBuffer, Run};
use crate::rows::{Cutting, RowsOf};
use crate::runtime::Caller;
use crate::session::{Command, PushOrder};
use crate::sharding_plan::ShardingPlan;
use crate::staging::{Copies, StagedParts};

/// From how many parts for a shard on a push is looked at while it is sent: of less, the look takes less
/// time than the words between two threads that it takes to send part by part.
const LARGE_ROUNDS: usize = 4;

/// At most so many commands make up one push.
const TURNS_MAX: usize = 64;

/// What is shared by a worker and its pushes.
#[derive(Debug)]
pub(crate) struct JoinedModel {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) caller: Arc<Caller>,
    pub(crate) timeout: Duration,
    /// What of gradients may lie in rooms of trays: what travels as it lies.
    pub(crate) runs: Arc<[Run]>,
    compression: Mutex<Compression>,
    non_finite: NonFinitePolicy,
    owner: ShardId,
    /// Memory for what is sent variable by variable: each has its own, as the next push of it is as long.
    spares: Mutex<BTreeMap<VariableId, Vec<Arc<StagedParts>>>>,
}

impl JoinedModel {
    pub(crate) fn new(
        plan: Arc<ShardingPlan>,
        client: &Client,
        compression: Compression,
    ) -> JoinedModel {
        let runs = plan.runs(|id| !compression.covers(id)).into();
        JoinedModel {
            plan,
            runs,
            caller: client.caller.clone(),
            timeout: client.config.timeout,
            compression: Mutex::new(compression),
            non_finite: client.welcomed.non_finite,
            owner: client.owner,
            spares: Mutex::default(),
        }
    }

    /// The codecs, with what gradients have left out.
    pub(crate) fn compression(&self) -> MutexGuard<'_, Compression> {
        // A panic in a codec leaves a residual of numbers, of whatever worth.
        self.compression.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a push done, or waited for.
    pub(crate) fn push(&self, command: Command) -> PushHandle {
        let call = self.caller.call("push", command, self.timeout);
        PushHandle::new(call, Some(self.plan.clone()))
    }

    /// A push that was not begun, and why.
    pub(crate) fn refuse(&self, error: Error) -> PushHandle {
        PushHandle::new(self.caller.failed("push", error), None)
    }

    /// Has a push done. One that is not looked at before it is sent is looked at now, part by part, while
    /// those before are on their way; what is found withdraws it.
    pub(crate) fn push_while_looking(&self, mut order: PushOrder) -> PushHandle {
        let looks = |s: &&mut Scattered| {
            self.looks_while_sending(&self.compression(), &s.scatter, &s.buffer)
        };
        let Some(first) = order.scattered.as_mut().filter(looks) else {
            return self.push(Command::Push { order });
        };
        let rounds = first.rounds.clone();
        // The first has been looked at.
        first.rounds = 0..1;
        let first = first.clone();
        let call = self.caller.call("push", Command::Start { order }, self.timeout);
        for some in turns(rounds) {
            let last = some.end == first.scatter.rounds();
            let look = |round| self.look_at(&first.scatter, round, &first.buffer);
            let found = some.clone().try_for_each(look);
            let scattered = Scattered { rounds: some, ..first.clone() };
            let rest = Command::Rest { of: call.op(), scattered, last };
            if let Err(error) = found.and_then(|()| self.caller.tell("push", rest)) {
                // Nobody waits for it: it is withdrawn.
                drop(call);
                return self.refuse(error);
            }
        }
        PushHandle::new(call, Some(self.plan.clone()))
    }

    /// Whether a push is so large, and goes to so many shards, that it is looked at while it is sent.
    /// What a codec leaves out is written down before, and would be lost with it; what lies in rooms is
    /// not sent.
    pub(crate) fn looks_while_sending(
        &self,
        compression: &Compression,
        scatter: &Scatter,
        buffer: &GradientBuffer,
    ) -> bool {
        self.non_finite == (NonFinitePolicy::Reject {})
            && compression.is_of_none()
            && self.plan.shards() != [self.owner]
            && scatter.rounds() >= LARGE_ROUNDS
            && buffer.push_slots() == 0
    }

    /// Looks for NaN and infinities in what shards get in one round.
    fn look_at(
        &self,
        scatter: &Scatter,
        round: usize,
        gradients: &GradientBuffer,
    ) -> Result<(), Error> {
        scatter.ranges(round).try_for_each(|(shard, range)| {
            let layout = self.plan.catalogue().layout_of(shard).into_iter();
            let mut partitions = layout.flat_map(|layout| layout.within(range.clone()));
            partitions.try_for_each(|partition| self.look_within(partition, &range, gradients))
        })
    }

    /// The same in what a range of a shard's layout has of a partition.
    fn look_within(
        &self,
        partition: &Partition,
        range: &Range<u64>,
        gradients: &GradientBuffer,
    ) -> Result<(), Error> {
        let size = partition.dtype.size();
        let start = partition.offset.max(range.start);
        let end = (partition.offset + partition.bytes).min(range.end).max(start);
        let first = partition.elements.start as usize + (start - partition.offset) as usize / size;
        let place = self.plan.range(partition.variable).start + first * size;
        let bytes = gradients.slice(place..place + (end - start) as usize);
        match first_non_finite(partition.dtype, bytes) {
            None => Ok(()),
            Some((index, value)) => {
                let variable = self.plan.catalogue().variable(partition.variable);
                let (variable, element) = (variable.name().to_owned(), first + index);
                Err(Error::NonFinite { variable, element, value })
            }
        }
    }

    /// Looks at all that is to be pushed, before anything of it is encoded or sent, but for what can be
    /// looked at while it is sent: of that at the first round alone.
    pub(crate) fn check(&self, gradients: &Gradients, scatter: &Scatter) -> Result<(), Error> {
        let (plan, compression) = (&self.plan, self.compression());
        let buffer = &gradients.memory.buffer;
        let later = self.looks_while_sending(&compression, scatter, buffer);
        if later {
            self.look_at(scatter, 0, buffer)?;
        }
        let elsewhere = later || plan.shards() == [self.owner];
        // There may be many variables, and nothing to be asked of any.
        let none = elsewhere && compression.is_of_none() && !plan.has_some_halves();
        for id in gradients.present().take_while(|_| !none) {
            let (bytes, factor) = (gradients.bytes_of(id), gradients.factor(id));
            if !(elsewhere && self.travels_as_it_lies(&compression, id)) {
                check_finite(self.non_finite, plan, id, bytes, factor)?;
            }
            compression.check(plan, id, bytes, factor)?;
        }
        for rows in gradients.memory.rows().iter() {
            let factor = gradients.factor(rows.variable);
            check_rows_finite(self.non_finite, plan, rows, factor)?;
            compression.check_rows(plan, rows, factor)?;
        }
        Ok(())
    }

    /// Whether looking for NaN and infinities in the gradient of a variable can be put off: until its parts
    /// are sent, or to its shard, which does so as they come. The latter goes where the whole push goes to
    /// the step owner alone: what that refuses has been counted nowhere. What is encoded is looked at as it
    /// is before.
    fn travels_as_it_lies(&self, compression: &Compression, id: VariableId) -> bool {
        !compression.covers(id)
            && self.plan.catalogue().partitions_of(id).iter().all(|p| p.own.is_none())
    }

    /// Makes the parts of a push that are made for it alone: of rows, which are cut where they lie; and of
    /// what is encoded.
    pub(crate) fn make_parts(&self, gradients: &mut Gradients) -> Result<(), Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        let factors = &gradients.factors;
        let factor = |id| factors.get(&id).copied().unwrap_or(1.0);
        let own = gradients.memory.own_mut();
        let mut next = own.rows.variables().next();
        while let Some(id) = next {
            cut_rows(plan, &mut compression, own, id, factor(id))?;
            next = own.rows.variables().find(|other| *other > id);
        }
        if compression.is_of_none() {
            return Ok(());
        }
        let mut copies = std::mem::take(&mut own.copies);
        let result = gradients.present().try_for_each(|id| {
            compression.encode(plan, id, gradients.bytes_of(id), factor(id), &mut copies)
        });
        gradients.memory.own_mut().copies = copies;
        result
    }

    /// How the rest of a push travels.
    pub(crate) fn scatter(&self, gradients: &Gradients) -> Scatter {
        let compression = self.compression();
        self.plan.scatter(gradients.present().filter(|&id| !compression.covers(id)))
    }

    /// Looks at a variable that is a part of a push, and copies it, or encodes it, as it travels.
    pub(crate) fn variable_parts(
        &self,
        id: VariableId,
        elements: &[u8],
        copies: &mut Copies,
    ) -> Result<(), Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        check_finite(self.non_finite, plan, id, elements, 1.0)?;
        compression.check(plan, id, elements, 1.0)?;
        if compression.covers(id) {
            return compression.encode(plan, id, elements, 1.0, copies);
        }
        copies.add_variable(plan, id, elements);
        Ok(())
    }

    /// Looks at the rows of variables that are a part of a push, and cuts them.
    pub(crate) fn rows_parts(&self, own: &mut StagedParts, id: VariableId) -> Result<(), Error> {
        let (plan, mut compression) = (&self.plan, self.compression());
        for rows in own.rows.iter() {
            check_rows_finite(self.non_finite, plan, rows, 1.0)?;
            compression.check_rows(plan, rows, 1.0)?;
        }
        cut_rows(plan, &mut compression, own, id, 1.0)
    }

    /// Memory for this variable in a push that is sent variable by variable, without any.
    pub(crate) fn spare(&self, id: VariableId) -> Arc<StagedParts> {
        let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        let own = spares.get_mut(&id).and_then(|spares| {
            let free = spares.iter().position(|own| Arc::strong_count(own) == 1)?;
            Some(spares.swap_remove(free))
        });
        drop(spares);
        let mut own = own.unwrap_or_default();
        match Arc::get_mut(&mut own) {
            Some(free) => free.empty(),
            None => own = Arc::default(),
        }
        own
    }

    /// Keeps the memory of such a variable, for when it is sent.
    pub(crate) fn keep(&self, id: VariableId, own: &Arc<StagedParts>) {
        let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        let spares = spares.entry(id).or_default();
        if spares.len() < SPARES_MAX {
            spares.push(own.clone());
        }
    }
}

/// Cuts the rows of a variable into the parts in which they travel, and encodes them if that is how.
fn cut_rows(
    plan: &ShardingPlan,
    compression: &mut Compression,
    own: &mut StagedParts,
    id: VariableId,
    factor: f64,
) -> Result<(), Error> {
    let StagedParts { rows, copies } = own;
    let encoded = compression.covers(id);
    rows.cut(plan, id, Cutting { all: true, values: !encoded, factor });
    let mut held = rows.held(plan).take_while(|_| encoded);
    held.try_for_each(|(partition, rows)| {
        compression.encode_rows(plan, partition, rows, factor, copies)
    })
}

/// How many memories for a variable are kept: that of a push that is on its way, and that of the next.
const SPARES_MAX: usize = 2;

/// The rounds of a push behind the first, some at a time: so few times that a session that does not keep
/// up has room for all of them.
fn turns(rounds: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let some = rounds.len().div_ceil(TURNS_MAX).max(1);
    let end = rounds.end;
    rounds.skip(1).step_by(some).map(move |round| round..end.min(round + some))
}

/// Looks for NaN and infinities, by the servers' policy, among what they multiply with `factor`.
pub(crate) fn check_finite(
    policy: NonFinitePolicy,
    plan: &ShardingPlan,
    id: VariableId,
    bytes: &[u8],
    factor: f64,
) -> Result<(), Error> {
    if policy != (NonFinitePolicy::Reject {}) {
        return Ok(());
    }
    let variable = plan.catalogue().variable(id);
    let bytes = &bytes[..variable.bytes() as usize];
    match first_bad(variable.dtype(), bytes, factor) {
        None => Ok(()),
        Some((element, value)) => {
            let variable = variable.name().to_owned();
            Err(Error::NonFinite { variable, element, value })
        }
    }
}

/// The same for rows.
pub(crate) fn check_rows_finite(
    policy: NonFinitePolicy,
    plan: &ShardingPlan,
    rows: RowsOf<'_>,
    factor: f64,
) -> Result<(), Error> {
    if policy != (NonFinitePolicy::Reject {}) || rows.ids.is_empty() {
        return Ok(());
    }
    let dtype = plan.catalogue().variable(rows.variable).dtype();
    match first_bad(dtype, rows.values, factor) {
        None => Ok(()),
        Some((element, value)) => Err(rows.non_finite(plan, element, value)),
    }
}

/// The first element that is NaN or infinite, or is once it is multiplied.
fn first_bad(dtype: DType, bytes: &[u8], factor: f64) -> Option<(usize, f64)> {
    if factor.abs() <= 1.0 {
        return first_non_finite(dtype, bytes);
    }
    let bad = |products: &[f32]| first_non_finite(DType::F32, bytemuck::cast_slice(products));
    let found = find_in_singles(dtype, bytes, factor, bad);
    found.map(|(first, (element, value))| (first + element, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_of_any_size_is_looked_at_in_a_few_turns_that_have_each_round_once() {
        for rounds in [1, 2, 4, 63, 64, 65, 1000, 5001] {
            let turns: Vec<Range<usize>> = turns(0..rounds).collect();
            assert!(turns.len() <= TURNS_MAX, "{rounds}");
            let all: Vec<usize> = turns.iter().cloned().flatten().collect();
            assert_eq!(all, (1..rounds).collect::<Vec<_>>());
            assert!(turns.last().is_none_or(|last| last.end == rounds));
        }
    }
}
