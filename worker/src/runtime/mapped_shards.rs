//! The shards that have lent their values to a session: callers read there by themselves.

use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::ids::{GlobalStep, ShardId};
use pushpull_common::shared_values::{PinError, Reader, ValueCounts};

use super::per_link::PerLink;
use super::shared_memory::Mapped;
use crate::mapped_values::{CopyPlan, MappedShard, PullConsistency, PullVerdict};
use crate::params::AlignedBuffer;
use crate::session::ReadPoint;
use crate::sharding_plan::ShardingPlan;

/// How often a change that is being made is waited for, and how long each time: turns of a loop. A
/// change in place takes about as long.
const TRIES: usize = 16;
const TURNS: usize = 64;

/// What came of a pull that asked nobody.
#[derive(Debug)]
pub(crate) enum Direct {
    /// The buffer holds values of these.
    Pulled(ReadPoint),
    /// The token's step has passed; the buffer is of whatever content.
    Stale,
}

/// Shards that have lent their values, for as long as their connections last. The session's thread adds
/// and removes them, callers read.
#[derive(Debug, Default)]
pub(crate) struct MappedShards(PerLink<LinkValues>);

#[derive(Debug)]
struct LinkValues {
    mapped_shard: MappedShard,
    /// One caller reads at a time.
    view: Mutex<View>,
}

#[derive(Debug)]
struct View {
    reader: Reader<Mapped>,
    route: Option<CopyPlan>,
    blocks: Vec<u32>,
}

impl MappedShards {
    /// The shard of a link has lent its values.
    pub(super) fn add(&self, link: usize, mapped_shard: MappedShard, reader: Reader<Mapped>) {
        let view = Mutex::new(View { reader, route: None, blocks: Vec::new() });
        self.0.add(link, mapped_shard.shard, LinkValues { mapped_shard, view });
    }

    /// The connection of a link is gone, and what it was lent.
    pub(super) fn remove(&self, link: usize) {
        self.0.remove(link);
    }

    /// Whether all of these have lent their values.
    pub(crate) fn share(&self, shards: &[ShardId]) -> bool {
        shards.iter().all(|&shard| self.0.of(shard).is_some())
    }

    /// Fills a buffer with all values, for the step of a token or of whatever step they are, on the
    /// caller's thread; nothing if they have to be asked for.
    pub(crate) fn pull(
        &self,
        plan: &Arc<ShardingPlan>,
        buffer: &mut AlignedBuffer,
        token: Option<GlobalStep>,
    ) -> Option<Direct> {
        let mut agreement = PullConsistency::new(token);
        let mut read = ReadPoint::default();
        for &shard in plan.shards() {
            let values = self.0.of(shard)?;
            let mut view = values.view.lock().unwrap_or_else(PoisonError::into_inner);
            let judge = |counts: &ValueCounts| agreement.judge(&values.mapped_shard, counts);
            match view.read(plan, shard, buffer.bytes_mut(), judge)? {
                (PullVerdict::Take, counts) => read.gradients.lower(shard, counts.gradients),
                (PullVerdict::Stale, _) => return Some(Direct::Stale),
                (PullVerdict::Ask, _) => return None,
            }
        }
        read.step = agreement.step()?;
        Some(Direct::Pulled(read))
    }
}

impl View {
    /// Copies the values of a shard if they are to be taken; nothing if it cannot be done.
    fn read(
        &mut self,
        plan: &Arc<ShardingPlan>,
        shard: ShardId,
        buffer: &mut [u8],
        judge: impl FnOnce(&ValueCounts) -> PullVerdict,
    ) -> Option<(PullVerdict, ValueCounts)> {
        let View { reader, route, blocks } = self;
        if route.as_ref().is_none_or(|route| !route.is_of(plan)) {
            *route = CopyPlan::new(plan, shard, reader.geometry());
        }
        let route = route.as_ref()?;
        let counts = pin(reader, route, blocks)?;
        let verdict = judge(&counts);
        if verdict != PullVerdict::Take {
            reader.give_up();
            return Some((verdict, counts));
        }
        for copy in route.copies() {
            let start = reader.geometry().start(blocks[copy.logical]) as usize;
            let to = &mut buffer[copy.to..copy.to + copy.bytes];
            reader.values().copy(start + copy.from, to);
        }
        reader.unpin(route.bytes()).ok()?;
        Some((verdict, counts))
    }
}

fn pin(
    reader: &mut Reader<Mapped>,
    route: &CopyPlan,
    blocks: &mut Vec<u32>,
) -> Option<ValueCounts> {
    for _ in 0..TRIES {
        match reader.pin(route.logical_blocks(), blocks) {
            Ok(counts) => return Some(counts),
            Err(PinError::Changing) => (0..TURNS).for_each(|_| std::hint::spin_loop()),
            Err(_) => return None,
        }
    }
    None
}
