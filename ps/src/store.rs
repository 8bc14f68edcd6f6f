//! The variables of a shard and their slots: read as a whole, changed in place.
//!
//! The values are cut into blocks. A pull pins the blocks it sends; a change to a pinned block
//! goes to a copy, so that a pull is never torn and a slow reader never holds up an update.
//!
//! Changes are made in place: a process that is killed in the middle of one leaves it half done.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, Partition, ShardLayout};
use pushpull_common::ids::PartitionId;
use pushpull_common::tensor::{DType, Element};

use crate::arena::{Arena, Blocks, Loan, Pins, Region};
use crate::error::StorageError;
use crate::optimizer::{ApplyAt, Optimizer, Run};

/// The unit that is pinned and copied. Small variables share blocks.
pub(crate) const BLOCK_BYTES: usize = 64 << 10;

/// All spare blocks are pinned: the change goes on when a pull has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoSpareBlock;

/// Variables and slots of one shard.
///
/// Invariants: `homes`, `spare` and `retired` together name every block exactly once.
#[derive(Debug)]
pub(crate) struct Store {
    catalogue: Arc<Catalogue>,
    layout: ShardLayout,
    blocks: Blocks,
    /// The block that holds each stretch of [`BLOCK_BYTES`] of the values.
    homes: Vec<u32>,
    /// Blocks nobody uses.
    spare: Vec<u32>,
    /// Blocks that were replaced while they were pinned.
    retired: Vec<u32>,
    slots: Vec<Region>,
    loan: Loan,
}

impl Store {
    /// The bytes that a shard's variables and slots take.
    pub(crate) fn need(
        layout: &ShardLayout,
        optimizer: &dyn Optimizer,
        pin_bytes_max: Option<u64>,
    ) -> u64 {
        let (homes, pinned) = block_counts(layout, pin_bytes_max);
        let slots = (optimizer.slots().len() as u64).saturating_mul(layout.bytes());
        (homes + pinned).saturating_mul(BLOCK_BYTES as u64).saturating_add(slots)
    }

    /// Maps the memory for a shard's variables and slots, zeroed. `loan` is what they and the
    /// inbox beside them have taken off the budget.
    pub(crate) fn create(
        arena: &Arena,
        loan: Loan,
        catalogue: Arc<Catalogue>,
        layout: ShardLayout,
        optimizer: &dyn Optimizer,
        pin_bytes_max: Option<u64>,
    ) -> Result<Store, StorageError> {
        let (homes, pinned) = block_counts(&layout, pin_bytes_max);
        let blocks = arena.blocks("values", BLOCK_BYTES, (homes + pinned) as usize)?;
        let bytes = layout.bytes() as usize;
        let slots = (0..optimizer.slots().len())
            .map(|i| arena.region(&format!("slot-{i}"), bytes, i + 1))
            .collect::<Result<Vec<_>, _>>()?;
        let mut store = Store {
            catalogue,
            layout,
            blocks,
            homes: (0..homes as u32).collect(),
            spare: (homes as u32..(homes + pinned) as u32).collect(),
            retired: Vec::new(),
            slots,
            loan,
        };
        store.fill_slots(optimizer);
        Ok(store)
    }

    /// The names of the files a store makes, so that a replaced one can be cleared.
    pub(crate) fn files(optimizer: &dyn Optimizer) -> Vec<String> {
        let slots = (0..optimizer.slots().len()).map(|i| format!("slot-{i}"));
        std::iter::once("values".to_owned()).chain(slots).collect()
    }

    pub(crate) fn catalogue(&self) -> &Arc<Catalogue> {
        &self.catalogue
    }

    /// The bytes reserved for the shard.
    pub(crate) fn reserved(&self) -> u64 {
        self.loan.bytes()
    }

    /// Whether these ranges can be changed whole with the memory that is free now. As long as
    /// nothing more is pinned it stays so.
    pub(crate) fn can_change(&self, ranges: &[Range<u64>]) -> bool {
        let free = self.retired.iter().filter(|&&block| !self.blocks.is_pinned(block)).count();
        let pinned = ranges
            .iter()
            .flat_map(blocks_of)
            .filter(|&block| self.blocks.is_pinned(self.homes[block as usize]));
        // Two ranges may share a block; that counts it twice, which errs on the safe side.
        pinned.count() <= self.spare.len() + free
    }

    pub(crate) fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// Pins the values of these ranges, in bytes of the shard's variables, as they are now.
    pub(crate) fn snapshot(&self, ranges: &[Range<u64>]) -> Snapshot {
        let mut logical = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let blocks = blocks_of(range);
            let next = logical.last().map_or(0, |&block: &u32| block + 1);
            logical.extend(blocks.start.max(next)..blocks.end);
        }
        let pins = self.blocks.pin(logical.iter().map(|&b| self.homes[b as usize]).collect());
        Snapshot { pins, logical }
    }

    /// Changes a trainable partition by its gradient; `range` lies within the partition.
    pub(crate) fn apply(
        &mut self,
        optimizer: &dyn Optimizer,
        at: ApplyAt,
        dtype: DType,
        range: Range<u64>,
        gradient: &[u8],
    ) -> Result<(), NoSpareBlock> {
        self.each_block(range, gradient, |values, slots, gradient| match dtype {
            DType::F32 => apply_run::<f32>(values, slots, gradient, |run| {
                optimizer.apply_f32(at, run);
            }),
            DType::F64 => apply_run::<f64>(values, slots, gradient, |run| {
                optimizer.apply_f64(at, run);
            }),
            _ => unreachable!("only floating-point variables are trainable"),
        })
    }

    /// Gives the range new values.
    pub(crate) fn assign(&mut self, range: Range<u64>, bytes: &[u8]) -> Result<(), NoSpareBlock> {
        self.each_block(range, bytes, |values, _, bytes| values.copy_from_slice(bytes))
    }

    /// Adds to the range, which lies within one partition; integers wrap.
    pub(crate) fn add(
        &mut self,
        dtype: DType,
        range: Range<u64>,
        bytes: &[u8],
    ) -> Result<(), NoSpareBlock> {
        self.each_block(range, bytes, |values, _, bytes| match dtype {
            DType::F32 => add_run::<f32>(values, bytes, |a, b| a + b),
            DType::F64 => add_run::<f64>(values, bytes, |a, b| a + b),
            DType::I64 => add_run::<i64>(values, bytes, i64::wrapping_add),
            _ => unreachable!("a catalogue holds known types only"),
        })
    }

    /// Gives the partition the initial values its variable's specification says, from the
    /// `done`-th element on and for one block's worth of elements; returns how many are done.
    pub(crate) fn initialize(&mut self, index: usize, done: u64) -> Result<u64, NoSpareBlock> {
        let partition = self.layout.partitions()[index].clone();
        let count = (partition.elements.end - partition.elements.start - done)
            .min((BLOCK_BYTES / 8) as u64);
        // Words of 8 bytes, so that the buffer is aligned for every type.
        let length = count as usize * partition.dtype.size();
        let mut words = vec![0_u64; length.div_ceil(8)];
        let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..length];
        let id = partition.variable;
        let first = partition.elements.start + done;
        match partition.dtype {
            DType::F32 => self.catalogue.fill(id, first, as_elements::<f32>(bytes)),
            DType::F64 => self.catalogue.fill(id, first, as_elements::<f64>(bytes)),
            DType::I64 => self.catalogue.fill(id, first, as_elements::<i64>(bytes)),
            _ => unreachable!("a catalogue holds known types only"),
        }
        let start = partition.offset + done * partition.dtype.size() as u64;
        self.assign(start..start + bytes.len() as u64, bytes)?;
        Ok(done + count)
    }

    /// The partitions that a selection names, as ranges in rising order; the culprit otherwise.
    pub(crate) fn select(&self, ids: &[PartitionId]) -> Result<Vec<Range<u64>>, PartitionId> {
        let mut ranges: Vec<Range<u64>> = Vec::with_capacity(ids.len());
        for &id in ids {
            let partition = self.partition(id).ok_or(id)?;
            match ranges.last_mut() {
                Some(last) if last.end == partition.offset => last.end = partition.end(),
                Some(last) if last.end > partition.offset => return Err(id),
                _ => ranges.push(partition.offset..partition.end()),
            }
        }
        Ok(ranges)
    }

    fn partition(&self, id: PartitionId) -> Option<&Partition> {
        let partitions = self.layout.partitions();
        let index = partitions.binary_search_by_key(&id, |partition| partition.id).ok()?;
        Some(&partitions[index])
    }

    fn fill_slots(&mut self, optimizer: &dyn Optimizer) {
        for (region, spec) in self.slots.iter_mut().zip(optimizer.slots()) {
            // A mapped file starts as zeros: nothing to touch.
            if spec.initial == 0.0 {
                continue;
            }
            for partition in self.layout.partitions() {
                let range =
                    partition.offset as usize..(partition.offset + partition.bytes) as usize;
                let bytes = &mut region.bytes_mut()[range];
                match partition.dtype {
                    DType::F32 => bytemuck::cast_slice_mut(bytes).fill(spec.initial as f32),
                    DType::F64 => bytemuck::cast_slice_mut(bytes).fill(spec.initial),
                    _ => {}
                }
            }
        }
    }

    /// Calls `change` with each block's part of the range: values, slots, and input.
    fn each_block(
        &mut self,
        range: Range<u64>,
        input: &[u8],
        mut change: impl FnMut(&mut [u8], &mut [&mut [u8]], &[u8]),
    ) -> Result<(), NoSpareBlock> {
        let (mut start, end) = (range.start as usize, range.end as usize);
        // All blocks first, then the change: it is made whole or not at all.
        for block in start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES) {
            self.make_writable(block)?;
        }
        let mut input = input;
        while start < end {
            let block = start / BLOCK_BYTES;
            let stop = end.min((block + 1) * BLOCK_BYTES);
            let (head, rest) = input.split_at(stop - start);
            let within = start - block * BLOCK_BYTES..stop - block * BLOCK_BYTES;
            let values = &mut self.blocks.write(self.homes[block])[within];
            let mut slots: Vec<&mut [u8]> =
                self.slots.iter_mut().map(|slot| &mut slot.bytes_mut()[start..stop]).collect();
            change(values, &mut slots, head);
            (start, input) = (stop, rest);
        }
        Ok(())
    }

    /// Moves a block that somebody reads to a spare one.
    fn make_writable(&mut self, block: usize) -> Result<(), NoSpareBlock> {
        let home = self.homes[block];
        if !self.blocks.is_pinned(home) {
            return Ok(());
        }
        if self.spare.is_empty() {
            let (pinned, free) = self.retired.iter().partition(|&&b| self.blocks.is_pinned(b));
            (self.retired, self.spare) = (pinned, free);
        }
        let spare = self.spare.pop().ok_or(NoSpareBlock)?;
        let values = self.blocks.read(home).to_vec();
        self.blocks.write(spare).copy_from_slice(&values);
        self.homes[block] = spare;
        self.retired.push(home);
        Ok(())
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn check_invariants(&self) {
        let mut all: Vec<u32> =
            self.homes.iter().chain(&self.spare).chain(&self.retired).copied().collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..all.len() as u32), "every block once: {all:?}");
    }
}

/// The blocks that hold the values, and the spare ones beside them.
fn block_counts(layout: &ShardLayout, pin_bytes_max: Option<u64>) -> (u64, u64) {
    let blocks = |bytes: u64| bytes.div_ceil(BLOCK_BYTES as u64);
    let bytes = layout.bytes();
    (blocks(bytes), blocks(pin_bytes_max.unwrap_or(bytes)).max(1))
}

/// The blocks that a range lies in.
fn blocks_of(range: &Range<u64>) -> Range<u32> {
    let first = range.start / BLOCK_BYTES as u64;
    let end = range.end.div_ceil(BLOCK_BYTES as u64);
    first as u32..end.max(first) as u32
}

fn apply_run<T: Element>(
    values: &mut [u8],
    slots: &mut [&mut [u8]],
    gradient: &[u8],
    rule: impl FnOnce(Run<'_, T>),
) {
    let mut slots: Vec<&mut [T]> =
        slots.iter_mut().map(|slot| bytemuck::cast_slice_mut(slot)).collect();
    rule(Run {
        values: bytemuck::cast_slice_mut(values),
        slots: &mut slots,
        gradient: bytemuck::cast_slice(gradient),
    });
}

fn as_elements<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

fn add_run<T: Element>(values: &mut [u8], bytes: &[u8], add: impl Fn(T, T) -> T) {
    let values: &mut [T] = bytemuck::cast_slice_mut(values);
    for (value, &more) in values.iter_mut().zip(bytemuck::cast_slice::<u8, T>(bytes)) {
        *value = add(*value, more);
    }
}

/// Values as they were at one version, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pins: Pins,
    /// Which stretch of the values each pinned block holds, in rising order.
    logical: Vec<u32>,
}

impl Snapshot {
    /// Appends the bytes of a range that was asked for, as slices in order.
    pub(crate) fn slices<'a>(&'a self, range: Range<u64>, out: &mut Vec<IoSlice<'a>>) {
        let block_bytes = self.pins.block_bytes();
        let (mut start, end) = (range.start as usize, range.end as usize);
        if start == end {
            return;
        }
        let first = (start / block_bytes) as u32;
        let mut index = self.logical.partition_point(|&block| block < first);
        while start < end {
            let base = self.logical[index] as usize * block_bytes;
            let stop = end.min(base + block_bytes);
            out.push(IoSlice::new(&self.pins.read(index)[start - base..stop - base]));
            start = stop;
            index += 1;
        }
    }
}

#[cfg(test)]
mod tests;
