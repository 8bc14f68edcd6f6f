//! The layout of equal blocks in their memory.

use std::ops::Range;

use pushpull_common::shared_values::Geometry;

/// The layout of the blocks in their memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// The byte at which the first block starts.
    pub(crate) offset: usize,
    /// The size in bytes of a block, or of each part of it.
    pub(crate) block_bytes: usize,
    /// The distance in bytes between the starts of adjacent blocks.
    pub(crate) stride: usize,
    /// The number of blocks.
    pub(crate) count: usize,
    /// The number of parts of each block: 1, unless a block holds several streams.
    pub(crate) parts: usize,
    /// The distance in bytes from one part of a block to its next part. Each region holds one part
    /// of all blocks.
    pub(crate) region: usize,
}

impl Grid {
    /// Returns the bytes of memory that the blocks need, including those before the first block.
    pub(crate) fn need(&self) -> u64 {
        let before = (self.region as u64).saturating_mul(self.parts.saturating_sub(1) as u64);
        let last = (self.stride as u64).saturating_mul(self.count as u64);
        before.saturating_add(last).saturating_add(self.offset as u64)
    }

    /// Returns the ranges of memory that the first `blocks` blocks need.
    pub(crate) fn ranges_of_first(&self, blocks: usize) -> Vec<Range<usize>> {
        let starts = (0..self.parts).map(|part| self.offset + part * self.region);
        starts.map(|start| start..start + blocks * self.stride).collect()
    }

    /// Returns whether `bytes` are enough for the blocks and no two parts overlap.
    pub(super) fn fits(&self, bytes: usize) -> bool {
        let apart = self.parts <= 1 || self.stride.saturating_mul(self.count) <= self.region;
        self.need() <= bytes as u64 && self.block_bytes <= self.stride && apart
    }

    /// Returns the geometry to announce to readers in other processes, for `logical_blocks` logical
    /// blocks.
    pub(crate) fn geometry(&self, logical_blocks: usize) -> Geometry {
        Geometry {
            offset: self.offset as u64,
            block_bytes: self.block_bytes as u64,
            stride: self.stride as u64,
            // Block numbers, committed and logical, have 32 bits.
            blocks: self.count as u32,
            logical_blocks: logical_blocks as u32,
        }
    }
}
