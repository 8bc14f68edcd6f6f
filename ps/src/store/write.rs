//! How a change reaches blocks: into shadows, or where the values lie beside what they were.

use std::ops::Range;

use super::pool::{NoSpareBlock, Shadow};
use super::{Change, SLOTS_MAX, Store};
use crate::arena::SKEW_BYTES;
use crate::zoo::Bug;

/// Rows that are fetched ahead of the one that is read: they lie far apart, and nothing else would
/// have the processor wait for several of them at a time.
pub(super) const AHEAD: usize = 8;

/// These places without those that are named again and again, as by rows that rise.
pub(super) fn distinct(places: impl Iterator<Item = usize>) -> impl Iterator<Item = usize> {
    let mut last = usize::MAX;
    places.filter(move |&place| std::mem::replace(&mut last, place) != place)
}

impl Store {
    /// Keeps what these ranges hold, if they are few enough bytes that changing them where they lie
    /// is cheaper than copying their blocks, and nobody reads those.
    pub(super) fn begin_in_place(&mut self, ranges: &[Range<u64>], version: u64) -> bool {
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let blocks = distinct(ranges.iter().flat_map(|range| self.places_of(range))).count();
        let streams = 1 + self.geometry.slots as u64;
        let worth_it = bytes.saturating_mul(8) < (blocks * self.geometry.block_bytes) as u64;
        if self.power
            || !worth_it
            || bytes.saturating_mul(streams) > self.geometry.undo_bytes as u64
        {
            return false;
        }
        let block_bytes = self.geometry.block_bytes;
        let mut touched = Vec::new();
        for (index, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
            if let Some(later) = ranges.get(index + AHEAD) {
                self.fetch(later, true);
            }
            for place in self.places_of(range) {
                let base = (place * block_bytes) as u64;
                let start = (range.start.max(base) - base) as usize;
                let end = (range.end.min(base + block_bytes as u64) - base) as usize;
                if !self.keep(place, start..end) {
                    self.undo.clear();
                    return false;
                }
                if touched.last() != Some(&place) {
                    touched.push(place);
                }
            }
        }
        touched.sort_unstable();
        touched.dedup();
        self.in_place = Some(touched);
        if !self.zoo.has(Bug::UndoAfterWrite) {
            self.undo.prepare(version);
        }
        true
    }

    /// Keeps what a stretch of a place holds, of values and slots; false if that cannot be.
    fn keep(&mut self, place: usize, within: Range<usize>) -> bool {
        if self.values.home_is_pinned(place) {
            return false;
        }
        let home = self.values.home(place);
        let bytes = &self.values.blocks.read(home)[within.clone()];
        let mut kept = self.undo.keep(0, home, within.start as u32, bytes);
        if let Some(slots) = &self.slots {
            let home = slots.home(place);
            kept &= !slots.home_is_pinned(place);
            for slot in 0..self.geometry.slots {
                let first = slot * (self.geometry.block_bytes + SKEW_BYTES) + within.start;
                let bytes = &slots.blocks.read(home)[first..first + within.len()];
                kept = kept && self.undo.keep(1, home, first as u32, bytes);
            }
        }
        kept
    }

    pub(super) fn change_shadow(
        &mut self,
        change: Change<'_>,
        place: usize,
        within: Range<usize>,
        input: &[u8],
    ) -> Result<(), NoSpareBlock> {
        let value = self.values.shadow(place)?;
        let slot = match &mut self.slots {
            Some(slots) if change.slots() > 0 => Some(slots.shadow(place)?),
            _ => None,
        };
        let fresh = value.block != value.from && slot.is_none_or(|slot| slot.block != slot.from);
        if fresh && self.stream(change, value, slot, within.clone(), input) {
            return Ok(());
        }
        for (pool, shadow) in [(Some(&mut self.values), Some(value)), (self.slots.as_mut(), slot)] {
            if let (Some(pool), Some(Shadow { block, from })) = (pool, shadow)
                && block != from
            {
                let (from, to) = pool.blocks.read_and_write(from, block);
                to.copy_from_slice(from);
            }
        }
        self.change_block(change, value.block, slot.map(|slot| slot.block), within, input);
        Ok(())
    }

    /// Changes a stretch of a block, and of the block of its slots, where it lies.
    pub(super) fn change_block(
        &mut self,
        change: Change<'_>,
        value: u32,
        slot: Option<u32>,
        within: Range<usize>,
        input: &[u8],
    ) {
        let values = &mut self.values.blocks.write(value)[within.clone()];
        let mut slots: [&mut [u8]; SLOTS_MAX] = Default::default();
        let mut count = 0;
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot.filter(|_| change.slots() > 0)) {
            let stride = self.geometry.block_bytes + SKEW_BYTES;
            let all = pool.blocks.write(slot).chunks_mut(stride);
            for (slot, bytes) in slots.iter_mut().zip(all).take(change.slots()) {
                *slot = &mut bytes[within.clone()];
                count += 1;
            }
        }
        change.in_place(values, &mut slots[..count], input);
    }

    /// Writes what a stretch of a block and of its slots becomes to their new shadows, and what lies
    /// beside the stretch as it was; false if the rule has no loop for that.
    fn stream(
        &mut self,
        change: Change<'_>,
        value: Shadow,
        slot: Option<Shadow>,
        within: Range<usize>,
        input: &[u8],
    ) -> bool {
        let block_bytes = self.geometry.block_bytes;
        let stride = block_bytes + SKEW_BYTES;
        let (values, values_out) =
            self.values.blocks.read_and_stream(value.from, value.block, within.clone());
        let mut slots: [&[u8]; SLOTS_MAX] = Default::default();
        let mut slots_out: [&mut [u8]; SLOTS_MAX] = Default::default();
        let mut count = 0;
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
            let all = 0..pool.blocks.block_bytes();
            let (from, out) = pool.blocks.read_and_stream(slot.from, slot.block, all);
            let all = from.chunks(stride).zip(out.chunks_mut(stride));
            for (from, out) in all.take(change.slots()) {
                (slots[count], slots_out[count]) =
                    (&from[within.clone()], &mut out[within.clone()]);
                count += 1;
            }
        }
        let (slots, slots_out) = (&slots[..count], &mut slots_out[..count]);
        if !change.streamed(self.past_cache, values, values_out, slots, slots_out, input) {
            return false;
        }
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
            // Another variable of the block may have more slots than this one.
            let others = count * stride..pool.blocks.block_bytes();
            pool.blocks.stream_from(slot.from, slot.block, others);
        }
        for rest in [0..within.start, within.end..block_bytes] {
            self.values.blocks.stream_from(value.from, value.block, rest.clone());
            if let (Some(pool), Some(slot)) = (&mut self.slots, slot) {
                for first in (0..count).map(|index| index * stride) {
                    let rest = first + rest.start..first + rest.end;
                    pool.blocks.stream_from(slot.from, slot.block, rest);
                }
            }
        }
        true
    }
}
