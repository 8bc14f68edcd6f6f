//! The pool of blocks: the committed block of each logical block, and its shadow.
//!
//! A change never writes a block that the committed tables name. It writes a free block, the
//! *shadow*. The commit replaces the logical block's committed block by the shadow. The replaced
//! block becomes free when it is no longer read, either for a connection or by another process in
//! place. Free blocks are reused last in, first out, so a small model alternates between two sets
//! of blocks that stay in cache.

use std::time::Instant;

use pushpull_common::shared_values::ValueCounts;

use super::block_memory::{BlockMemory, runs_of};
use super::readers::{Readers, SequenceRange};
use crate::arena::{Blocks, Budget, Pins};
use crate::change::NoFreeBlock;

/// The mapping from logical blocks to blocks.
///
/// Invariant: `committed`, `shadows` and the lists of blocks, those without memory included, together
/// contain every block exactly once.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) blocks: Blocks,
    committed: Vec<u32>,
    shadows: Vec<Option<u32>>,
    /// The logical blocks that have a shadow.
    dirty: Vec<u32>,
    /// Blocks that nothing uses.
    free: Vec<u32>,
    /// Blocks that the current commit replaces. They become free after it.
    freed: Vec<ReplacedBlock>,
    /// Blocks that were replaced while they were pinned, here or by another process.
    pub(super) retired: Vec<ReplacedBlock>,
    /// Blocks that the image on disk may name, and the image being written does not.
    in_durable_image: Vec<u32>,
    /// Blocks that the image being written may name, and the one after it does not.
    in_next_image: Vec<u32>,
    /// The blocks that have no memory; `None` if all keep theirs.
    memory: Option<BlockMemory>,
    /// The readers in other processes; none for slots.
    pub(super) readers: Readers,
}

/// The blocks of a pool that have memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Occupied<'a> {
    /// All of them, always.
    All,
    /// Twice as many as logical blocks, and others while they are needed. If their memory is not in
    /// the reservation of the store, it is taken off this budget.
    Needed(Option<&'a Budget>),
}

/// A block that a commit has replaced.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplacedBlock {
    block: u32,
    /// The sequences at which readers in other processes may read it.
    pub(super) sequences: SequenceRange,
}

/// The source and destination of a change to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shadow {
    /// The block to write.
    pub(crate) block: u32,
    /// The block with the old contents: the committed block, or the shadow itself once it has been
    /// written.
    pub(crate) from: u32,
}

impl Pool {
    /// Creates a pool with these committed blocks, and sets which blocks have memory.
    pub(super) fn new(blocks: Blocks, committed: Vec<u32>, occupied: Occupied<'_>) -> Pool {
        let count = blocks.count();
        let mut used = vec![false; count as usize];
        for &committed in &committed {
            used[committed as usize] = true;
        }
        // Lower blocks are allocated first, so blocks and their shadows have the same order.
        let mut free: Vec<u32> = (0..count).rev().filter(|&block| !used[block as usize]).collect();
        let memory = match occupied {
            Occupied::All => None,
            Occupied::Needed(budget) => {
                let vacant = free.len().saturating_sub(committed.len());
                Some(BlockMemory::new(free.drain(..vacant).collect(), budget))
            }
        };
        let shadows = vec![None; committed.len()];
        Pool {
            blocks,
            committed,
            shadows,
            dirty: Vec::new(),
            free,
            freed: Vec::new(),
            retired: Vec::new(),
            in_durable_image: Vec::new(),
            in_next_image: Vec::new(),
            memory,
            readers: Readers::default(),
        }
    }

    /// Brings the memory of a file that an earlier process left in line with the blocks: that
    /// process may have been killed while it used others.
    pub(super) fn settle_memory(&mut self) -> std::io::Result<()> {
        let Pool { blocks, free, memory, .. } = self;
        let vacant = memory.iter().flat_map(|memory| &memory.vacant).copied().collect();
        let mut vacant = runs_of(vacant);
        for run in &vacant {
            // A file system that cannot take the memory back leaves it with the file.
            blocks.vacate(run.clone());
        }
        vacant.reverse();
        if blocks.are_occupied_but(&vacant) {
            return Ok(());
        }
        runs_of(free.clone()).into_iter().try_for_each(|run| blocks.occupy(run))
    }

    /// Returns the bytes taken off the budget beside the reservation of the store.
    pub(super) fn bytes_taken(&self) -> u64 {
        self.memory.as_ref().map_or(0, BlockMemory::taken)
    }

    /// Takes back the memory of blocks that no change has needed for a time, and lets a full file
    /// system be asked again after some. A change under way relies on the blocks that are free, so
    /// these keep their memory.
    pub(super) fn pass_time(&mut self, now: Instant, is_changing: bool) {
        let Pool { blocks, committed, free, memory: Some(memory), .. } = self else { return };
        memory.pass_time(now);
        if is_changing {
            return;
        }
        let occupied = blocks.count() as usize - memory.vacant.len();
        let extra = occupied.saturating_sub(2 * committed.len());
        memory.take_back_unused(blocks, free, extra, now);
    }

    /// Keeps all free blocks from being used, because an image on disk may name them. The next
    /// image releases them.
    pub(crate) fn hold_free(&mut self) {
        self.in_next_image.append(&mut self.free);
    }

    /// Returns the number of logical blocks.
    pub(crate) fn logical_blocks(&self) -> usize {
        self.committed.len()
    }

    /// Returns the committed block of a logical block.
    pub(crate) fn committed_block(&self, logical: usize) -> u32 {
        self.committed[logical]
    }

    /// Returns the CRC-32C of a block's parts.
    pub(crate) fn checksum(&self, block: u32) -> u32 {
        let parts = (0..self.blocks.parts()).map(|part| self.blocks.read_part(block, part));
        parts.fold(0, crc32c::crc32c_append)
    }

    pub(crate) fn committed_is_pinned(&self, logical: usize) -> bool {
        self.blocks.is_pinned(self.committed[logical])
    }

    /// Returns how many shadows can be allocated, after an attempt to make it `need`: retired blocks
    /// that are no longer read become free, and blocks without memory get some.
    pub(super) fn free_up(&mut self, need: usize) -> usize {
        self.release_retired();
        let Pool { blocks, free, memory, .. } = self;
        let lacking = need.saturating_sub(free.len());
        if let Some(memory) = memory.as_mut().filter(|_| lacking > 0) {
            memory.occupy(blocks, free, lacking);
        }
        free.len()
    }

    /// Frees the retired blocks that are no longer read.
    fn release_retired(&mut self) {
        let Pool { blocks, free, retired, readers, .. } = self;
        let is_read = |replaced: &ReplacedBlock| {
            blocks.is_pinned(replaced.block) || readers.may_read(replaced.sequences)
        };
        free.extend(
            retired.extract_if(.., |replaced| !is_read(replaced)).map(|replaced| replaced.block),
        );
    }

    /// Counts these logical blocks that have no shadow.
    pub(crate) fn count_clean(&self, logical_blocks: impl Iterator<Item = usize>) -> usize {
        logical_blocks.filter(|&logical| self.shadows[logical].is_none()).count()
    }

    /// Returns the shadow of a logical block, allocated if necessary.
    pub(crate) fn shadow(&mut self, logical: usize) -> Result<Shadow, NoFreeBlock> {
        if let Some(block) = self.shadows[logical] {
            return Ok(Shadow { block, from: block });
        }
        if self.free.is_empty() {
            self.free_up(1);
        }
        let block = self.free.pop().ok_or(NoFreeBlock)?;
        if let Some(memory) = &mut self.memory {
            memory.used(self.free.len());
        }
        self.shadows[logical] = Some(block);
        self.dirty.push(logical as u32);
        Ok(Shadow { block, from: self.committed[logical] })
    }

    /// Yields the logical blocks that have a shadow, each with its shadow.
    pub(crate) fn dirty(&self) -> impl Iterator<Item = (usize, u32)> {
        self.dirty.iter().filter_map(|&logical| {
            self.shadows[logical as usize].map(|block| (logical as usize, block))
        })
    }

    /// Makes every shadow the committed block of its logical block, in the current commit.
    pub(crate) fn publish(&mut self) {
        for logical in self.dirty.drain(..) {
            if let Some(block) = self.shadows[logical as usize].take() {
                let block = std::mem::replace(&mut self.committed[logical as usize], block);
                self.freed
                    .push(ReplacedBlock { block, sequences: self.readers.block_moved(logical) });
            }
        }
    }

    /// Forgets the sequences of replaced blocks, because no other process reads them any more.
    pub(super) fn forget_sequences(&mut self) {
        let replaced = self.freed.iter_mut().chain(&mut self.retired);
        replaced.for_each(|replaced| replaced.sequences = SequenceRange::default());
    }

    /// Announces the committed blocks and these counts to readers in other processes.
    pub(crate) fn publish_to_readers(&mut self, counts: ValueCounts) {
        self.readers.publish(counts, &self.committed);
    }

    /// Frees the replaced blocks after the commit. With `power` they are held for images instead.
    pub(crate) fn committed(&mut self, power: bool) {
        match power {
            true => self.in_next_image.extend(self.freed.drain(..).map(|replaced| replaced.block)),
            false => self.release_replaced(),
        }
    }

    /// Records that an image is being written. It does not name the blocks replaced so far.
    pub(crate) fn image_begun(&mut self) {
        self.in_durable_image.append(&mut self.in_next_image);
    }

    /// Records that the image is on disk. Frees the blocks replaced before its write began.
    pub(crate) fn image_written(&mut self) {
        // Values are not shared where images are written.
        let in_durable_image = self.in_durable_image.drain(..);
        self.freed.extend(
            in_durable_image
                .map(|block| ReplacedBlock { block, sequences: SequenceRange::default() }),
        );
        self.release_replaced();
    }

    /// Frees the replaced blocks in reverse order, so that the first is allocated first. The
    /// shadows of a model then have the order of its logical blocks, which the hardware prefetcher
    /// needs.
    fn release_replaced(&mut self) {
        for replaced in self.freed.drain(..).rev() {
            match self.blocks.is_pinned(replaced.block) || self.readers.may_read(replaced.sequences)
            {
                true => self.retired.push(replaced),
                false => self.free.push(replaced.block),
            }
        }
    }

    /// Discards all shadows. Restores the order of the free blocks.
    pub(crate) fn discard(&mut self) {
        for logical in self.dirty.drain(..).rev() {
            self.free.extend(self.shadows[logical as usize].take());
        }
    }

    /// Pins the committed blocks of these logical blocks.
    pub(crate) fn pin(&self, logical_blocks: impl Iterator<Item = u32>) -> Pins {
        self.blocks.pin(logical_blocks.map(|logical| self.committed[logical as usize]).collect())
    }

    /// Has the memory of further blocks taken off this budget.
    #[cfg(test)]
    pub(super) fn limit_memory(&mut self, budget: &Budget) {
        let vacant = self.memory.take().map(|memory| memory.vacant);
        self.memory = vacant.map(|vacant| BlockMemory::new(vacant, Some(budget)));
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        let shadows = self.shadows.iter().flatten();
        let held_for_images = self.in_durable_image.iter().chain(&self.in_next_image);
        let replaced = self.freed.iter().chain(&self.retired).map(|replaced| &replaced.block);
        let free = self.free.iter().chain(replaced).chain(held_for_images);
        let free = free.chain(self.memory.iter().flat_map(|memory| &memory.vacant));
        let mut all: Vec<u32> = self.committed.iter().chain(shadows).chain(free).copied().collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..all.len() as u32), "every block is listed once: {all:?}");
        assert_eq!(self.dirty.len(), self.shadows.iter().flatten().count());
        self.readers.check_invariants(&self.committed);
    }
}
