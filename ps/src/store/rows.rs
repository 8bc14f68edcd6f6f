//! Rows that are changed where they lie, a few at a time: what they hold is kept, one row behind the
//! other, a rule takes that in one go, and what it makes of it is put where they lie.

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
    /// What they become, stream by stream; in words, as they are aligned for every type.
    words: Vec<u64>,
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
                false => self.change_tile(change, row_bytes, head, &mut tile),
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

    /// Keeps what a tile's rows hold, and changes them.
    fn change_tile(&mut self, change: Change<'_>, row_bytes: usize, input: &[u8], tile: &mut Tile) {
        self.keep_rows(&tile.spots, row_bytes, change.slots(), &tile.next);
        let mut kept: [&[u8]; 1 + SLOTS_MAX] = Default::default();
        let streams =
            kept.iter_mut().zip(self.undo.kept()).map(|(kept, held)| *kept = held).count();
        let stride = input.len().next_multiple_of(8) + SKEW_BYTES;
        if tile.words.len() < streams * stride / 8 {
            tile.words.resize(streams * stride / 8, 0);
        }
        let mut made: [&mut [u8]; 1 + SLOTS_MAX] = Default::default();
        let words = bytemuck::cast_slice_mut(&mut tile.words);
        for (made, bytes) in made.iter_mut().zip(words.chunks_exact_mut(stride)) {
            *made = &mut bytes[..input.len()];
        }
        change.across(&kept[..streams], &mut made[..streams], input);
        self.put(&tile.spots, row_bytes, &made[..streams], &tile.next);
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

    /// Puts rows, which have been kept, where they lie. Meanwhile the slots of the next ones are
    /// fetched.
    fn put(&mut self, spots: &[Spot], row_bytes: usize, made: &[&mut [u8]], next: &[Spot]) {
        let Some((made, rest)) = made.split_first() else { return };
        let slot_stride = self.geometry.block_bytes + SKEW_BYTES;
        let mut next = next.iter();
        for (spot, at) in spots.iter().zip((0..).step_by(row_bytes)) {
            let start = spot.start as usize;
            let block = self.values.blocks.write(spot.value);
            block[start..start + row_bytes].copy_from_slice(&made[at..at + row_bytes]);
            let Some(slots) = self.slots.as_mut().filter(|_| !rest.is_empty()) else { continue };
            if let Some(next) = next.next() {
                for slot in 0..rest.len() {
                    let start = slot * slot_stride + next.start as usize;
                    fetch(&slots.blocks, next.slot, start, row_bytes);
                }
            }
            let block = slots.blocks.write(spot.slot);
            for (made, start) in rest.iter().zip((start..).step_by(slot_stride)) {
                block[start..start + row_bytes].copy_from_slice(&made[at..at + row_bytes]);
            }
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
