//! Rows that are changed where they lie: a few at a time are put one behind the other, so that a rule
//! takes them in one go, and back.

use pushpull_common::catalogue::Partition;

use super::{Change, SLOTS_MAX, Store};
use crate::arena::SKEW_BYTES;

/// What is put one behind the other at a time stays in the fastest cache, slots and all.
const TILE_BYTES: usize = 4 << 10;

/// Rows with their slots; in words, as they are aligned for every type.
#[derive(Debug, Default)]
pub(super) struct Tile {
    words: Vec<u64>,
    /// The block of each row, and that of its slots, and where in them it starts.
    at: Vec<(u32, u32, usize)>,
}

impl Store {
    /// Changes rows where they lie; what they were has been kept.
    pub(super) fn change_rows_in_place(
        &mut self,
        change: Change<'_>,
        partition: &Partition,
        rows: &[u32],
        input: &[u8],
    ) {
        let row_bytes = partition.row_bytes() as usize;
        let each = (TILE_BYTES / row_bytes).max(1);
        let mut tile = std::mem::take(&mut self.tile);
        for (rows, input) in rows.chunks(each).zip(input.chunks(each * row_bytes)) {
            match self.put_side_by_side(partition, rows, change.slots(), &mut tile) {
                true => self.change_tile(change, row_bytes, input, &mut tile),
                false => self.change_one_by_one(change, partition, rows, input),
            }
        }
        self.tile = tile;
    }

    /// Copies rows and those of their slots that change into the tile; false if one lies in two blocks.
    fn put_side_by_side(
        &self,
        partition: &Partition,
        rows: &[u32],
        slots_changed: usize,
        tile: &mut Tile,
    ) -> bool {
        let (row_bytes, block_bytes) = (partition.row_bytes() as usize, self.geometry.block_bytes);
        let slots = self.slots.as_ref().filter(|_| slots_changed > 0);
        tile.at.clear();
        for &row in rows {
            let start = partition.offset as usize + row as usize * row_bytes;
            let (place, within) = (start / block_bytes, start % block_bytes);
            if within + row_bytes > block_bytes {
                return false;
            }
            let slot = slots.map_or(0, |slots| slots.home(place));
            tile.at.push((self.values.home(place), slot, within));
        }
        let streams = 1 + slots_changed;
        let bytes = (rows.len() * row_bytes).next_multiple_of(8);
        if tile.words.len() < streams * bytes / 8 {
            tile.words.resize(streams * bytes / 8, 0);
        }
        let (values, rest) = bytemuck::cast_slice_mut(&mut tile.words).split_at_mut(bytes);
        for (&(block, _, within), out) in tile.at.iter().zip(values.chunks_exact_mut(row_bytes)) {
            out.copy_from_slice(&self.values.blocks.read(block)[within..within + row_bytes]);
        }
        if let Some(slots) = slots {
            for (slot, out) in rest.chunks_exact_mut(bytes).take(streams - 1).enumerate() {
                let first = slot * (block_bytes + SKEW_BYTES);
                for (&(_, block, within), out) in
                    tile.at.iter().zip(out.chunks_exact_mut(row_bytes))
                {
                    let start = first + within;
                    out.copy_from_slice(&slots.blocks.read(block)[start..start + row_bytes]);
                }
            }
        }
        true
    }

    /// Changes what lies in the tile, and puts it back.
    fn change_tile(&mut self, change: Change<'_>, row_bytes: usize, input: &[u8], tile: &mut Tile) {
        let length = tile.at.len() * row_bytes;
        let bytes = length.next_multiple_of(8);
        let (values, rest) = bytemuck::cast_slice_mut(&mut tile.words).split_at_mut(bytes);
        let count = change.slots();
        let mut slots: [&mut [u8]; SLOTS_MAX] = Default::default();
        for (slot, bytes) in slots.iter_mut().zip(rest.chunks_exact_mut(bytes)).take(count) {
            *slot = &mut bytes[..length];
        }
        change.in_place(&mut values[..length], &mut slots[..count], input);
        for (&(block, _, within), row) in tile.at.iter().zip(values.chunks_exact(row_bytes)) {
            let out = self.values.blocks.write(block);
            out[within..within + row_bytes].copy_from_slice(row);
        }
        if let Some(pool) = self.slots.as_mut().filter(|_| count > 0) {
            for (index, slot) in slots[..count].iter().enumerate() {
                let first = index * (self.geometry.block_bytes + SKEW_BYTES);
                for (&(_, block, within), row) in tile.at.iter().zip(slot.chunks_exact(row_bytes)) {
                    let start = first + within;
                    pool.blocks.write(block)[start..start + row_bytes].copy_from_slice(row);
                }
            }
        }
    }

    fn change_one_by_one(
        &mut self,
        change: Change<'_>,
        partition: &Partition,
        rows: &[u32],
        input: &[u8],
    ) {
        let (row_bytes, block_bytes) = (partition.row_bytes() as usize, self.geometry.block_bytes);
        for (&row, input) in rows.iter().zip(input.chunks_exact(row_bytes)) {
            let start = partition.offset as usize + row as usize * row_bytes;
            let mut done = 0;
            while done < row_bytes {
                let (place, within) = ((start + done) / block_bytes, (start + done) % block_bytes);
                let piece = (block_bytes - within).min(row_bytes - done);
                let value = self.values.home(place);
                let slot = self.slots.as_ref().map(|slots| slots.home(place));
                let input = &input[done..done + piece];
                self.change_block(change, value, slot, within..within + piece, input);
                done += piece;
            }
        }
    }
}
