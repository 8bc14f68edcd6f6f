//! Rows that are changed where they lie, a few at a time: what they hold is kept, one row behind the
//! other, and while they are in cache a rule takes each.

use std::ops::Range;

use pushpull_common::catalogue::Partition;

use super::undo::Spot;
use super::{Change, SLOTS_MAX, Store};
use crate::arena::{Blocks, SKEW_BYTES};
use crate::zoo::Bug;

/// What is taken at a time of values, and of each slot: it stays in cache until it is put back.
const TILE_BYTES: usize = 8 << 10;

/// Rows under way.
#[derive(Debug, Default)]
pub(super) struct Tile {
    /// Where they lie, and where those lie that come next.
    spots: Vec<Spot>,
    next: Vec<Spot>,
}

/// Where a row of a partition lies in the shard's variables.
pub(crate) fn range_of(partition: &Partition, row: u32) -> Range<u64> {
    let start = partition.offset + u64::from(row) * partition.row_bytes();
    start..start + partition.row_bytes()
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
            std::mem::swap(&mut tile.spots, &mut tile.next);
            let count = tile.spots.len().max(1);
            let (head, rest) = input.split_at(count * row_bytes);
            (rows, input) = (&rows[count..], rest);
            self.find(partition, rows, change, &mut tile.next);
            match tile.spots.is_empty() {
                true => self.change_in_pieces(change, range_of(partition, first), head),
                false => self.change_tile(change, row_bytes, head, &tile),
            }
        }
        self.tile = tile;
    }

    /// Finds where the next rows lie, up to the first that lies in two blocks.
    fn find(&self, partition: &Partition, rows: &[u32], change: Change<'_>, spots: &mut Vec<Spot>) {
        let (row_bytes, block_bytes) = (partition.row_bytes() as usize, self.geometry.block_bytes);
        let slots = self.slots.as_ref().filter(|_| change.slots() > 0);
        spots.clear();
        for &row in rows.iter().take((TILE_BYTES / row_bytes).max(1)) {
            // Not of `range_of`, which would find the bytes of a row by a division each time.
            let start = partition.offset as usize + row as usize * row_bytes;
            let (place, within) = (start / block_bytes, start % block_bytes);
            if within + row_bytes > block_bytes {
                break;
            }
            let slot = slots.map_or(0, |slots| slots.home(place));
            spots.push(Spot { value: self.values.home(place), slot, start: within as u32 });
        }
    }

    /// Keeps what a tile's rows hold, and changes them where they lie. Meanwhile the slots of the next ones
    /// are fetched.
    fn change_tile(&mut self, change: Change<'_>, row_bytes: usize, input: &[u8], tile: &Tile) {
        let Tile { spots, next } = tile;
        self.keep_rows(spots, row_bytes, change.slots(), next);
        let slot_stride = self.geometry.block_bytes + SKEW_BYTES;
        let (mut next, count) = (next.iter(), change.slots());
        change.each_in_place(&mut |change| {
            for (spot, input) in spots.iter().zip(input.chunks_exact(row_bytes)) {
                let within = spot.start as usize..spot.start as usize + row_bytes;
                let values = &mut self.values.blocks.write(spot.value)[within.clone()];
                let mut slots: [&mut [u8]; SLOTS_MAX] = Default::default();
                if let Some(pool) = self.slots.as_mut().filter(|_| count > 0) {
                    if let Some(next) = next.next() {
                        for slot in 0..count {
                            let start = slot * slot_stride + next.start as usize;
                            fetch(&pool.blocks, next.slot, start, row_bytes);
                        }
                    }
                    let all = pool.blocks.write(spot.slot).chunks_mut(slot_stride);
                    for (slot, bytes) in slots.iter_mut().zip(all).take(count) {
                        *slot = &mut bytes[within.clone()];
                    }
                }
                change(values, &mut slots[..count], input);
            }
        });
    }

    /// Keeps what rows hold, and those of their slots that change. Meanwhile the values of the next
    /// ones are fetched.
    pub(super) fn keep_rows(
        &mut self,
        spots: &[Spot],
        row_bytes: usize,
        slots_changed: usize,
        next: &[Spot],
    ) {
        let values = &self.values.blocks;
        let slots = self.slots.as_ref().filter(|_| slots_changed > 0).map(|pool| &pool.blocks);
        let slot_stride = self.geometry.block_bytes + SKEW_BYTES;
        let (mut these, mut next) = (spots.iter(), next.iter());
        self.undo.keep(None, spots, row_bytes, 1 + slots_changed, |at, kept| {
            if let Some(next) = next.next() {
                fetch(values, next.value, next.start as usize, row_bytes);
            }
            let (Some(spot), Some((kept, rest))) = (these.next(), kept.split_first_mut()) else {
                return;
            };
            let start = spot.start as usize;
            let held = &values.read(spot.value)[start..start + row_bytes];
            kept[at..at + row_bytes].copy_from_slice(held);
            if let Some(slots) = slots {
                let held = slots.read(spot.slot);
                for (kept, start) in rest.iter_mut().zip((start..).step_by(slot_stride)) {
                    kept[at..at + row_bytes].copy_from_slice(&held[start..start + row_bytes]);
                }
            }
        });
        if !self.zoo.has(Bug::UndoAfterWrite) {
            self.undo.prepare();
        }
    }

    /// Changes a row that lies in more than one block.
    fn change_in_pieces(&mut self, change: Change<'_>, range: Range<u64>, input: &[u8]) {
        let mut input = input;
        for (place, within) in self.pieces_of(&range) {
            let (head, rest) = input.split_at(within.len());
            self.keep(place, within.clone(), change.slots());
            self.change_home(change, place, within, head);
            input = rest;
        }
    }
}

/// Longer stretches are fetched by the processor itself.
const FETCHED_BYTES_MAX: usize = 1024;

/// Has a row fetched, as it is read soon: rows lie far apart, and nothing else would have the
/// processor wait for several of them at a time.
#[inline]
pub(super) fn fetch(blocks: &Blocks, block: u32, start: usize, row_bytes: usize) {
    if row_bytes <= FETCHED_BYTES_MAX {
        blocks.fetch(block, start..start + row_bytes);
    }
}
