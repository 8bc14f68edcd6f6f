//! Blocks with two lives: what they hold by the last commit, and what the next will make of it.
//!
//! A change never touches a block that the committed tables name. It writes a spare block, the
//! *shadow*; the commit names the shadow in the block's place, and the old one is spare when
//! nobody reads it any more, be it for a connection or, without a request, in another process. Spares are taken last in, first out, so that a small model goes to and
//! fro between two homes that stay in cache.

use pushpull_common::shared_values::Counts;

use super::readers::{Readers, Span};
use crate::arena::{Blocks, Pins};
use crate::error::StorageError;

/// All spare blocks are pinned: the change goes on when a pull has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoFreeBlock;

/// Why a change cannot begin or go on now. Nothing is lost: it is tried again.
#[derive(Debug)]
pub(crate) enum Stalled {
    /// Memory that is there is pinned: see [`NoFreeBlock`].
    NoFreeBlock,
    /// Memory that must be made cannot be had. The change has not begun.
    Growth(Box<StorageError>),
}

impl From<NoFreeBlock> for Stalled {
    fn from(NoFreeBlock: NoFreeBlock) -> Stalled {
        Stalled::NoFreeBlock
    }
}

impl From<StorageError> for Stalled {
    fn from(error: StorageError) -> Stalled {
        Stalled::Growth(Box::new(error))
    }
}

/// Blocks by their place in the variables, over blocks by their place in memory.
///
/// Invariants: `committed`, `shadows` and the lists of blocks together name every block exactly once.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) blocks: Blocks,
    committed: Vec<u32>,
    shadows: Vec<Option<u32>>,
    /// The places that have a shadow.
    dirty: Vec<u32>,
    /// Blocks nobody uses.
    free: Vec<u32>,
    /// Blocks that a commit under way replaces: they are spare once it is made.
    freed: Vec<Replaced>,
    /// Blocks that were replaced while they were pinned, here or by readers of other processes.
    pub(super) retired: Vec<Replaced>,
    /// Blocks that the image on the disk may name, and the one that is being written does not.
    imaged: Vec<u32>,
    /// Blocks that the image that is being written may name, and the next one does not.
    named: Vec<u32>,
    /// Whoever reads blocks without pinning them here; nobody, but of values.
    pub(super) readers: Readers,
}

/// A block that holds nothing any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replaced {
    block: u32,
    /// What readers of other processes know of it.
    pub(super) span: Span,
}

/// Where a change of a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shadow {
    /// The block to write.
    pub(crate) block: u32,
    /// The block that holds what is to be changed: the home, or the shadow itself once it does.
    pub(crate) from: u32,
}

impl Pool {
    /// A pool whose places are held by these blocks.
    pub(crate) fn new(blocks: Blocks, count: u32, committed: Vec<u32>) -> Pool {
        let mut used = vec![false; count as usize];
        for &committed in &committed {
            used[committed as usize] = true;
        }
        // The first is taken last, so that blocks and their shadows keep their order.
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
            imaged: Vec::new(),
            named: Vec::new(),
            readers: Readers::default(),
        }
    }

    /// An image on the disk may name any block: none is free before the next one is there.
    pub(crate) fn hold_free(&mut self) {
        self.named.append(&mut self.free);
    }

    /// How many places there are.
    pub(crate) fn logical_blocks(&self) -> usize {
        self.committed.len()
    }

    /// The block that holds a place by the last commit.
    pub(crate) fn committed_block(&self, logical: usize) -> u32 {
        self.committed[logical]
    }

    /// The CRC-32C of what a block holds, part by part.
    pub(crate) fn checksum(&self, block: u32) -> u32 {
        let parts = (0..self.blocks.parts()).map(|part| self.blocks.read_part(block, part));
        parts.fold(0, crc32c::crc32c_append)
    }

    pub(crate) fn committed_is_pinned(&self, logical: usize) -> bool {
        self.blocks.is_pinned(self.committed[logical])
    }

    /// How many shadows can be had.
    pub(crate) fn free_count(&mut self) -> usize {
        let Pool { blocks, free, retired, readers, .. } = self;
        let is_read = |gone: &Replaced| blocks.is_pinned(gone.block) || readers.hold(gone.span);
        free.extend(retired.extract_if(.., |gone| !is_read(gone)).map(|gone| gone.block));
        free.len()
    }

    /// How many of these places have no shadow yet.
    pub(crate) fn clean(&self, logical_blocks: impl Iterator<Item = usize>) -> usize {
        logical_blocks.filter(|&logical| self.shadows[logical].is_none()).count()
    }

    /// The shadow of a place, made if need be.
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

    /// The places that have a shadow, and it.
    pub(crate) fn dirty(&self) -> impl Iterator<Item = (usize, u32)> {
        self.dirty.iter().filter_map(|&logical| {
            self.shadows[logical as usize].map(|block| (logical as usize, block))
        })
    }

    /// Makes every shadow the home of its place, as the commit under way says.
    pub(crate) fn publish(&mut self) {
        for logical in self.dirty.drain(..) {
            if let Some(block) = self.shadows[logical as usize].take() {
                let block = std::mem::replace(&mut self.committed[logical as usize], block);
                self.freed.push(Replaced { block, span: self.readers.moved(logical) });
            }
        }
    }

    /// Nobody of another process reads any more.
    pub(super) fn forget_spans(&mut self) {
        let gone = self.freed.iter_mut().chain(&mut self.retired);
        gone.for_each(|gone| gone.span = Span::default());
    }

    /// The commit is made: readers of other processes see what it is of.
    pub(crate) fn show(&mut self, counts: Counts) {
        self.readers.show(counts, &self.committed);
    }

    /// The commit is made: what it has replaced is free, unless an image may name it.
    pub(crate) fn committed(&mut self, power: bool) {
        match power {
            true => self.named.extend(self.freed.drain(..).map(|gone| gone.block)),
            false => self.let_go(),
        }
    }

    /// An image is being written: what was replaced up to now is not in it.
    pub(crate) fn image_begun(&mut self) {
        self.imaged.append(&mut self.named);
    }

    /// The image is on the disk: what was replaced before it was begun is free.
    pub(crate) fn image_written(&mut self) {
        // Where images are made nothing is lent.
        let imaged = self.imaged.drain(..);
        self.freed.extend(imaged.map(|block| Replaced { block, span: Span::default() }));
        self.let_go();
    }

    /// What was replaced first is taken first again: so the shadows of a model follow one another in memory
    /// as its places do, which the processor fetches ahead.
    fn let_go(&mut self) {
        for gone in self.freed.drain(..).rev() {
            match self.blocks.is_pinned(gone.block) || self.readers.hold(gone.span) {
                true => self.retired.push(gone),
                false => self.free.push(gone.block),
            }
        }
    }

    /// Forgets every shadow. Whoever was the first to take one is again.
    pub(crate) fn discard(&mut self) {
        for logical in self.dirty.drain(..).rev() {
            self.free.extend(self.shadows[logical as usize].take());
        }
    }

    /// Pins the homes of these places.
    pub(crate) fn pin(&self, logical_blocks: impl Iterator<Item = u32>) -> Pins {
        self.blocks.pin(logical_blocks.map(|logical| self.committed[logical as usize]).collect())
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        let shadows = self.shadows.iter().flatten();
        let kept = self.imaged.iter().chain(&self.named);
        let gone = self.freed.iter().chain(&self.retired).map(|gone| &gone.block);
        let free = self.free.iter().chain(gone).chain(kept);
        let mut all: Vec<u32> = self.committed.iter().chain(shadows).chain(free).copied().collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..all.len() as u32), "every block once: {all:?}");
        assert_eq!(self.dirty.len(), self.shadows.iter().flatten().count());
        self.readers.check_invariants(&self.committed);
    }
}
