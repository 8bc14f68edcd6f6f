//! How the rows of a change become what they will be, a few at a time: where they lie, with what they
//! were kept beside, or in spare records.

use std::ops::Range;

use super::Table;
use super::change::Moved;
use super::records::{head_of, put_head};
use crate::checkpoint::RowHead;
use crate::store::{Change, SLOTS_MAX, Spot, Undo};
use crate::zoo::{Bug, Zoo};

/// What is changed at a time stays in the fastest cache, slots and all.
const TILE_BYTES: usize = 4 << 10;

impl Table {
    fn rows_of_a_tile(&self) -> usize {
        (TILE_BYTES / self.records.shape.row_bytes).max(1)
    }

    /// Changes some rows of those that were named at the beginning, and that are settled, by rows of the
    /// push that lie one behind the other. What is changed where it lies is kept.
    pub(crate) fn change_rows(
        &mut self,
        change: Change<'_>,
        places: Range<usize>,
        input: &[u8],
        undo: &mut Undo,
        zoo: Zoo,
    ) {
        let Some(drafted) = self.draft.take() else { return };
        let each = self.rows_of_a_tile();
        let rows = &drafted.rows[places];
        let inputs = input.chunks(each * self.records.shape.row_bytes);
        self.fetch_rows(&rows[..each.min(rows.len())]);
        for ((at, rows_now), input) in (0..).zip(rows.chunks(each)).zip(inputs) {
            // What one tile waits for from memory, the tile before it has asked for.
            let next = rows.len().min((at + 1) * each)..rows.len().min((at + 2) * each);
            self.fetch_rows(&rows[next]);
            self.keep_rows(rows_now, undo, zoo);
            self.change_tile(change, rows_now, input);
        }
        self.draft = Some(drafted);
    }

    fn fetch_rows(&self, rows: &[Moved]) {
        let all = self.records.shape.record_bytes();
        for row in rows {
            row.from.into_iter().for_each(|from| self.records.fetch(from, all));
            row.to
                .filter(|_| row.to != row.from)
                .into_iter()
                .for_each(|to| self.records.fetch(to, all));
        }
    }

    /// Keeps the rows that are changed where they lie.
    fn keep_rows(&mut self, rows: &[Moved], undo: &mut Undo, zoo: Zoo) {
        let stays = |row: &Moved| row.to.filter(|_| row.to == row.from);
        let mut spots = std::mem::take(&mut self.spots);
        spots.clear();
        spots.extend(rows.iter().filter_map(stays).map(|value| Spot { value, slot: 0, start: 0 }));
        if !spots.is_empty() {
            let (table, record_bytes) = (Some(self.number), self.records.shape.record_bytes());
            let mut these = spots.iter();
            undo.keep(table, &spots, record_bytes, 1, |at, kept| {
                if let (Some(spot), Some(kept)) = (these.next(), kept.first_mut()) {
                    kept[at..at + record_bytes].copy_from_slice(self.records.read(spot.value));
                }
            });
            if !zoo.has(Bug::UndoAfterWrite) {
                undo.prepare();
            }
        }
        self.spots = spots;
    }

    fn change_tile(&mut self, change: Change<'_>, rows: &[Moved], input: &[u8]) {
        let shape = self.records.shape;
        let has_slots = change.slots();
        change.each_in_place(&mut |change| {
            for (row, input) in rows.iter().zip(input.chunks_exact(shape.row_bytes)) {
                let Some(to) = row.to else { continue };
                let pushes = self.begin_row(row, to).saturating_add(1);
                let record = self.records.write(to);
                let mut streams = shape.streams_mut(record);
                let values = streams.next().unwrap_or_default();
                let mut slots: [&mut [u8]; SLOTS_MAX] = Default::default();
                slots.iter_mut().zip(streams).for_each(|(slot, stream)| *slot = stream);
                change(values, &mut slots[..has_slots], input);
                put_head(RowHead { id: row.id, step: self.step, pushes }, record, self.integrity);
            }
        });
    }

    /// Has a row where it will be, as it was; how many pushes have changed it.
    fn begin_row(&mut self, row: &Moved, to: u32) -> u32 {
        let shape = self.records.shape;
        match row.from {
            Some(from) if from == to => {}
            Some(from) => {
                let mut held = std::mem::take(&mut self.held);
                held.clear();
                held.extend_from_slice(self.records.read(from));
                self.records.write(to).copy_from_slice(&held);
                self.held = held;
            }
            None => {
                let record = self.records.write(to);
                for (stream, out) in shape.streams_mut(record).enumerate() {
                    match stream {
                        0 => self.initial.fill(shape.dtype, row.id, out),
                        slot => self.initial.fill_slot(shape.dtype, slot - 1, out),
                    }
                }
                return 0;
            }
        }
        head_of(self.records.read(to)).pushes
    }
}
