//! How the rows of a change become what they will be, a few at a time: where they lie, with what they
//! were kept beside, or in spare records.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::finite::{Exponents, first_non_finite};
use pushpull_common::tensor::DType;

use super::Table;
use super::change::Moved;
use super::records::{head_of, put_head};
use crate::checkpoint::RowHead;
use crate::optimizer::Run;
use crate::planted::{Bug, PlantedBugs};
use crate::store::{Change, RowLocation, Stretches, Undo, with_slots};

/// The values that are changed at a time: with their slots, what is kept of them, and as much again that
/// is fetched for the next, they stay in the fastest cache.
const TILE_BYTES: usize = 2 << 10;

impl Table {
    fn rows_of_a_tile(&self) -> usize {
        (TILE_BYTES / self.records.shape.row_bytes).max(1)
    }

    /// Changes some rows of those that were named at the beginning, and that are settled, by rows of the
    /// push that lie one behind the other. What is changed where it lies is kept. Where in a row the first
    /// value is that is not finite then, and what it is, if it was computed.
    pub(crate) fn change_rows(
        &mut self,
        change: Change<'_>,
        places: Range<usize>,
        input: &[u8],
        undo: &mut Undo,
        planted: PlantedBugs,
    ) -> Option<(usize, f64)> {
        let dirty = self.dirty_pages.take()?;
        let mut found = None;
        let each = self.rows_of_a_tile();
        let rows = &dirty.rows[places];
        let inputs = input.chunks(each * self.records.shape.row_bytes);
        self.fetch_rows(&rows[..each.min(rows.len())]);
        for ((at, rows_now), input) in (0..).zip(rows.chunks(each)).zip(inputs) {
            // What one tile waits for from memory, the tile before it has asked for.
            let next = rows.len().min((at + 1) * each)..rows.len().min((at + 2) * each);
            self.fetch_rows(&rows[next]);
            self.keep_rows(rows_now, undo, planted);
            let slots_changed = change.slots();
            change.in_place(&mut InRecords { table: self, rows: rows_now, slots_changed, input });
            found = found.or_else(|| self.first_non_finite(change.written()?, rows_now));
        }
        self.dirty_pages = Some(dirty);
        found
    }

    /// The first value of rows that is not finite, by where it is in its row.
    fn first_non_finite(&self, dtype: DType, rows: &[Moved]) -> Option<(usize, f64)> {
        let (values, exponents) = (self.records.shape.stream(0), Exponents::of(dtype));
        let mut rows = rows.iter().filter_map(|row| row.to);
        rows.find_map(|row| {
            let values = &self.records.read(row)[values.clone()];
            let (index, value) =
                exponents.are_full_in(values).then(|| first_non_finite(dtype, values))??;
            Some((index * dtype.size(), value))
        })
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
    fn keep_rows(&mut self, rows: &[Moved], undo: &mut Undo, planted: PlantedBugs) {
        let stays = |row: &Moved| row.to.filter(|_| row.to == row.from);
        let mut locations = std::mem::take(&mut self.locations);
        locations.clear();
        locations.extend(rows.iter().filter_map(stays).map(|value| RowLocation {
            value,
            slot: 0,
            start: 0,
        }));
        if !locations.is_empty() {
            let (table, record_bytes) = (Some(self.number), self.records.shape.record_bytes());
            undo.keep(table, &locations, record_bytes, 1, |_, kept| {
                for (location, kept) in locations.iter().zip(kept.chunks_exact_mut(record_bytes)) {
                    kept.copy_from_slice(self.records.read(location.value));
                }
            });
            if !planted.has(Bug::UndoAfterWrite) {
                undo.prepare();
            }
        }
        self.locations = locations;
    }

    /// Has a row as it was where it will be, which is elsewhere.
    fn begin_row(&mut self, row: &Moved, to: u32) {
        if let Some(from) = row.from {
            let mut held = std::mem::take(&mut self.held);
            held.clear();
            held.extend_from_slice(self.records.read(from));
            self.records.write(to).copy_from_slice(&held);
            self.held = held;
            return;
        }
        let (shape, record) = (self.records.shape, self.records.write(to));
        for (stream, out) in shape.streams_mut(record).enumerate() {
            match stream {
                0 => self.initial.fill(shape.dtype, row.id, out),
                slot => self.initial.fill_slot(shape.dtype, slot - 1, out),
            }
        }
        put_head(RowHead { id: row.id, step: 0, pushes: 0 }, record, false);
    }
}

/// Rows in the records that they will be in, and what a push has for them.
struct InRecords<'a> {
    table: &'a mut Table,
    rows: &'a [Moved],
    slots_changed: usize,
    input: &'a [u8],
}

impl Stretches for InRecords<'_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        with_slots!(self.slots_changed, SLOTS => self.each_with::<T, SLOTS>(change));
    }
}

impl InRecords<'_> {
    /// [`Stretches::each`], for so many slots at most.
    fn each_with<T: Pod, const SLOTS: usize>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        let InRecords { table, rows, slots_changed, input } = self;
        let shape = table.records.shape;
        for (row, input) in rows.iter().zip(input.chunks_exact(shape.row_bytes)) {
            let Some(to) = row.to else { continue };
            if row.from != row.to {
                table.begin_row(row, to);
            }
            let record = table.records.write(to);
            let pushes = head_of(record).pushes.saturating_add(1);
            {
                let mut streams = shape.streams_mut(record).map(bytemuck::cast_slice_mut);
                let mut stream = || streams.next().unwrap_or_default();
                let values = stream();
                let mut slots: [&mut [T]; SLOTS] = std::array::from_fn(|_| stream());
                let slots = &mut slots[..SLOTS.min(*slots_changed)];
                change(Run { values, slots, gradient: bytemuck::cast_slice(input) });
            }
            put_head(RowHead { id: row.id, step: table.step, pushes }, record, table.integrity);
        }
    }
}
