//! The memory of a pool's blocks: which have none, and what the others take off the budget.
//!
//! Twice as many blocks as logical blocks always have memory, which is enough for every change
//! while no block is pinned. Other blocks get memory when a change needs them, because pulls or a
//! checkpoint have pinned too many, and give it back after a time without use.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::arena::{Blocks, Budget, Reservation};

/// The time without use after which a block gives its memory back.
const UNUSED_MAX: Duration = Duration::from_secs(5);

/// The time after which a file system that had no space is asked again. A change that waits for
/// pinned blocks tries again every millisecond.
const RETRY: Duration = Duration::from_secs(1);

/// The most bytes that are given back at a time, which takes a few milliseconds.
const BYTES_AT_ONCE: u64 = 64 << 20;

/// The free blocks of a pool that have no memory, and the budget for it.
#[derive(Debug)]
pub(super) struct BlockMemory {
    /// The blocks without memory. The last gets memory first.
    pub(super) vacant: Vec<u32>,
    /// The bytes that blocks have taken off the budget beyond the reservation of the store; `None` if
    /// that covers all blocks.
    taken: Option<Reservation>,
    /// The least number of free blocks since `since`.
    least_free: usize,
    /// `None` while no block has more memory than changes need.
    since: Option<Instant>,
    /// Whether the file system had no space.
    is_full: bool,
    /// When that was noticed, at the first [`BlockMemory::pass_time`] afterwards.
    full_since: Option<Instant>,
}

impl BlockMemory {
    /// Records that these blocks have no memory. `budget` is where it is taken from; none if the
    /// reservation of the store covers all blocks.
    pub(super) fn new(vacant: Vec<u32>, budget: Option<&Budget>) -> BlockMemory {
        let taken = budget.map(Budget::reserve_none);
        BlockMemory { vacant, taken, least_free: 0, since: None, is_full: false, full_since: None }
    }

    /// Returns the bytes taken off the budget.
    pub(super) fn taken(&self) -> u64 {
        self.taken.as_ref().map_or(0, Reservation::bytes)
    }

    /// Gives memory to at most `count` blocks, as far as the budget and the file system have any,
    /// and adds them to `free`. After a failure of the file system it gives none for [`RETRY`].
    pub(super) fn occupy(&mut self, blocks: &mut Blocks, free: &mut Vec<u32>, count: usize) {
        if self.is_full {
            return;
        }
        let bytes = blocks.bytes_of_each();
        let wanted = self.vacant.len() - count.min(self.vacant.len())..self.vacant.len();
        let taken = wanted.rev().take_while(|_| match &mut self.taken {
            Some(taken) => taken.grow(bytes).is_ok(),
            None => true,
        });
        let taken = taken.count();
        let next = self.vacant.split_off(self.vacant.len() - taken);
        for run in runs_of(next) {
            if blocks.occupy(run.clone()).is_ok() {
                free.extend(run.rev());
                continue;
            }
            // Some of the blocks may have memory by now.
            blocks.vacate(run.clone());
            self.return_bytes(run.len() as u64 * bytes);
            self.vacant.extend(run.rev());
            self.is_full = true;
        }
    }

    /// Lets a full file system be asked again after [`RETRY`].
    pub(super) fn pass_time(&mut self, now: Instant) {
        if !self.is_full {
            return;
        }
        let since = *self.full_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= RETRY {
            (self.is_full, self.full_since) = (false, None);
        }
    }

    /// Records that this many blocks are free after one was used.
    #[inline]
    pub(super) fn used(&mut self, free: usize) {
        self.least_free = self.least_free.min(free);
    }

    /// Takes back the memory of the free blocks that no change has needed for [`UNUSED_MAX`], the
    /// least recently used first and some at a time. `extra` is the number of blocks that may lose
    /// their memory.
    pub(super) fn take_back_unused(
        &mut self,
        blocks: &mut Blocks,
        free: &mut Vec<u32>,
        extra: usize,
        now: Instant,
    ) {
        let Some(since) = self.since.filter(|_| extra > 0) else {
            self.since = (extra > 0).then_some(now);
            self.least_free = free.len();
            return;
        };
        if now.saturating_duration_since(since) < UNUSED_MAX {
            return;
        }
        let bytes = blocks.bytes_of_each();
        let unused = self.least_free.min(free.len()).min(extra);
        let at_once = unused.min((BYTES_AT_ONCE / bytes).max(1) as usize);
        let mut kept = Vec::new();
        for run in runs_of(free.drain(..at_once).collect()) {
            if blocks.vacate(run.clone()) {
                self.return_bytes(run.len() as u64 * bytes);
                self.vacant.extend(run.rev());
            } else {
                kept.extend(run.rev());
            }
        }
        let is_done = at_once == unused || !kept.is_empty();
        free.splice(..0, kept);
        self.least_free = if is_done { free.len() } else { self.least_free - at_once };
        self.since = if is_done { Some(now) } else { self.since };
    }

    fn return_bytes(&mut self, bytes: u64) {
        if let Some(taken) = &mut self.taken {
            taken.shrink(bytes);
        }
    }
}

/// Returns the runs of adjacent blocks among these, in descending order.
pub(super) fn runs_of(mut blocks: Vec<u32>) -> Vec<Range<u32>> {
    blocks.sort_unstable();
    // A word that readers of other processes check follows the first block.
    let follows = |a: &u32, b: &u32| a + 1 == *b && *a > 0;
    blocks.chunk_by(follows).rev().map(|run| run[0]..run[0] + run.len() as u32).collect()
}
