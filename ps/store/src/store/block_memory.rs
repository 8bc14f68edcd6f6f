//! The memory of a pool's blocks: which have none, and what the others take off the budget.
//!
//! Twice as many blocks as logical blocks always have memory, which is enough for every change
//! while no block is pinned. Other blocks get memory when a change needs them, because pulls or a
//! checkpoint have pinned too many, and give it back after a time without use.

use std::time::{Duration, Instant};

use crate::arena::{Blocks, Budget, Reservation};

/// The time without use after which a block gives its memory back.
const UNUSED_MAX: Duration = Duration::from_secs(5);

/// The free blocks of a pool that have no memory, and the budget for it.
#[derive(Debug)]
pub(super) struct BlockMemory {
    /// The blocks without memory. The last gets memory first.
    pub(super) vacant: Vec<u32>,
    /// What blocks with memory have taken off the budget, beyond the reservation of the store;
    /// `None` if that covers all blocks.
    taken: Option<Reservation>,
    /// The least number of free blocks since `since`.
    least_free: usize,
    since: Option<Instant>,
}

impl BlockMemory {
    /// Records that these blocks have no memory. `budget` is where it is taken from; none if the
    /// reservation of the store covers all blocks.
    pub(super) fn new(vacant: Vec<u32>, budget: Option<&Budget>) -> BlockMemory {
        let taken = budget.map(Budget::reserve_none);
        BlockMemory { vacant, taken, least_free: 0, since: None }
    }

    /// Returns the bytes taken off the budget.
    pub(super) fn taken(&self) -> u64 {
        self.taken.as_ref().map_or(0, Reservation::bytes)
    }

    /// Returns the next block that gets memory. `None` if there is none, or no memory: of the
    /// budget, or of the file system.
    pub(super) fn next(&mut self, blocks: &Blocks) -> Option<u32> {
        let &block = self.vacant.last()?;
        let bytes = blocks.bytes_of_each();
        if let Some(taken) = &mut self.taken {
            taken.grow(bytes).ok()?;
        }
        if blocks.occupy(block).is_err() {
            self.return_bytes(bytes);
            return None;
        }
        self.vacant.pop()
    }

    /// Records that this many blocks are free after one was used.
    #[inline]
    pub(super) fn used(&mut self, free: usize) {
        self.least_free = self.least_free.min(free);
    }

    /// Takes back the memory of the free blocks that no change has needed for [`UNUSED_MAX`], the
    /// least recently used first. `extra` is the number of blocks that may lose their memory.
    pub(super) fn take_back_unused(
        &mut self,
        blocks: &mut Blocks,
        free: &mut Vec<u32>,
        extra: usize,
        now: Instant,
    ) {
        let due =
            self.since.is_some_and(|since| now.saturating_duration_since(since) >= UNUSED_MAX);
        if extra == 0 || self.since.is_none() {
            self.since = (extra > 0).then_some(now);
            self.least_free = free.len();
        }
        if extra == 0 || !due {
            return;
        }
        let unused = self.least_free.min(free.len()).min(extra);
        let unused = free[..unused].iter().take_while(|&&block| blocks.vacate(block).is_ok());
        let count = unused.count();
        self.vacant.extend(free.drain(..count).rev());
        self.return_bytes(count as u64 * blocks.bytes_of_each());
        self.least_free = free.len();
        self.since = Some(now);
    }

    fn return_bytes(&mut self, bytes: u64) {
        if let Some(taken) = &mut self.taken {
            taken.shrink(bytes);
        }
    }
}
