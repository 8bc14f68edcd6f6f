//! The pool of blocks: the committed block of each logical block, and its shadow.
//!
//! A change never writes a block that the committed tables name. It writes a free block, the
//! *shadow*. The commit replaces the logical block's committed block by the shadow. The replaced
//! block becomes free when it is no longer read, either for a connection or by another process in
//! place. Free blocks are reused last in, first out, so a small model alternates between two sets
//! of blocks that stay in cache.

use pushpull_common::shared_values::ValueCounts;

use super::readers::{Readers, SequenceRange};
use crate::arena::{Blocks, Pins};
use crate::change::NoFreeBlock;

/// The mapping from logical blocks to blocks.
///
/// Invariant: `committed`, `shadows` and the lists of blocks together contain every block exactly
/// once.
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
    /// The readers in other processes; none for slots.
    pub(super) readers: Readers,
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
    /// Creates a pool with these committed blocks.
    pub(crate) fn new(blocks: Blocks, count: u32, committed: Vec<u32>) -> Pool {
        let mut used = vec![false; count as usize];
        for &committed in &committed {
            used[committed as usize] = true;
        }
        // Lower blocks are allocated first, so blocks and their shadows have the same order.
        let free = (0..count).rev().filter(|&block| !used[block as usize]).collect();
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
            readers: Readers::default(),
        }
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

    /// Returns how many shadows can be allocated. First frees retired blocks that are no longer
    /// read.
    pub(crate) fn free_count(&mut self) -> usize {
        let Pool { blocks, free, retired, readers, .. } = self;
        let is_read = |replaced: &ReplacedBlock| {
            blocks.is_pinned(replaced.block) || readers.may_read(replaced.sequences)
        };
        free.extend(
            retired.extract_if(.., |replaced| !is_read(replaced)).map(|replaced| replaced.block),
        );
        free.len()
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
            self.free_count();
        }
        let block = self.free.pop().ok_or(NoFreeBlock)?;
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

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        let shadows = self.shadows.iter().flatten();
        let held_for_images = self.in_durable_image.iter().chain(&self.in_next_image);
        let replaced = self.freed.iter().chain(&self.retired).map(|replaced| &replaced.block);
        let free = self.free.iter().chain(replaced).chain(held_for_images);
        let mut all: Vec<u32> = self.committed.iter().chain(shadows).chain(free).copied().collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..all.len() as u32), "every block is listed once: {all:?}");
        assert_eq!(self.dirty.len(), self.shadows.iter().flatten().count());
        self.readers.check_invariants(&self.committed);
    }
}
