//! Rows that are changed where they lie, a few at a time: what they hold is kept, one row behind the
//! other, and while they are in cache a rule takes each.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::catalogue::Partition;

use super::change::{Stretches, with_slots};
use super::geometry::logical_block_of;
use super::undo::RowLocation;
use super::{Change, Input, Store};
use crate::arena::Blocks;
use crate::optimizer::Run;
use crate::planted::Bug;

/// What is taken at a time of values, and of each slot: it stays in cache until it is put back.
const TILE_BYTES: usize = 8 << 10;

/// Rows under way.
#[derive(Debug, Default)]
pub(super) struct Tile {
    /// Where they lie, and where those lie that come next.
    locations: Vec<RowLocation>,
    next: Vec<RowLocation>,
}

/// Where a row of a partition lies in the shard's variables.
pub(super) fn range_of(partition: &Partition, row: u32) -> Range<u64> {
    let start = partition.offset + u64::from(row) * partition.row_bytes();
    start..start + partition.row_bytes()
}

/// The place that a row of a partition lies in and where, if it is one. Not of [`range_of`], which
/// would find the bytes of a row by a division each time.
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
    /// Keeps what rows hold, and changes them where they lie.
    pub(super) fn change_rows_in_place(
        &mut self,
        change: Change<'_>,
        partition: &Partition,
        rows: &[u32],
        input: &[u8],
    ) {
        let row_bytes = partition.row_bytes() as usize;
        let mut tile = std::mem::take(&mut self.tile);
        let (mut rows, mut input) = (rows, input);
        self.find(partition, rows, change, &mut tile.next);
        while let Some(&first) = rows.first() {
            std::mem::swap(&mut tile.locations, &mut tile.next);
            let count = tile.locations.len().max(1);
            let (head, rest) = input.split_at(count * row_bytes);
            let changed = &rows[..count];
            (rows, input) = (&rows[count..], rest);
            self.find(partition, rows, change, &mut tile.next);
            match tile.locations.is_empty() {
                true => self.change_in_pieces(change, range_of(partition, first), head),
                false => {
                    self.change_tile(change, row_bytes, head, &tile);
                    let starts = changed.iter().map(|&row| range_of(partition, row).start);
                    self.look_at_rows(change, starts, &tile.locations, row_bytes);
                }
            }
        }
        self.tile = tile;
    }

    /// Finds where the next rows lie, up to the first that lies in two blocks.
    fn find(
        &self,
        partition: &Partition,
        rows: &[u32],
        change: Change<'_>,
        locations: &mut Vec<RowLocation>,
    ) {
        let (row_bytes, block_bytes) = (partition.row_bytes() as usize, self.geometry.block_bytes);
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

    /// Keeps what a tile's rows hold, and changes them where they lie.
    fn change_tile(&mut self, change: Change<'_>, row_bytes: usize, input: &[u8], tile: &Tile) {
        self.keep_rows(&tile.locations, row_bytes, change.slots(), &tile.next);
        self.change_locations(change, &tile.locations, row_bytes, input);
    }

    /// Changes rows where they lie; what they were has been kept.
    pub(super) fn change_locations(
        &mut self,
        change: Change<'_>,
        locations: &[RowLocation],
        row_bytes: usize,
        input: &[u8],
    ) {
        let slots = self.slots.as_mut().filter(|_| change.slots() > 0);
        change.in_place(&mut InBlocks {
            values: &mut self.values.blocks,
            slots: slots.map(|pool| (&mut pool.blocks, change.slots())),
            locations,
            row_bytes,
            input,
        });
    }

    /// Changes a stretch of a block where it lies, by the next of the input.
    pub(super) fn change_location(
        &mut self,
        change: Change<'_>,
        location: RowLocation,
        bytes: usize,
        input: &mut Input<'_>,
    ) {
        let slots = self.slots.as_mut().filter(|_| change.slots() > 0);
        change.in_place(&mut InBlock {
            values: &mut self.values.blocks,
            slots: slots.map(|pool| (&mut pool.blocks, change.slots())),
            location,
            bytes,
            input,
        });
    }

    /// Keeps what rows hold, and those of their slots that change. Meanwhile the next ones are fetched.
    pub(super) fn keep_rows(
        &mut self,
        locations: &[RowLocation],
        row_bytes: usize,
        slots_changed: usize,
        next: &[RowLocation],
    ) {
        let values = &self.values.blocks;
        let slots = self.slots.as_ref().filter(|_| slots_changed > 0).map(|pool| &pool.blocks);
        self.undo.keep(None, locations, row_bytes, 1 + slots_changed, |stream, kept| {
            let (blocks, part) = match (stream.checked_sub(1), slots) {
                (Some(slot), Some(slots)) => (slots, slot),
                _ => (values, 0),
            };
            let lies = |location: &RowLocation| {
                let block = if stream == 0 { location.value } else { location.slot };
                (block, location.start as usize)
            };
            let mut next = next.iter().map(lies);
            for (location, kept) in locations.iter().zip(kept.chunks_exact_mut(row_bytes)) {
                if let Some((block, start)) = next.next() {
                    fetch(blocks, (block, part), start, row_bytes);
                }
                let (block, start) = lies(location);
                let block = blocks.read_part(block, part);
                kept.copy_from_slice(&block[start..start + row_bytes]);
            }
        });
        if !self.planted.has(Bug::UndoAfterWrite) {
            self.undo.prepare();
        }
    }

    /// Changes a row that lies in more than one block.
    fn change_in_pieces(&mut self, change: Change<'_>, range: Range<u64>, input: &[u8]) {
        let mut input = Input::from(input);
        for (logical, within) in self.pieces_of(&range) {
            self.keep(logical, within.clone(), change.slots());
            self.write_committed_block(change, logical, within, &mut input);
        }
    }
}

/// Rows of one length where they lie, and what a push has for them.
struct InBlocks<'a> {
    values: &'a mut Blocks,
    /// And how many of them change.
    slots: Option<(&'a mut Blocks, usize)>,
    locations: &'a [RowLocation],
    row_bytes: usize,
    input: &'a [u8],
}

impl Stretches for InBlocks<'_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        let count = self.slots.as_ref().map_or(0, |(_, count)| *count);
        with_slots!(count, SLOTS => self.each_with::<T, SLOTS>(change));
    }
}

impl InBlocks<'_> {
    /// [`Stretches::each`], for so many slots at most.
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

/// A stretch of a block, and what a push has for it.
struct InBlock<'a, 'i> {
    values: &'a mut Blocks,
    /// And how many of them change.
    slots: Option<(&'a mut Blocks, usize)>,
    location: RowLocation,
    bytes: usize,
    input: &'a mut Input<'i>,
}

impl Stretches for InBlock<'_, '_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        let InBlock { values, slots, location, bytes, input } = self;
        let start = location.start as usize;
        input.each(start..start + *bytes, |within, input| {
            let row_bytes = within.len();
            let slots = slots.as_mut().map(|(blocks, count)| (&mut **blocks, *count));
            let locations = &[RowLocation { start: within.start as u32, ..*location }];
            InBlocks { values, slots, locations, row_bytes, input }.each(change);
        });
    }
}

/// Longer stretches are fetched by the processor itself.
const FETCHED_BYTES_MAX: usize = 1024;

/// Has a row of a part of a block fetched, as it is read soon: rows lie far apart, and nothing else would
/// have the processor wait for several of them at a time.
#[inline]
pub(super) fn fetch(blocks: &Blocks, (block, part): (u32, usize), start: usize, row_bytes: usize) {
    if row_bytes <= FETCHED_BYTES_MAX {
        blocks.fetch(block, part, start..start + row_bytes);
    }
}
