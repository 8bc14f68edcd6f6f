//! Applies a push to the rows of a change, one tile at a time: in place with undo, or in free
//! records.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::finite::{Exponents, first_non_finite};
use pushpull_common::table::RowHead;
use pushpull_common::tensor::DType;
use pushpull_optim::optimizer::Run;

use super::Table;
use super::change::RowMove;
use super::records::{head_of, put_head};
use crate::change::{Change, InPlaceRuns, with_slots};
use crate::planted::{Bug, PlantedBugs};
use crate::undo::{RowLocation, Undo};

/// The bytes of values in a tile. With their slots, their undo copies, and as much again prefetched
/// for the next tile, they stay in the L1 cache.
const TILE_BYTES: usize = 2 << 10;

impl Table {
    fn rows_of_a_tile(&self) -> usize {
        (TILE_BYTES / self.records.shape.row_bytes).max(1)
    }

    /// Applies a push to the rows at `places` among those given to [`Table::begin`]. The change
    /// must be settled, and `input` holds one row of the push for each. Rows changed in place are
    /// saved in `undo` first. Returns the first computed value that is not finite, and its byte
    /// offset in the row.
    pub(crate) fn change_rows(
        &mut self,
        change: Change<'_>,
        places: Range<usize>,
        input: &[u8],
        undo: &mut Undo,
        planted: PlantedBugs,
    ) -> Option<(usize, f64)> {
        let dirty = self.dirty_rows.take()?;
        let mut found = None;
        let each = self.rows_of_a_tile();
        let rows = &dirty.rows[places];
        let inputs = input.chunks(each * self.records.shape.row_bytes);
        self.fetch_rows(&rows[..each.min(rows.len())]);
        for ((at, rows_now), input) in (0..).zip(rows.chunks(each)).zip(inputs) {
            // Prefetch the next tile while this one is computed.
            let next = rows.len().min((at + 1) * each)..rows.len().min((at + 2) * each);
            self.fetch_rows(&rows[next]);
            self.save_undo(rows_now, undo, planted);
            let slots_changed = change.slots();
            change.in_place(&mut InRecords { table: self, rows: rows_now, slots_changed, input });
            found = found.or_else(|| self.first_non_finite(change.computed_dtype()?, rows_now));
        }
        self.dirty_rows = Some(dirty);
        found
    }

    /// Returns the first value that is not finite, and its byte offset in its row.
    fn first_non_finite(&self, dtype: DType, rows: &[RowMove]) -> Option<(usize, f64)> {
        let values = self.records.shape.stream(0);
        let exponents = Exponents::of(dtype);
        let mut rows = rows.iter().filter_map(|row| row.to);
        rows.find_map(|row| {
            let values = &self.records.read(row)[values.clone()];
            let (index, value) =
                exponents.are_full_in(values).then(|| first_non_finite(dtype, values))??;
            Some((index * dtype.size(), value))
        })
    }

    fn fetch_rows(&self, rows: &[RowMove]) {
        let all = self.records.shape.record_bytes();
        for row in rows {
            row.from.into_iter().for_each(|from| self.records.prefetch(from, all));
            row.to
                .filter(|_| row.to != row.from)
                .into_iter()
                .for_each(|to| self.records.prefetch(to, all));
        }
    }

    /// Saves the rows that are changed in place to the undo.
    fn save_undo(&mut self, rows: &[RowMove], undo: &mut Undo, planted: PlantedBugs) {
        let in_place_record = |row: &RowMove| row.to.filter(|_| row.to == row.from);
        let mut locations = std::mem::take(&mut self.locations);
        locations.clear();
        locations.extend(rows.iter().filter_map(in_place_record).map(|value| RowLocation {
            value,
            slot: 0,
            start: 0,
        }));
        if !locations.is_empty() {
            let table = Some(self.number);
            let record_bytes = self.records.shape.record_bytes();
            undo.record(table, &locations, record_bytes, 1, |_, old| {
                for (location, old) in locations.iter().zip(old.chunks_exact_mut(record_bytes)) {
                    old.copy_from_slice(self.records.read(location.value));
                }
            });
            if !planted.has(Bug::UndoAfterWrite) {
                undo.prepare();
            }
        }
        self.locations = locations;
    }

    /// Prepares the target record of a row that is not changed in place: copies the row, or writes
    /// its initial values.
    fn begin_row(&mut self, row: &RowMove, to: u32) {
        if let Some(from) = row.from {
            let mut row_buffer = std::mem::take(&mut self.row_buffer);
            row_buffer.clear();
            row_buffer.extend_from_slice(self.records.read(from));
            self.records.write(to).copy_from_slice(&row_buffer);
            self.row_buffer = row_buffer;
            return;
        }
        let shape = self.records.shape;
        let record = self.records.write(to);
        for (stream, out) in shape.streams_mut(record).enumerate() {
            match stream {
                0 => self.initial.fill(shape.dtype, row.id, out),
                slot => self.initial.fill_slot(shape.dtype, slot - 1, out),
            }
        }
        put_head(RowHead { id: row.id, step: 0, pushes: 0 }, record, false);
    }
}

/// Rows in their target records, and the input of a push for them.
struct InRecords<'a> {
    table: &'a mut Table,
    rows: &'a [RowMove],
    slots_changed: usize,
    input: &'a [u8],
}

impl InPlaceRuns for InRecords<'_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>)) {
        with_slots!(self.slots_changed, SLOTS => self.each_with::<T, SLOTS>(change));
    }
}

impl InRecords<'_> {
    /// Implements [`InPlaceRuns::each`] for at most `SLOTS` slots.
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
