//! The two write paths of a change: into shadow blocks, or in place with an undo.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::catalogue::Partition;
use pushpull_optim::optimizer::StreamRun;

use super::Store;
use super::geometry::logical_blocks_of;
use super::overflow::first_new_overflow;
use super::pool::Shadow;
use super::rows::{logical_block_of_row, range_of};
use crate::change::{Change, ChangeInput, NoFreeBlock, SLOTS_MAX, ShadowRuns, with_slots};
use crate::table::Table;
use crate::undo::{RowLocation, Undo};

/// Drops consecutive repetitions of a logical block, as ascending rows produce.
pub(super) fn distinct(logical_blocks: impl Iterator<Item = usize>) -> impl Iterator<Item = usize> {
    let mut last = usize::MAX;
    logical_blocks.filter(move |&logical| std::mem::replace(&mut last, logical) != logical)
}

/// A range of a logical block that is to be changed in its shadow.
#[derive(Clone, Debug)]
pub(super) struct ShadowWrite {
    value: Shadow,
    /// The shadow of the slots, if they change.
    slot: Option<Shadow>,
    within: Range<usize>,
}

impl Store {
    /// Begins a change in place if it has so few bytes that copying their blocks would cost more,
    /// and if nothing reads those blocks. Returns false otherwise. The old bytes of the ranges are
    /// recorded now; those of the rows are recorded as they change.
    pub(super) fn begin_in_place<'a>(
        &mut self,
        ranges: &[Range<u64>],
        rows: impl Iterator<Item = (&'a Partition, &'a [u32])> + Clone,
        version: u64,
    ) -> bool {
        let of_ranges = ranges.iter().map(|range| range.end - range.start);
        let of_rows = rows
            .clone()
            .map(|(partition, rows)| partition.row_bytes().saturating_mul(rows.len() as u64));
        let bytes = of_ranges.chain(of_rows).fold(0, u64::saturating_add);
        if !self.may_change_in_place(bytes) {
            return false;
        }
        let streams = 1 + self.geometry.slots;
        let mut touched_blocks = std::mem::take(&mut self.touched_blocks);
        touched_blocks.clear();
        let need = self.undo_need(ranges, rows, &mut touched_blocks);
        touched_blocks.sort_unstable();
        touched_blocks.dedup();
        self.touched_blocks = touched_blocks;
        let worth_it = bytes * 8 < (self.touched_blocks.len() * self.geometry.block_bytes) as u64;
        let is_read = |&logical: &usize| {
            let slots = self.slots.as_ref().is_some_and(|slots| slots.committed_is_pinned(logical));
            slots || self.values.committed_is_pinned(logical)
        };
        if !worth_it || !self.undo.fits(need) || self.touched_blocks.iter().any(is_read) {
            return false;
        }
        // A reader in another process may read any block.
        if !self.values.readers.begin_in_place() {
            return false;
        }
        self.undo.begin(version);
        for range in ranges {
            self.pieces_of(range)
                .for_each(|(logical, within)| self.record_undo(logical, within, streams - 1));
        }
        self.in_place = true;
        true
    }

    /// Decides for the current change, which makes `version`, whether rows of tables are changed in
    /// place. They are if the undo can hold them and nothing reads them; the rest of the change
    /// then runs without interruption. Does nothing if it is already decided.
    pub fn settle_tables(&mut self, version: u64) {
        if self.tables.iter().all(Table::is_settled) {
            return;
        }
        let need = self.tables.iter_mut().map(Table::undo_need).sum::<Option<usize>>();
        let fits = |need| need <= self.geometry.undo_bytes && self.undo.fits(need);
        let in_place = !self.power && need.is_some_and(fits);
        if in_place {
            if !self.in_place {
                self.undo.begin(version);
            }
            self.tables_in_place = true;
        }
        self.tables.iter_mut().for_each(|table| table.settle(in_place));
    }

    /// Returns whether a change of this many bytes of values may be made in place. Larger ones
    /// never are.
    pub(crate) fn may_change_in_place(&self, bytes: u64) -> bool {
        !self.power && self.is_small(bytes)
    }

    /// Returns whether a change of this many bytes is small enough for a change in place. Ignores
    /// the configuration, which may differ when these files are opened again.
    pub fn is_small(&self, bytes: u64) -> bool {
        let streams = 1 + self.geometry.slots as u64;
        bytes.saturating_mul(streams) <= self.geometry.undo_bytes as u64
    }

    /// Returns the maximum undo bytes of these ranges and rows, for any number of rows in a tile.
    /// Appends the logical blocks that they touch.
    pub(super) fn undo_need<'a>(
        &self,
        ranges: &[Range<u64>],
        rows: impl Iterator<Item = (&'a Partition, &'a [u32])>,
        touched_blocks: &mut Vec<usize>,
    ) -> usize {
        let streams = 1 + self.geometry.slots;
        // Each block boundary inside a range or a row adds a tile: its header, its location, and
        // less than one word of padding for each stream.
        let (mut need, cut) = (0, Undo::need(1, 8, streams));
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            need += Undo::need(1, (range.end - range.start) as usize, streams);
            need += cut * self.add_touched(range, touched_blocks);
        }
        let block_bytes = self.geometry.block_bytes;
        for (partition, rows) in rows {
            let row_bytes = partition.row_bytes() as usize;
            need += rows.len() * Undo::need(1, row_bytes, streams);
            for &row in rows {
                match logical_block_of_row(partition, row, row_bytes, block_bytes) {
                    Some((logical, _)) if touched_blocks.last() == Some(&logical) => {}
                    Some((logical, _)) => touched_blocks.push(logical),
                    None => {
                        need += cut * self.add_touched(&range_of(partition, row), touched_blocks)
                    }
                }
            }
        }
        need
    }

    /// Appends the logical blocks that a range touches. Returns how many there are after the first.
    fn add_touched(&self, range: &Range<u64>, touched_blocks: &mut Vec<usize>) -> usize {
        let logical_blocks = logical_blocks_of(range, self.geometry.block_bytes);
        let after = logical_blocks.len().saturating_sub(1);
        let last = touched_blocks.last().copied();
        touched_blocks.extend(logical_blocks.filter(|&logical| last != Some(logical)));
        after
    }

    /// Records the old contents of a range of a logical block, and of those of its slots that
    /// change.
    pub(super) fn record_undo(
        &mut self,
        logical: usize,
        within: Range<usize>,
        slots_changed: usize,
    ) {
        let location = self.location_of(logical, within.start, slots_changed);
        self.record_undo_of_rows(&[location], within.len(), slots_changed, &[]);
    }

    /// Returns the location of an offset in a logical block.
    fn location_of(&self, logical: usize, start: usize, slots_changed: usize) -> RowLocation {
        let slots = self.slots.as_ref().filter(|_| slots_changed > 0);
        let slot = slots.map_or(0, |slots| slots.committed_block(logical));
        RowLocation { value: self.values.committed_block(logical), slot, start: start as u32 }
    }

    /// Changes a range of a logical block in place, whose old contents have been recorded.
    pub(super) fn write_committed_block(
        &mut self,
        change: Change<'_>,
        logical: usize,
        within: Range<usize>,
        input: &mut ChangeInput<'_>,
    ) {
        let location = self.location_of(logical, within.start, change.slots());
        let start = (logical * self.geometry.block_bytes + within.start) as u64;
        let needs_check = self.needs_overflow_check(change, location.value, &within);
        self.change_location(change, location, within.len(), input);
        if needs_check {
            self.check_overflow(change, location.value, start, within, None);
        }
    }

    /// Changes a range in the shadows of its logical blocks.
    ///
    /// All shadows are looked up first, so that nothing between two blocks waits for memory. Such a
    /// wait costs more than its own time: the prefetched data is used up, and the hardware
    /// prefetcher starts again.
    pub(super) fn change_shadows(
        &mut self,
        change: Change<'_>,
        range: &Range<u64>,
        mut input: ChangeInput<'_>,
    ) -> Result<(), NoFreeBlock> {
        let mut shadow_writes = std::mem::take(&mut self.shadow_writes);
        shadow_writes.clear();
        let found = self.pieces_of(range).try_for_each(|(logical, within)| {
            let value = self.values.shadow(logical)?;
            let slots = self.slots.as_mut().filter(|_| change.slots() > 0);
            let slot = slots.map(|slots| slots.shadow(logical)).transpose()?;
            shadow_writes.push(ShadowWrite { value, slot, within });
            Ok(())
        });
        let mut start = range.start;
        for shadow_write in shadow_writes.iter().filter(|_| found.is_ok()) {
            self.change_shadow(change, shadow_write, start, &mut input);
            start += shadow_write.within.len() as u64;
        }
        self.shadow_writes = shadow_writes;
        found
    }

    /// Changes a range in a shadow. `start` is its position in the layout.
    fn change_shadow(
        &mut self,
        change: Change<'_>,
        shadow_write: &ShadowWrite,
        start: u64,
        input: &mut ChangeInput<'_>,
    ) {
        let ShadowWrite { value, slot, within } = shadow_write.clone();
        let fresh = value.block != value.from && slot.is_none_or(|slot| slot.block != slot.from);
        if fresh && self.stream(change, shadow_write, start, input) {
            return;
        }
        for (pool, shadow) in [(Some(&mut self.values), Some(value)), (self.slots.as_mut(), slot)] {
            if let (Some(pool), Some(Shadow { block, from })) = (pool, shadow)
                && block != from
            {
                pool.blocks.copy(from, block);
            }
        }
        // If slots change, there is a shadow of them.
        let slot = slot.map_or(0, |slot| slot.block);
        let location = RowLocation { value: value.block, slot, start: within.start as u32 };
        self.change_location(change, location, within.len(), input);
        // The rest of what this change has made of the block is in the shadow only.
        let committed = self.values.committed_block(start as usize / self.geometry.block_bytes);
        self.check_overflow(change, value.block, start, within, Some(committed));
    }

    /// Writes a range and its slots to new shadows, and copies the rest of the blocks. Returns
    /// false, without writing anything, if the rule has no loop for that.
    fn stream(
        &mut self,
        change: Change<'_>,
        shadow_write: &ShadowWrite,
        start: u64,
        input: &mut ChangeInput<'_>,
    ) -> bool {
        let ShadowWrite { value, slot, within } = shadow_write.clone();
        let (values, values_out) =
            self.values.blocks.read_and_stream::<1>(value.from, value.block, 1, within.clone());
        let [values] = values;
        let [values_out] = values_out;
        let (mut slots, mut slots_out) = Default::default();
        let mut count = 0;
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
            count = change.slots();
            let within = within.clone();
            (slots, slots_out) = pool.blocks.read_and_stream(slot.from, slot.block, count, within);
        }
        let mut shadows = ShadowRange {
            start: within.start,
            values,
            values_out,
            count,
            slots,
            slots_out,
            past_cache: self.past_cache,
            overflowed: None,
            input,
        };
        if !change.stream(&mut shadows) {
            return false;
        }
        let found = shadows.overflowed.clone().and_then(|within| {
            let before = &shadows.values[within.clone()];
            let after = &shadows.values_out[within.clone()];
            let (offset, value) =
                first_new_overflow(change.computed_dtype()?, Some(before), after)?;
            Some((within.start + offset, value))
        });
        self.record_overflow(start, found);
        let block_bytes = self.geometry.block_bytes;
        for rest in [0..within.start, within.end..block_bytes] {
            self.values.blocks.stream_from(value.from, value.block, 0, rest.clone());
            if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
                for part in 0..count {
                    pool.blocks.stream_from(slot.from, slot.block, part, rest.clone());
                }
            }
        }
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
            // Another variable in the block may have more slots than this one.
            for part in count..pool.blocks.parts() {
                pool.blocks.stream_from(slot.from, slot.block, part, 0..block_bytes);
            }
        }
        true
    }
}

/// A range of a block and its slots, the same range of their shadows, and its input.
struct ShadowRange<'a, 'i> {
    /// The offset of the range in the block.
    start: usize,
    values: &'a [u8],
    values_out: &'a mut [u8],
    /// The number of slots that change.
    count: usize,
    slots: [&'a [u8]; SLOTS_MAX],
    slots_out: [&'a mut [u8]; SLOTS_MAX],
    past_cache: bool,
    /// The part of the range whose new values may be non-finite.
    overflowed: Option<Range<usize>>,
    input: &'a mut ChangeInput<'i>,
}

impl ShadowRuns for ShadowRange<'_, '_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>)) {
        with_slots!(self.count, SLOTS => self.each_with::<T, SLOTS>(change));
    }
}

impl ShadowRange<'_, '_> {
    /// Implements [`ShadowRuns::each`] for at most `SLOTS` slots.
    fn each_with<T: Pod, const SLOTS: usize>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>)) {
        let start = self.start;
        let count = self.count;
        let past_cache = self.past_cache;
        self.input.each_next(start..start + self.values.len(), |within, gradient| {
            let within = within.start - start..within.end - start;
            let mut slots: [&[T]; SLOTS] = [&[]; SLOTS];
            let mut slots_out: [&mut [T]; SLOTS] = std::array::from_fn(|_| Default::default());
            let bytes_of = self.slots[..count].iter().zip(&mut self.slots_out);
            for ((slot, out), (from, to)) in slots.iter_mut().zip(&mut slots_out).zip(bytes_of) {
                *slot = bytemuck::cast_slice(&from[within.clone()]);
                *out = bytemuck::cast_slice_mut(&mut to[within.clone()]);
            }
            let mut overflowed = false;
            change(StreamRun {
                values: bytemuck::cast_slice(&self.values[within.clone()]),
                values_out: bytemuck::cast_slice_mut(&mut self.values_out[within.clone()]),
                slots: &slots[..count],
                slots_out: &mut slots_out[..count],
                gradient: gradient.cast(),
                past_cache,
                overflowed: &mut overflowed,
            });
            if overflowed {
                let first = self.overflowed.as_ref().map_or(within.start, |first| first.start);
                self.overflowed = Some(first..within.end);
            }
        });
    }
}
