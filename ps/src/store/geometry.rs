//! What the memory of a store is like: blocks, how many, and where they lie.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;

use super::undo::{UNDO_BYTES, Undo};
use crate::arena::{GAP_BYTES, Grid, SKEW_BYTES};
use crate::layout::PAGE_BYTES;
use crate::table::Table;

/// The unit of a commit, unless there are very many. Small variables share blocks. Any power of two from 8 on
/// would do.
pub(crate) const BLOCK_BYTES: usize = 64 << 10;

/// From so many blocks of dense variables on they are made longer: an update that goes through all of them stops at the end of each,
/// and what the processor fetches ahead begins anew. Rules in blocks of 64 KiB made 0.81 to 0.93 of what
/// they make in place, in blocks of 256 KiB 0.85 to 0.93, and hardly more
/// in longer ones. Rows gain nothing by it: what changes some of them copies all of a block, where it may not be changed in
/// place.
const BLOCKS_MANY: u64 = 1024;

/// How many times as long they are then.
const LONGER: usize = 4;

/// The largest block that an arena may have.
const BLOCK_BYTES_MAX: usize = 1 << 30;

/// The most slots a rule may keep.
pub(crate) const SLOTS_MAX: usize = 8;

/// What the memory of a store depends on beside the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The bytes of a block.
    pub(crate) block_bytes: usize,
    /// The most slots that a variable has.
    pub(crate) slots: usize,
    /// Blocks that hold the values or the slots.
    pub(crate) logical_blocks: usize,
    /// Spare blocks that may be pinned while a push needs as many as it changes.
    pub(crate) pinned: usize,
    /// What rows that are changed in place may have held together.
    pub(crate) undo_bytes: usize,
}

impl Geometry {
    /// The geometry of a new store, in blocks of so many bytes if there are not very many.
    pub(crate) fn new(
        layout: &ShardLayout,
        slots: usize,
        block_bytes: usize,
        pin_bytes_max: Option<u64>,
    ) -> Geometry {
        let sparse: u64 = layout.sparse().map(|partition| partition.bytes).sum();
        let many = layout.bytes().saturating_sub(sparse) / block_bytes as u64 >= BLOCKS_MANY;
        let block_bytes = if many { LONGER * block_bytes } else { block_bytes };
        let logical_blocks = layout.bytes().div_ceil(block_bytes as u64);
        let pinned = pin_bytes_max.unwrap_or(layout.bytes()).div_ceil(block_bytes as u64);
        let (logical_blocks, pinned) = (logical_blocks as usize, pinned.max(1) as usize);
        let undo_bytes = undo_bytes(layout, slots);
        Geometry { block_bytes, slots, logical_blocks, pinned, undo_bytes }
    }

    /// The geometry that the words of an arena say, if it is one: blocks that whole elements fill,
    /// of a power of two of bytes, and that block numbers reach.
    pub(crate) fn of_words(
        layout: &ShardLayout,
        slots: usize,
        block_bytes: usize,
        pinned: usize,
    ) -> Option<Geometry> {
        let sound = (8..=BLOCK_BYTES_MAX).contains(&block_bytes) && block_bytes.is_power_of_two();
        if !sound || slots > SLOTS_MAX {
            return None;
        }
        let logical_blocks = usize::try_from(layout.bytes().div_ceil(block_bytes as u64)).ok()?;
        let blocks = logical_blocks.checked_mul(2)?.checked_add(pinned)?;
        let reached = pinned > 0 && u32::try_from(blocks).is_ok();
        let undo_bytes = undo_bytes(layout, slots);
        reached.then_some(Geometry { block_bytes, slots, logical_blocks, pinned, undo_bytes })
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

    /// The slots of a place are the parts of one block: those of a kind lie one behind the other, as the
    /// values do, and each kind is skewed against the ones before it and the values.
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

    /// The words of the tables that say where each block is.
    pub(crate) fn table_words(&self) -> usize {
        self.logical_blocks * if self.slots > 0 { 2 } else { 1 }
    }

    /// The bytes of memory that the store takes.
    pub(crate) fn need(&self) -> u64 {
        let undo = self.undo_file_bytes() + PAGE_BYTES as u64;
        self.values().need().saturating_add(self.slots().need()).saturating_add(undo)
    }

    /// The bytes of the file of those rows behind its first page.
    pub(crate) fn undo_file_bytes(&self) -> u64 {
        Undo::bytes(self.undo_bytes)
    }

    /// What the tables hold before anything is changed.
    pub(crate) fn first_table(&self) -> impl Iterator<Item = u64> {
        let (logical_blocks, slots) = (
            self.logical_blocks as u64,
            if self.slots > 0 { self.logical_blocks as u64 } else { 0 },
        );
        (0..logical_blocks).chain(0..slots)
    }
}

/// Rows of sparse variables lie far apart: copying the block of each would move many times what
/// changes. A quarter of the variables' bytes and those of their slots, and what the rows of one push take
/// of each table, but no more than can be changed at once without holding up everybody else.
fn undo_bytes(layout: &ShardLayout, slots: usize) -> usize {
    let sparse: u64 = layout.sparse().map(|partition| partition.bytes).sum();
    let quarter = (sparse / 4).saturating_mul(1 + slots as u64);
    let kept = layout.tables().iter().map(|table| Table::kept_bytes_of_a_push(table, slots));
    let rows = kept.fold(quarter, u64::saturating_add).min(ROW_UNDO_BYTES_MAX);
    UNDO_BYTES.max(rows as usize).next_multiple_of(8)
}

/// Some milliseconds of copying.
const ROW_UNDO_BYTES_MAX: u64 = 8 << 20;

/// The place that a byte lies in, and where in it. Blocks are of a power of two of bytes: to divide for
/// each of many rows would be a good part of what changing them costs.
#[inline]
pub(super) fn logical_block_of(at: usize, block_bytes: usize) -> (usize, usize) {
    debug_assert!(block_bytes.is_power_of_two(), "{block_bytes} bytes of a block");
    (at >> block_bytes.trailing_zeros(), at & (block_bytes - 1))
}

/// What a range is of each place that it lies in: the place, and where in it.
pub(super) fn pieces_of(
    range: &Range<u64>,
    block_bytes: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    let (mut start, end) = (range.start as usize, range.end as usize);
    std::iter::from_fn(move || {
        (start < end).then(|| {
            let (logical, within) = logical_block_of(start, block_bytes);
            let bytes = (block_bytes - within).min(end - start);
            start += bytes;
            (logical, within..within + bytes)
        })
    })
}

/// The places that a range lies in.
pub(super) fn logical_blocks_of(range: &Range<u64>, block_bytes: usize) -> Range<usize> {
    let (first, _) = logical_block_of(range.start as usize, block_bytes);
    let (last, within) = logical_block_of(range.end as usize, block_bytes);
    first..(last + usize::from(within > 0)).max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_all_memory_is_too_much_and_no_fault() {
        for slots in [0, SLOTS_MAX] {
            let (block_bytes, undo_bytes) = (BLOCK_BYTES, UNDO_BYTES);
            let (logical_blocks, pinned) = (usize::MAX / 4, usize::MAX / 4);
            let geometry = Geometry { block_bytes, slots, logical_blocks, pinned, undo_bytes };
            assert_eq!(geometry.need(), u64::MAX);
        }
    }

    #[test]
    fn streams_follow_each_other_and_do_not_meet_at_one_offset_of_a_page() {
        for slots in 1..=SLOTS_MAX {
            let undo_bytes = UNDO_BYTES;
            let geometry = Geometry {
                block_bytes: BLOCK_BYTES,
                slots,
                logical_blocks: 5,
                pinned: 2,
                undo_bytes,
            };
            let (values, slots) = (geometry.values(), geometry.slots());
            assert_eq!((values.stride, slots.stride, slots.parts), (65600, 65600, geometry.slots));
            assert_eq!((values.count, slots.count), (12, 12));
            // As `docs/arena.md` has it.
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
            assert_eq!(lines.len(), 1 + geometry.slots, "each starts at a line of its own");
        }
    }
}
