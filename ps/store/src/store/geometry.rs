//! The geometry of a store's memory: the number, size and position of its blocks.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;

use crate::arena::{GAP_BYTES, Grid, SKEW_BYTES};
use crate::change::SLOTS_MAX;
use crate::layout::PAGE_BYTES;
use crate::table::Table;
use crate::undo::{UNDO_BYTES, Undo};

/// The default size of a block, the unit of a commit, in bytes. Small variables share blocks. Any
/// power of two from 8 on would work.
pub const BLOCK_BYTES: usize = 64 << 10;

/// The number of blocks of dense variables from which blocks are longer. An update of all blocks
/// stops at the end of each, and the hardware prefetcher starts again. In blocks of 64 KiB, rules
/// reached 0.81 to 0.93 of their speed in place; in blocks of 256 KiB, 0.85 to 0.93; longer blocks
/// gained hardly more. Rows gain nothing: an update of some rows that is not made in place copies
/// whole blocks.
const LONG_BLOCKS_FROM: u64 = 1024;

/// The factor by which long blocks exceed the default.
const LONG_BLOCK_FACTOR: usize = 4;

/// The maximum size of a block in an arena, in bytes.
const BLOCK_BYTES_MAX: usize = 1 << 30;

/// The sizes of a store that its layout does not determine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreGeometry {
    /// The size of a block in bytes.
    pub block_bytes: usize,
    /// The number of slots of the variable that has most.
    pub slots: usize,
    /// The number of logical blocks, of the values and of the slots each.
    pub logical_blocks: usize,
    /// The number of free blocks that may be pinned without delaying a push that changes every
    /// block.
    pub pinned: usize,
    /// The maximum number of old bytes that a change in place may record.
    pub(crate) undo_bytes: usize,
}

impl StoreGeometry {
    /// Returns the geometry of a new store with blocks of `block_bytes`, or of longer ones if there
    /// are very many.
    pub fn new(
        layout: &ShardLayout,
        slots: usize,
        block_bytes: usize,
        pin_bytes_max: Option<u64>,
    ) -> StoreGeometry {
        let sparse: u64 = layout.sparse().map(|partition| partition.bytes).sum();
        let many = layout.bytes().saturating_sub(sparse) / block_bytes as u64 >= LONG_BLOCKS_FROM;
        let block_bytes = if many { LONG_BLOCK_FACTOR * block_bytes } else { block_bytes };
        let logical_blocks = layout.bytes().div_ceil(block_bytes as u64);
        let pinned = pin_bytes_max.unwrap_or(layout.bytes()).div_ceil(block_bytes as u64);
        let logical_blocks = logical_blocks as usize;
        let pinned = pinned.max(1) as usize;
        let undo_bytes = undo_bytes(layout, slots);
        StoreGeometry { block_bytes, slots, logical_blocks, pinned, undo_bytes }
    }

    /// Returns the geometry that the words of an arena describe, or `None` if it is invalid. The
    /// block size must be a power of two and hold whole elements, and block numbers must fit `u32`.
    pub fn of_words(
        layout: &ShardLayout,
        slots: usize,
        block_bytes: usize,
        pinned: usize,
    ) -> Option<StoreGeometry> {
        let sound = (8..=BLOCK_BYTES_MAX).contains(&block_bytes) && block_bytes.is_power_of_two();
        if !sound || slots > SLOTS_MAX {
            return None;
        }
        let logical_blocks = usize::try_from(layout.bytes().div_ceil(block_bytes as u64)).ok()?;
        let blocks = logical_blocks.checked_mul(2)?.checked_add(pinned)?;
        let reached = pinned > 0 && u32::try_from(blocks).is_ok();
        let undo_bytes = undo_bytes(layout, slots);
        reached.then_some(StoreGeometry { block_bytes, slots, logical_blocks, pinned, undo_bytes })
    }

    pub(super) fn values(&self) -> Grid {
        Grid {
            offset: PAGE_BYTES,
            block_bytes: self.block_bytes,
            stride: self.block_bytes + GAP_BYTES,
            count: 2 * self.logical_blocks + self.pinned,
            parts: 1,
            region: 0,
        }
    }

    /// Returns the grid of the slots. The slots of a logical block are the parts of one block. Each
    /// slot is stored contiguously, as the values are, and is skewed against the earlier slots and
    /// the values.
    pub(super) fn slots(&self) -> Grid {
        let Grid { stride, count, .. } = self.values();
        let pages = stride.saturating_mul(count).div_ceil(PAGE_BYTES);
        let region = pages.saturating_mul(PAGE_BYTES);
        Grid {
            offset: PAGE_BYTES + SKEW_BYTES,
            block_bytes: self.block_bytes,
            stride,
            count: if self.slots > 0 { count } else { 0 },
            parts: self.slots,
            region: region.saturating_add(SKEW_BYTES),
        }
    }

    /// Returns the number of table words that map logical blocks to blocks.
    pub fn table_words(&self) -> usize {
        self.logical_blocks * if self.slots > 0 { 2 } else { 1 }
    }

    /// Returns the size of the store's memory in bytes; without that of the blocks that are needed
    /// only while others are pinned, unless `with_pins` is set.
    pub fn need(&self, with_pins: bool) -> u64 {
        let undo = self.undo_file_bytes() + PAGE_BYTES as u64;
        let (values, slots) = self.need_by_kind(with_pins);
        values.saturating_add(slots).saturating_add(undo)
    }

    /// Returns the size of the memory of the values, and that of the optimizer slots, in bytes.
    pub fn need_by_kind(&self, with_pins: bool) -> (u64, u64) {
        let without = if with_pins { 0 } else { self.pinned };
        [self.values(), self.slots()]
            .map(|grid| {
                let pins = (without as u64).saturating_mul(grid.stride as u64);
                grid.need().saturating_sub(pins.saturating_mul(grid.parts as u64))
            })
            .into()
    }

    /// Returns the size of the undo file without its first page, in bytes.
    pub(crate) fn undo_file_bytes(&self) -> u64 {
        Undo::bytes(self.undo_bytes)
    }

    /// Returns the initial table words: every logical block in the block of its own index.
    pub fn first_table(&self) -> impl Iterator<Item = u64> {
        let (logical_blocks, slots) = (
            self.logical_blocks as u64,
            if self.slots > 0 { self.logical_blocks as u64 } else { 0 },
        );
        (0..logical_blocks).chain(0..slots)
    }
}

/// Returns the maximum number of old bytes that a change in place may record.
///
/// Rows of sparse variables are far apart, so copying their blocks would move many times the bytes
/// that change. The maximum is a quarter of the sparse variables and their slots, plus the rows
/// that one push takes of each table. It is bounded, because a change in place delays all other
/// work.
fn undo_bytes(layout: &ShardLayout, slots: usize) -> usize {
    let sparse: u64 = layout.sparse().map(|partition| partition.bytes).sum();
    let quarter = (sparse / 4).saturating_mul(1 + slots as u64);
    let undo = layout.tables().iter().map(|table| Table::undo_bytes_of_push(table, slots));
    let rows = undo.fold(quarter, u64::saturating_add).min(ROW_UNDO_BYTES_MAX);
    UNDO_BYTES.max(rows as usize).next_multiple_of(8)
}

/// The bound on recorded rows, in bytes: some milliseconds of copying.
const ROW_UNDO_BYTES_MAX: u64 = 8 << 20;

/// Returns the logical block of a byte, and the offset within it. Block sizes are powers of two,
/// because a division for each of many rows would be a large part of the cost.
#[inline]
pub(super) fn logical_block_of(at: usize, block_bytes: usize) -> (usize, usize) {
    debug_assert!(block_bytes.is_power_of_two(), "a block of {block_bytes} bytes");
    (at >> block_bytes.trailing_zeros(), at & (block_bytes - 1))
}

/// Splits a range at block boundaries: yields each logical block and the range within it.
pub(super) fn pieces_of(
    range: &Range<u64>,
    block_bytes: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    let mut start = range.start as usize;
    let end = range.end as usize;
    std::iter::from_fn(move || {
        (start < end).then(|| {
            let (logical, within) = logical_block_of(start, block_bytes);
            let bytes = (block_bytes - within).min(end - start);
            start += bytes;
            (logical, within..within + bytes)
        })
    })
}

/// Returns the logical blocks that a range touches.
pub(super) fn logical_blocks_of(range: &Range<u64>, block_bytes: usize) -> Range<usize> {
    let (first, _) = logical_block_of(range.start as usize, block_bytes);
    let (last, within) = logical_block_of(range.end as usize, block_bytes);
    first..(last + usize::from(within > 0)).max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversized_geometry_needs_all_memory_without_overflow() {
        for slots in [0, SLOTS_MAX] {
            let block_bytes = BLOCK_BYTES;
            let undo_bytes = UNDO_BYTES;
            let logical_blocks = usize::MAX / 4;
            let pinned = usize::MAX / 4;
            let geometry = StoreGeometry { block_bytes, slots, logical_blocks, pinned, undo_bytes };
            assert_eq!(geometry.need(true), u64::MAX);
        }
    }

    #[test]
    fn values_and_slots_start_at_distinct_cache_lines_of_a_page() {
        for slots in 1..=SLOTS_MAX {
            let undo_bytes = UNDO_BYTES;
            let geometry = StoreGeometry {
                block_bytes: BLOCK_BYTES,
                slots,
                logical_blocks: 5,
                pinned: 2,
                undo_bytes,
            };
            let values = geometry.values();
            let slots = geometry.slots();
            assert_eq!((values.stride, slots.stride, slots.parts), (65600, 65600, geometry.slots));
            assert_eq!((values.count, slots.count), (12, 12));
            // These numbers are also in `docs/arena.md`.
            assert_eq!((slots.offset, slots.region), (4928, 193 * PAGE_BYTES + 832));
            assert_eq!(
                slots.need(),
                (4928 + (geometry.slots - 1) * slots.region + 12 * 65600) as u64
            );
            let starts = (0..geometry.slots).map(|slot| slots.offset + slot * slots.region);
            let starts = [values.offset].into_iter().chain(starts);
            let mut lines: Vec<usize> = starts.map(|start| start % PAGE_BYTES / 64).collect();
            lines.sort_unstable();
            lines.dedup();
            assert_eq!(lines.len(), 1 + geometry.slots, "each starts at a different line");
        }
    }
}
