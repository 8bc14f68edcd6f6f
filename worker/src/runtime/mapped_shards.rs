//! The shards whose values are mapped: callers pull from shared memory without a request.

use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::ids::{GlobalStep, ShardId};
use pushpull_common::shared_values::{PinError, Reader, ValueCounts};

use super::per_link::PerLink;
use super::shared_memory::MappedFile;
use crate::gradients::gradient_buffer::AlignedBuffer;
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
    reader: Reader<MappedFile>,
    copy_plan: Option<CopyPlan>,
    blocks: Vec<u32>,
}

impl MappedShards {
    /// Adds the values that the shard of a link shares.
    pub(super) fn add(&self, link: usize, mapped_shard: MappedShard, reader: Reader<MappedFile>) {
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
    reader: &mut Reader<MappedFile>,
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
