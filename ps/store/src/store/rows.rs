//! Rows that are changed in place, one tile at a time. The old contents of a tile are recorded;
//! while its rows are in cache, the rule changes them.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::catalogue::Partition;
use pushpull_optim::optimizer::Run;

use super::Store;
use super::geometry::logical_block_of;
use crate::arena::Blocks;
use crate::change::{Change, ChangeInput, InPlaceRuns, with_slots};
use crate::planted::Bug;
use crate::undo::RowLocation;

/// The maximum size of a tile, of its values and of each slot, in bytes. A tile stays in cache from
/// its recording to its change.
const TILE_BYTES: usize = 8 << 10;

/// The locations of the rows of two tiles.
#[derive(Debug, Default)]
pub(super) struct RowTile {
    /// The current tile, and the one after it, which is prefetched.
    locations: Vec<RowLocation>,
    next: Vec<RowLocation>,
}

/// Returns the position of a row in the shard's layout.
pub(super) fn range_of(partition: &Partition, row: u32) -> Range<u64> {
    let start = partition.offset + u64::from(row) * partition.row_bytes();
    start..start + partition.row_bytes()
}

/// Returns the logical block that contains a row, and the row's offset in it; `None` if the row
/// crosses a block boundary. The caller passes the size of a row: [`range_of`] would find it by a
/// division each time.
#[inline]
pub(super) fn logical_block_of_row(
    partition: &Partition,
    row: u32,
    row_bytes: usize,
    block_bytes: usize,
) -> Option<(usize, usize)> {
    let start = partition.offset as usize + row as usize * row_bytes;
    let (logical, within) = logical_block_of(start, block_bytes);
    (within + row_bytes <= block_bytes).then_some((logical, within))
}

impl Store {
    /// Records the old contents of rows, and changes them in place.
    pub(super) fn change_rows_in_place(
        &mut self,
        change: Change<'_>,
        partition: &Partition,
        rows: &[u32],
        input: &[u8],
    ) {
        let row_bytes = partition.row_bytes() as usize;
        let mut tile = std::mem::take(&mut self.tile);
        let mut rows = rows;
        let mut input = input;
        self.locate(partition, rows, change, &mut tile.next);
        while let Some(&first) = rows.first() {
            std::mem::swap(&mut tile.locations, &mut tile.next);
            let count = tile.locations.len().max(1);
            let (head, rest) = input.split_at(count * row_bytes);
            let changed = &rows[..count];
            rows = &rows[count..];
            input = rest;
            self.locate(partition, rows, change, &mut tile.next);
            match tile.locations.is_empty() {
                true => self.change_in_pieces(change, range_of(partition, first), head),
                false => {
                    self.change_tile(change, row_bytes, head, &tile);
                    let starts = changed.iter().map(|&row| range_of(partition, row).start);
                    self.check_overflow_of_rows(change, starts, &tile.locations, row_bytes);
                }
            }
        }
        self.tile = tile;
    }

    /// Locates the rows of the next tile, up to the first that crosses a block boundary.
    fn locate(
        &self,
        partition: &Partition,
        rows: &[u32],
        change: Change<'_>,
        locations: &mut Vec<RowLocation>,
    ) {
        let row_bytes = partition.row_bytes() as usize;
        let block_bytes = self.geometry.block_bytes;
        let slots = self.slots.as_ref().filter(|_| change.slots() > 0);
        locations.clear();
        for &row in rows.iter().take((TILE_BYTES / row_bytes).max(1)) {
            let found = logical_block_of_row(partition, row, row_bytes, block_bytes);
            let Some((logical, within)) = found else { break };
            let slot = slots.map_or(0, |slots| slots.committed_block(logical));
            locations.push(RowLocation {
                value: self.values.committed_block(logical),
                slot,
                start: within as u32,
            });
        }
    }

    /// Records the old contents of a tile, and changes it in place.
    fn change_tile(&mut self, change: Change<'_>, row_bytes: usize, input: &[u8], tile: &RowTile) {
        self.record_undo_of_rows(&tile.locations, row_bytes, change.slots(), &tile.next);
        self.change_locations(change, &tile.locations, row_bytes, input);
    }

    /// Changes rows in place, whose old contents have been recorded.
    pub(super) fn change_locations(
        &mut self,
        change: Change<'_>,
        locations: &[RowLocation],
        row_bytes: usize,
        input: &[u8],
    ) {
        let slots = self.slots.as_mut().filter(|_| change.slots() > 0);
        change.in_place(&mut RowsInBlocks {
            values: &mut self.values.blocks,
            slots: slots.map(|pool| (&mut pool.blocks, change.slots())),
            locations,
            row_bytes,
            input,
        });
    }

    /// Changes a range of a block in place, by the next bytes of the input.
    pub(super) fn change_location(
        &mut self,
        change: Change<'_>,
        location: RowLocation,
        bytes: usize,
        input: &mut ChangeInput<'_>,
    ) {
        let slots = self.slots.as_mut().filter(|_| change.slots() > 0);
        change.in_place(&mut RangeInBlock {
            values: &mut self.values.blocks,
            slots: slots.map(|pool| (&mut pool.blocks, change.slots())),
            location,
            bytes,
            input,
        });
    }

    /// Records the old contents of rows, and of those of their slots that change. Meanwhile
    /// prefetches the rows of the next tile.
    pub(super) fn record_undo_of_rows(
        &mut self,
        locations: &[RowLocation],
        row_bytes: usize,
        slots_changed: usize,
        next: &[RowLocation],
    ) {
        let values = &self.values.blocks;
        let slots = self.slots.as_ref().filter(|_| slots_changed > 0).map(|pool| &pool.blocks);
        self.undo.record(None, locations, row_bytes, 1 + slots_changed, |stream, old| {
            let (blocks, part) = match (stream.checked_sub(1), slots) {
                (Some(slot), Some(slots)) => (slots, slot),
                _ => (values, 0),
            };
            let position = |location: &RowLocation| {
                let block = if stream == 0 { location.value } else { location.slot };
                (block, location.start as usize)
            };
            let mut next = next.iter().map(position);
            for (location, old) in locations.iter().zip(old.chunks_exact_mut(row_bytes)) {
                if let Some((block, start)) = next.next() {
                    prefetch_row(blocks, block, part, start, row_bytes);
                }
                let (block, start) = position(location);
                let block = blocks.read_part(block, part);
                old.copy_from_slice(&block[start..start + row_bytes]);
            }
        });
        if !self.planted.has(Bug::UndoAfterWrite) {
            self.undo.prepare();
        }
    }

    /// Changes a row that crosses a block boundary.
    fn change_in_pieces(&mut self, change: Change<'_>, range: Range<u64>, input: &[u8]) {
        let mut input = ChangeInput::from(input);
        for (logical, within) in self.pieces_of(&range) {
            self.record_undo(logical, within.clone(), change.slots());
            self.write_committed_block(change, logical, within, &mut input);
        }
    }
}

/// Rows of one length that change in place, and their input.
struct RowsInBlocks<'a> {
    values: &'a mut Blocks,
    /// The slots, and how many of them change.
    slots: Option<(&'a mut Blocks, usize)>,
    locations: &'a [RowLocation],
    row_bytes: usize,
    input: &'a [u8],
}

impl InPlaceRuns for RowsInBlocks<'_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        let count = self.slots.as_ref().map_or(0, |(_, count)| *count);
        with_slots!(count, SLOTS => self.each_with::<T, SLOTS>(change));
    }
}

impl RowsInBlocks<'_> {
    /// Implements [`InPlaceRuns::each`] for at most `SLOTS` slots.
    fn each_with<T: Pod, const SLOTS: usize>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        let row_bytes = self.row_bytes;
        for (location, input) in self.locations.iter().zip(self.input.chunks_exact(row_bytes)) {
            let start = location.start as usize;
            let mut slots: [&mut [T]; SLOTS] = std::array::from_fn(|_| Default::default());
            let mut count = 0;
            if let Some((blocks, changed)) = &mut self.slots {
                count = SLOTS.min(*changed);
                let parts = blocks.write_parts::<SLOTS>(location.slot, count);
                for (slot, part) in slots[..count].iter_mut().zip(parts) {
                    *slot = bytemuck::cast_slice_mut(&mut part[start..start + row_bytes]);
                }
            }
            let values = &mut self.values.write(location.value)[start..start + row_bytes];
            change(Run {
                values: bytemuck::cast_slice_mut(values),
                slots: &mut slots[..count],
                gradient: bytemuck::cast_slice(input),
            });
        }
    }
}

/// A range of a block that changes in place, and its input.
struct RangeInBlock<'a, 'i> {
    values: &'a mut Blocks,
    /// The slots, and how many of them change.
    slots: Option<(&'a mut Blocks, usize)>,
    location: RowLocation,
    bytes: usize,
    input: &'a mut ChangeInput<'i>,
}

impl InPlaceRuns for RangeInBlock<'_, '_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        let RangeInBlock { values, slots, location, bytes, input } = self;
        let start = location.start as usize;
        input.each(start..start + *bytes, |within, input| {
            let row_bytes = within.len();
            let slots = slots.as_mut().map(|(blocks, count)| (&mut **blocks, *count));
            let locations = &[RowLocation { start: within.start as u32, ..*location }];
            RowsInBlocks { values, slots, locations, row_bytes, input }.each(change);
        });
    }
}

/// The maximum size of a row to prefetch, in bytes. The hardware prefetches longer ones.
const PREFETCH_BYTES_MAX: usize = 1024;

/// Prefetches a row of a part of a block. Rows are far apart, so without a prefetch the processor
/// would wait for one at a time.
#[inline]
pub(super) fn prefetch_row(
    blocks: &Blocks,
    block: u32,
    part: usize,
    start: usize,
    row_bytes: usize,
) {
    if row_bytes <= PREFETCH_BYTES_MAX {
        blocks.prefetch(block, part, start..start + row_bytes);
    }
}
