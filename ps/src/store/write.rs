//! How a change reaches blocks: into shadows, or where the values lie beside what they were.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::catalogue::Partition;

use super::change::{Streams, with_slots};
use super::geometry::logical_blocks_of;
use super::input::Next;
use super::overflow::first_made;
use super::pool::{NoFreeBlock, Shadow};
use super::rows::{logical_block_of_row, range_of};
use super::undo::{RowLocation, Undo};
use super::{Change, Input, SLOTS_MAX, Store};
use crate::optimizer::{GradientRun, StreamRun};

/// These places without those that are named again and again, as by rows that rise.
pub(super) fn distinct(logical_blocks: impl Iterator<Item = usize>) -> impl Iterator<Item = usize> {
    let mut last = usize::MAX;
    logical_blocks.filter(move |&logical| std::mem::replace(&mut last, logical) != logical)
}

/// A stretch of a place that is to be changed in shadows.
#[derive(Clone, Debug)]
pub(super) struct ShadowWrite {
    value: Shadow,
    /// That of its slots, if they change.
    slot: Option<Shadow>,
    within: Range<usize>,
}

impl Store {
    /// Begins a change that is made where the values lie, if these are few enough bytes that it is
    /// cheaper than copying their blocks, and nobody reads those. What the ranges hold is kept now;
    /// what the rows do, as they are changed.
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
        let mut touched = std::mem::take(&mut self.touched);
        touched.clear();
        let need = self.need_of(ranges, rows, &mut touched);
        touched.sort_unstable();
        touched.dedup();
        self.touched = touched;
        let worth_it = bytes * 8 < (self.touched.len() * self.geometry.block_bytes) as u64;
        let is_read = |&logical: &usize| {
            let slots = self.slots.as_ref().is_some_and(|slots| slots.committed_is_pinned(logical));
            slots || self.values.committed_is_pinned(logical)
        };
        if !worth_it || !self.undo.has_room(need) || self.touched.iter().any(is_read) {
            return false;
        }
        // Whoever reads in another process may be reading anything.
        if !self.values.readers.make_way() {
            return false;
        }
        self.undo.begin(version);
        for range in ranges {
            self.pieces_of(range)
                .for_each(|(logical, within)| self.keep(logical, within, streams - 1));
        }
        self.in_place = true;
        true
    }

    /// Whether a change of so many bytes of values may be made where they lie; one of more never is.
    pub(crate) fn may_change_in_place(&self, bytes: u64) -> bool {
        !self.power && self.is_small(bytes)
    }

    /// The same but for what is configured, which may be something else when these files are opened again.
    pub(crate) fn is_small(&self, bytes: u64) -> bool {
        let streams = 1 + self.geometry.slots as u64;
        bytes.saturating_mul(streams) <= self.geometry.undo_bytes as u64
    }

    /// What keeping these ranges and rows takes at most, however many rows are kept at a time; and the
    /// places that they lie in.
    pub(super) fn need_of<'a>(
        &self,
        ranges: &[Range<u64>],
        rows: impl Iterator<Item = (&'a Partition, &'a [u32])>,
        touched: &mut Vec<usize>,
    ) -> usize {
        let streams = 1 + self.geometry.slots;
        // Each cut, where a block ends within a range or a row, makes one piece more: a tile's head and
        // where it lies, and of each stream less than a word that fills up the last one.
        let (mut need, cut) = (0, Undo::need(1, 8, streams));
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            need += Undo::need(1, (range.end - range.start) as usize, streams);
            need += cut * self.touch(range, touched);
        }
        let block_bytes = self.geometry.block_bytes;
        for (partition, rows) in rows {
            let row_bytes = partition.row_bytes() as usize;
            need += rows.len() * Undo::need(1, row_bytes, streams);
            for &row in rows {
                match logical_block_of_row(partition, row, row_bytes, block_bytes) {
                    Some((logical, _)) if touched.last() == Some(&logical) => {}
                    Some((logical, _)) => touched.push(logical),
                    None => need += cut * self.touch(&range_of(partition, row), touched),
                }
            }
        }
        need
    }

    /// Adds the places that a range lies in; how many they are after the first.
    fn touch(&self, range: &Range<u64>, touched: &mut Vec<usize>) -> usize {
        let logical_blocks = logical_blocks_of(range, self.geometry.block_bytes);
        let after = logical_blocks.len().saturating_sub(1);
        let last = touched.last().copied();
        touched.extend(logical_blocks.filter(|&logical| last != Some(logical)));
        after
    }

    /// Keeps what a stretch of a place holds, and of those of its slots that change.
    pub(super) fn keep(&mut self, logical: usize, within: Range<usize>, slots_changed: usize) {
        let location = self.location_of(logical, within.start, slots_changed);
        self.keep_rows(&[location], within.len(), slots_changed, &[]);
    }

    /// Where something lies that starts within a place.
    fn location_of(&self, logical: usize, start: usize, slots_changed: usize) -> RowLocation {
        let slots = self.slots.as_ref().filter(|_| slots_changed > 0);
        let slot = slots.map_or(0, |slots| slots.committed_block(logical));
        RowLocation { value: self.values.committed_block(logical), slot, start: start as u32 }
    }

    /// Changes a stretch of a place where it lies; what it was has been kept.
    pub(super) fn write_committed_block(
        &mut self,
        change: Change<'_>,
        logical: usize,
        within: Range<usize>,
        input: &mut Input<'_>,
    ) {
        let location = self.location_of(logical, within.start, change.slots());
        let start = (logical * self.geometry.block_bytes + within.start) as u64;
        let looks = self.looks_at(change, location.value, &within);
        self.change_location(change, location, within.len(), input);
        if looks {
            self.look_at(change, (location.value, start), within, None);
        }
    }

    /// Changes a range in the shadows of its places.
    ///
    /// Where all of them are is looked up first. Between one block and the next nothing is done that
    /// waits for memory: the loops would stand still for longer than that takes, as what the
    /// processor had fetched ahead is used up, and it begins anew.
    pub(super) fn change_shadows(
        &mut self,
        change: Change<'_>,
        range: &Range<u64>,
        mut input: Input<'_>,
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

    /// Changes a stretch, which lies here in the layout, in the shadow of its place.
    fn change_shadow(
        &mut self,
        change: Change<'_>,
        shadow_write: &ShadowWrite,
        start: u64,
        input: &mut Input<'_>,
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
        // There is one whenever slots change.
        let slot = slot.map_or(0, |slot| slot.block);
        let location = RowLocation { value: value.block, slot, start: within.start as u32 };
        self.change_location(change, location, within.len(), input);
        // Whatever else of the block this change has made lies in the shadow only.
        let committed = self.values.committed_block(start as usize / self.geometry.block_bytes);
        self.look_at(change, (value.block, start), within, Some(committed));
    }

    /// Writes what a stretch of a block and of its slots becomes to their new shadows, and what lies
    /// beside the stretch as it was; false if the rule has no loop for that.
    fn stream(
        &mut self,
        change: Change<'_>,
        shadow_write: &ShadowWrite,
        start: u64,
        input: &mut Input<'_>,
    ) -> bool {
        let ShadowWrite { value, slot, within } = shadow_write.clone();
        let (values, values_out) =
            self.values.blocks.read_and_stream::<1>(value.from, value.block, 1, within.clone());
        let ([values], [values_out]) = (values, values_out);
        let (mut slots, mut slots_out) = Default::default();
        let mut count = 0;
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
            count = change.slots();
            let within = within.clone();
            (slots, slots_out) = pool.blocks.read_and_stream(slot.from, slot.block, count, within);
        }
        let mut shadows = ToShadows {
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
            let (behind, value) = first_made(change.written()?, Some(before), after)?;
            Some((within.start + behind, value))
        });
        self.note_overflow(start, found);
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
            // Another variable of the block may have more slots than this one.
            for part in count..pool.blocks.parts() {
                pool.blocks.stream_from(slot.from, slot.block, part, 0..block_bytes);
            }
        }
        true
    }
}

/// A stretch of a block and of its slots, the same of their shadows, and what a push has for it.
struct ToShadows<'a, 'i> {
    /// Where in the block.
    start: usize,
    values: &'a [u8],
    values_out: &'a mut [u8],
    /// How many slots change.
    count: usize,
    slots: [&'a [u8]; SLOTS_MAX],
    slots_out: [&'a mut [u8]; SLOTS_MAX],
    past_cache: bool,
    /// What of the stretch has values that may not be finite now.
    overflowed: Option<Range<usize>>,
    input: &'a mut Input<'i>,
}

impl Streams for ToShadows<'_, '_> {
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>)) {
        with_slots!(self.count, SLOTS => self.each_with::<T, SLOTS>(change));
    }
}

impl ToShadows<'_, '_> {
    /// [`Streams::each`], for so many slots at most.
    fn each_with<T: Pod, const SLOTS: usize>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>)) {
        let (start, count, past_cache) = (self.start, self.count, self.past_cache);
        self.input.each_next(start..start + self.values.len(), |within, next| {
            let within = within.start - start..within.end - start;
            let mut slots: [&[T]; SLOTS] = [&[]; SLOTS];
            let mut slots_out: [&mut [T]; SLOTS] = std::array::from_fn(|_| Default::default());
            let bytes_of = self.slots[..count].iter().zip(&mut self.slots_out);
            for ((slot, out), (from, to)) in slots.iter_mut().zip(&mut slots_out).zip(bytes_of) {
                *slot = bytemuck::cast_slice(&from[within.clone()]);
                *out = bytemuck::cast_slice_mut(&mut to[within.clone()]);
            }
            let gradient = match next {
                Next::Bytes(bytes) => GradientRun::Here(bytemuck::cast_slice(bytes)),
                Next::Shared(shared) => GradientRun::Shared(shared),
            };
            let mut overflowed = false;
            change(StreamRun {
                values: bytemuck::cast_slice(&self.values[within.clone()]),
                values_out: bytemuck::cast_slice_mut(&mut self.values_out[within.clone()]),
                slots: &slots[..count],
                slots_out: &mut slots_out[..count],
                gradient,
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
