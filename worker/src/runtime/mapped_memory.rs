//! The memory that shards share with this process: values to read, and push buffers to write
//! gradients into. The session adds and removes it; callers use it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushpull_common::ids::{GlobalStep, ShardId};
use pushpull_common::shared_values::{PinError, SharedValuesReader, ValueCounts};

use super::shared_memory::{MappedFile, MappedPushBuffer};
use crate::gradients::gradient_buffer::{AlignedBuffer, GradientSlot, PushBufferId};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::mapped_values::{CopyPlan, MappedShard, PullConsistency, PullVerdict};
use crate::session::ReadPoint;

/// How often a pin is retried while the shard changes the values in place.
const PIN_TRIES: usize = 16;
/// The spin-loop iterations between two tries. All tries together take about as long as a change in
/// place.
const SPINS_PER_TRY: usize = 64;

/// The result of a pull from shared memory.
#[derive(Debug)]
pub(crate) enum MappedPullOutcome {
    /// The buffer holds the values at these steps and gradient counts.
    Pulled(ReadPoint),
    /// The token's step has passed. The content of the buffer is unspecified.
    Stale,
}

/// The shards whose values are mapped, each for as long as its connection lasts. The session adds
/// and removes them; callers read.
#[derive(Debug, Default)]
pub(crate) struct MappedShards(PerLink<LinkValues>);

#[derive(Debug)]
struct LinkValues {
    mapped_shard: MappedShard,
    /// Locked because a reader slot has one reader at a time.
    view: Mutex<MappedView>,
}

#[derive(Debug)]
struct MappedView {
    reader: SharedValuesReader<MappedFile>,
    copy_plan: Option<CopyPlan>,
    blocks: Vec<u32>,
}

impl MappedShards {
    /// Adds the values that the shard of a link shares.
    pub(super) fn add(
        &self,
        link: usize,
        mapped_shard: MappedShard,
        reader: SharedValuesReader<MappedFile>,
    ) {
        let view = Mutex::new(MappedView { reader, copy_plan: None, blocks: Vec::new() });
        self.0.add(link, mapped_shard.shard, LinkValues { mapped_shard, view });
    }

    /// Removes the values of a link whose connection has ended.
    pub(super) fn remove(&self, link: usize) {
        self.0.remove(link);
    }

    /// Returns whether all of these shards share their values.
    pub(crate) fn share_all(&self, shards: &[ShardId]) -> bool {
        shards.iter().all(|&shard| self.0.of(shard).is_some())
    }

    /// Fills a buffer with all values, at the step of a token if there is one. Runs on the caller's
    /// thread. Returns `None` if the values must be requested over the connections.
    pub(crate) fn pull(
        &self,
        plan: &Arc<ShardingPlan>,
        buffer: &mut AlignedBuffer,
        token: Option<GlobalStep>,
    ) -> Option<MappedPullOutcome> {
        let mut consistency = PullConsistency::new(token);
        let mut read = ReadPoint::default();
        for &shard in plan.shards() {
            let values = self.0.of(shard)?;
            let mut view = values.view.lock().unwrap_or_else(PoisonError::into_inner);
            let judge = |counts: &ValueCounts| consistency.judge(&values.mapped_shard, counts);
            match view.read(plan, shard, buffer.bytes_mut(), judge)? {
                (PullVerdict::Take, counts) => read.gradients.lower(shard, counts.gradients),
                (PullVerdict::Stale, _) => return Some(MappedPullOutcome::Stale),
                (PullVerdict::Ask, _) => return None,
            }
        }
        read.step = consistency.step()?;
        Some(MappedPullOutcome::Pulled(read))
    }
}

impl MappedView {
    /// Pins the values of a shard and copies them if `judge` takes them. Returns `None` if the pin
    /// fails or is revoked.
    fn read(
        &mut self,
        plan: &Arc<ShardingPlan>,
        shard: ShardId,
        buffer: &mut [u8],
        judge: impl FnOnce(&ValueCounts) -> PullVerdict,
    ) -> Option<(PullVerdict, ValueCounts)> {
        let MappedView { reader, copy_plan, blocks } = self;
        if copy_plan.as_ref().is_none_or(|copy_plan| !copy_plan.is_of(plan)) {
            *copy_plan = CopyPlan::new(plan, shard, reader.geometry());
        }
        let copy_plan = copy_plan.as_ref()?;
        let counts = pin(reader, copy_plan, blocks)?;
        let verdict = judge(&counts);
        if verdict != PullVerdict::Take {
            reader.give_up();
            return Some((verdict, counts));
        }
        for copy in copy_plan.copies() {
            let start = reader.geometry().start(blocks[copy.logical]) as usize;
            let to = &mut buffer[copy.to..copy.to + copy.bytes];
            reader.values().copy(start + copy.from, to);
        }
        reader.unpin(copy_plan.bytes()).ok()?;
        Some((verdict, counts))
    }
}

fn pin(
    reader: &mut SharedValuesReader<MappedFile>,
    copy_plan: &CopyPlan,
    blocks: &mut Vec<u32>,
) -> Option<ValueCounts> {
    for _ in 0..PIN_TRIES {
        match reader.pin(copy_plan.logical_blocks(), blocks) {
            Ok(counts) => return Some(counts),
            Err(PinError::Changing) => (0..SPINS_PER_TRY).for_each(|_| std::hint::spin_loop()),
            Err(_) => return None,
        }
    }
    None
}

/// The push buffers that shards share, each for as long as its connection lasts. The session adds
/// and removes them; callers take buffer slots.
#[derive(Debug, Default)]
pub(crate) struct PushBuffers(PerLink<LinkBuffer>);

#[derive(Debug)]
struct LinkBuffer {
    id: PushBufferId,
    push_buffer: Arc<MappedPushBuffer>,
}

impl PushBuffers {
    /// Adds the push buffer that the shard of a link shares.
    pub(crate) fn add(
        &self,
        link: usize,
        shard: ShardId,
        id: PushBufferId,
        push_buffer: MappedPushBuffer,
    ) {
        self.0.add(link, shard, LinkBuffer { id, push_buffer: Arc::new(push_buffer) });
    }

    /// Removes the push buffer of a link whose connection has ended. A caller that holds a buffer
    /// slot may still write to it; no more slots are taken.
    pub(crate) fn remove(&self, link: usize) {
        self.0.remove(link);
    }

    /// Returns whether this push buffer is still shared.
    pub(crate) fn has(&self, push_buffer: PushBufferId) -> bool {
        self.0.any(|shared| shared.id == push_buffer)
    }

    /// Takes a free buffer slot of a shard's push buffer.
    pub(crate) fn take(&self, shard: ShardId) -> Option<GradientSlot> {
        let shared = self.0.of(shard)?;
        let (memory, number) = shared.push_buffer.take()?;
        Some(GradientSlot { shard, push_buffer: shared.id, number, memory: Box::new(memory) })
    }
}

/// At most one shared value per link, for as long as the connection lasts.
#[derive(Debug)]
struct PerLink<T> {
    all: Mutex<Vec<LinkEntry<T>>>,
}

#[derive(Debug)]
struct LinkEntry<T> {
    link: usize,
    shard: ShardId,
    shared: Arc<T>,
}

impl<T> Default for PerLink<T> {
    fn default() -> PerLink<T> {
        PerLink { all: Mutex::default() }
    }
}

impl<T> PerLink<T> {
    /// Adds the value that the shard of a link shares. Replaces an earlier one of the same link.
    fn add(&self, link: usize, shard: ShardId, shared: T) {
        let mut all = self.all();
        all.retain(|other| other.link != link);
        all.push(LinkEntry { link, shard, shared: Arc::new(shared) });
    }

    /// Removes the value of a link whose connection has ended. A caller that holds it may finish.
    fn remove(&self, link: usize) {
        self.all().retain(|other| other.link != link);
    }

    /// Returns the value that a shard shares.
    fn of(&self, shard: ShardId) -> Option<Arc<T>> {
        self.all().iter().find(|other| other.shard == shard).map(|other| other.shared.clone())
    }

    /// Returns whether a shared value satisfies the predicate.
    fn any(&self, is_it: impl Fn(&T) -> bool) -> bool {
        self.all().iter().any(|other| is_it(&other.shared))
    }

    fn all(&self) -> MutexGuard<'_, Vec<LinkEntry<T>>> {
        // Each change is one call, so a panic elsewhere leaves the list valid.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_value_is_found_until_it_is_removed_or_replaced() {
        let links = PerLink::default();
        let shard = |task| ShardId { task, shard: 0 };
        links.add(0, shard(7), "first");
        links.add(1, shard(8), "second");
        let held = links.of(shard(7)).unwrap();
        assert_eq!((*held, links.of(shard(9)).is_none()), ("first", true));
        links.add(0, shard(7), "third");
        assert_eq!(*links.of(shard(7)).unwrap(), "third");
        assert!(links.any(|shared| *shared == "second") && !links.any(|shared| *shared == "first"));
        links.remove(0);
        assert!(links.of(shard(7)).is_none() && links.of(shard(8)).is_some());
        assert_eq!(*held, "first", "a holder keeps its value");
    }
}
