//! The variables of a shard and their slots: read as a whole, changed by commits.
//!
//! Values and slots are cut into blocks. A change writes shadow blocks, or keeps what a few rows
//! were and changes them where they lie; either becomes visible with the commit and is nothing
//! before it. A pull pins the blocks it sends: it is of one version, and holds no change up.

mod change;
mod image;
mod pool;
mod undo;

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pushpull_common::catalogue::{Catalogue, Partition, ShardLayout};
use pushpull_common::ids::PartitionId;
use pushpull_common::tensor::{DType, Element};

use crate::arena::{Arena, Blocks, Grid, Loan, Pins, SKEW_BYTES, fence, file_name};
use crate::checkpoint::Stream;
use crate::commit::{Address, Journal, offset_of};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::optimizer::Optimizer;
use crate::zoo::{Bug, Zoo};
pub(crate) use change::Change;
pub(crate) use image::Image;
pub(crate) use pool::NoSpareBlock;
use pool::{Pool, Shadow};
#[cfg(test)]
pub(crate) use undo::reseal as reseal_undo;
use undo::{Row, UNDO_BYTES, Undo};

/// The unit of a commit. Small variables share blocks.
pub(crate) const BLOCK_BYTES: usize = 64 << 10;

/// The largest block that an arena may have.
const BLOCK_BYTES_MAX: usize = 1 << 30;

/// The most slots a rule may keep.
pub(crate) const SLOTS_MAX: usize = 8;

/// Up to so many bytes of values and slots a model and its shadows stay in cache, and are written
/// through it. Non-temporal stores would put out what the next push reads.
pub(crate) const CACHED_BYTES_MAX: u64 = 16 << 20;

/// What the memory of a store depends on beside the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// The bytes of a block.
    pub(crate) block_bytes: usize,
    /// The slots of the optimizer.
    pub(crate) slots: usize,
    /// Blocks that hold the values or the slots.
    pub(crate) places: usize,
    /// Spare blocks that may be pinned while a push needs as many as it changes.
    pub(crate) pinned: usize,
}

impl Geometry {
    pub(crate) fn new(
        layout: &ShardLayout,
        slots: usize,
        block_bytes: usize,
        pin_bytes_max: Option<u64>,
    ) -> Geometry {
        let places = layout.bytes().div_ceil(block_bytes as u64);
        let pinned = pin_bytes_max.unwrap_or(layout.bytes()).div_ceil(block_bytes as u64);
        let (places, pinned) = (places as usize, pinned.max(1) as usize);
        Geometry { block_bytes, slots, places, pinned }
    }

    /// The geometry that the words of an arena say, if it is one: blocks that whole elements fill
    /// and block numbers reach.
    pub(crate) fn of_words(
        layout: &ShardLayout,
        slots: usize,
        block_bytes: usize,
        pinned: usize,
    ) -> Option<Geometry> {
        let sound = (8..=BLOCK_BYTES_MAX).contains(&block_bytes) && block_bytes.is_multiple_of(8);
        if !sound || slots > SLOTS_MAX {
            return None;
        }
        let places = usize::try_from(layout.bytes().div_ceil(block_bytes as u64)).ok()?;
        let blocks = places.checked_mul(2)?.checked_add(pinned)?;
        let reached = pinned > 0 && u32::try_from(blocks).is_ok();
        reached.then_some(Geometry { block_bytes, slots, places, pinned })
    }

    fn values(&self) -> Grid {
        Grid {
            offset: PAGE_BYTES,
            block_bytes: self.block_bytes,
            stride: self.block_bytes + SKEW_BYTES,
            count: 2 * self.places + self.pinned,
        }
    }

    /// The slots of a place lie in one block of their own, skewed against each other.
    fn slots(&self) -> Grid {
        let block_bytes = self.slots * (self.block_bytes + SKEW_BYTES);
        // One more skew: the slots of a place and of its shadow do not meet either.
        let (stride, count) = (block_bytes + SKEW_BYTES, 2 * self.places + self.pinned);
        Grid {
            offset: PAGE_BYTES,
            block_bytes,
            stride,
            count: if self.slots > 0 { count } else { 0 },
        }
    }

    /// The words of the tables that say where each block is.
    pub(crate) fn table_words(&self) -> usize {
        self.places * if self.slots > 0 { 2 } else { 1 }
    }

    /// The bytes of memory that the store takes.
    pub(crate) fn need(&self) -> u64 {
        let undo = Undo::BYTES + PAGE_BYTES as u64;
        self.values().need().saturating_add(self.slots().need()).saturating_add(undo)
    }

    /// What the tables hold before anything is changed.
    pub(crate) fn first_table(&self) -> impl Iterator<Item = u64> {
        let (places, slots) =
            (self.places as u64, if self.slots > 0 { self.places as u64 } else { 0 });
        (0..places).chain(0..slots)
    }
}

/// Variables and slots of one shard.
///
/// A change is made in steps: [`Store::begin`], then the ranges of the push one by one, then
/// [`Store::publish`] into a transaction, and [`Store::committed`] when that is made; or
/// [`Store::discard`].
///
/// Invariant: what the committed tables name is changed only while what it was is kept.
#[derive(Debug)]
pub(crate) struct Store {
    catalogue: Arc<Catalogue>,
    layout: ShardLayout,
    geometry: Geometry,
    values: Pool,
    slots: Option<Pool>,
    undo: Undo,
    /// If the change under way is made where the values lie: the places it touches, of the values
    /// and of the slots.
    in_place: Option<Vec<(bool, usize)>>,
    /// Whether shadows are written past the cache.
    past_cache: bool,
    /// Whether the tables hold a checksum of every block.
    integrity: bool,
    /// Whether a loss of power is survived: nothing that an image names is changed in place.
    power: bool,
    loan: Loan,
    zoo: Zoo,
}

/// What opens or creates a store.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) arena: Arena,
    pub(crate) generation: u64,
    pub(crate) catalogue: Arc<Catalogue>,
    pub(crate) layout: ShardLayout,
    pub(crate) geometry: Geometry,
    /// Whether the tables hold a checksum of every block.
    pub(crate) integrity: bool,
    /// A model of more bytes of values and slots is written past the cache.
    pub(crate) cached_bytes_max: u64,
    /// Whether blocks wait for images of the tables.
    pub(crate) power: bool,
    pub(crate) zoo: Zoo,
}

impl Plan {
    fn corrupt(&self, kind: Kind, fault: Fault) -> StorageError {
        self.arena.place.corrupt(&file_name(kind, self.generation), fault)
    }

    /// A pool over a file that is made or opened.
    fn pool(
        &self,
        kind: Kind,
        grid: Grid,
        homes: Vec<u32>,
        file: impl FnOnce(Kind, u64) -> Result<crate::arena::Memory, StorageError>,
    ) -> Result<Pool, StorageError> {
        let memory = file(kind, grid.need() - PAGE_BYTES as u64)?;
        Ok(Pool::new(Blocks::new(memory, grid), grid.count as u32, homes))
    }
}

impl Store {
    /// Maps the memory for a shard's variables and slots, zeroed; the slots start as the optimizer
    /// says. `loan` is what they and all beside them have taken off the budget.
    pub(crate) fn create(
        plan: Plan,
        loan: Loan,
        optimizer: &dyn Optimizer,
    ) -> Result<Store, StorageError> {
        let make = |kind, bytes| plan.arena.create(kind, plan.generation, bytes);
        let homes = || (0..plan.geometry.places as u32).collect();
        let values = plan.pool(Kind::Values, plan.geometry.values(), homes(), make)?;
        let slots = match plan.geometry.slots {
            0 => None,
            _ => Some(plan.pool(Kind::Slots, plan.geometry.slots(), homes(), make)?),
        };
        let undo = Undo::create(make(Kind::Undo, Undo::BYTES)?);
        let mut store = Store::new(plan, loan, values, slots, undo);
        store.fill_slots(optimizer);
        fence();
        Ok(store)
    }

    /// Opens what an earlier process left, by tables that are verified; puts back what a change
    /// that was not committed had changed in place. `version` is that of the last commit.
    pub(crate) fn open(
        plan: Plan,
        loan: Loan,
        journal: &Journal,
        version: u64,
    ) -> Result<Store, StorageError> {
        let find = |kind, bytes| plan.arena.open(kind, plan.generation, Some(bytes));
        let homes = |first: usize, grid: Grid| {
            table(journal, first, plan.geometry.places, grid.count)
                .map_err(|fault| plan.corrupt(Kind::Tables, fault))
        };
        let grid = plan.geometry.values();
        let values = plan.pool(Kind::Values, grid, homes(0, grid)?, find)?;
        let slots = match plan.geometry.slots {
            0 => None,
            _ => {
                let grid = plan.geometry.slots();
                let homes = homes(plan.geometry.places, grid)?;
                Some(plan.pool(Kind::Slots, grid, homes, find)?)
            }
        };
        let undo = Undo::open(find(Kind::Undo, Undo::BYTES)?);
        let rows = undo.rows(version).and_then(|rows| check_rows(rows, &plan.geometry));
        let rows = rows.map_err(|fault| plan.corrupt(Kind::Undo, fault))?;
        let mut store = Store::new(plan, loan, values, slots, undo);
        store.put_back(&rows);
        if store.power {
            store.values.hold_spares();
            store.slots.iter_mut().for_each(Pool::hold_spares);
        }
        Ok(store)
    }

    fn new(plan: Plan, loan: Loan, values: Pool, slots: Option<Pool>, undo: Undo) -> Store {
        let Plan { catalogue, layout, geometry, integrity, cached_bytes_max, power, zoo, .. } =
            plan;
        let streams = 1 + geometry.slots;
        let past_cache = layout.bytes().saturating_mul(streams as u64) > cached_bytes_max;
        let in_place = None;
        Store {
            catalogue,
            layout,
            geometry,
            values,
            slots,
            undo,
            in_place,
            past_cache,
            integrity,
            power,
            loan,
            zoo,
        }
    }

    pub(crate) fn catalogue(&self) -> &Arc<Catalogue> {
        &self.catalogue
    }

    /// Whether the tables hold a checksum of every block.
    pub(crate) fn has_integrity(&self) -> bool {
        self.integrity
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The bytes reserved for the shard.
    pub(crate) fn reserved(&self) -> u64 {
        self.loan.bytes()
    }

    pub(crate) fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// Pins the values of these ranges, in bytes of the shard's variables, as they are now.
    pub(crate) fn snapshot(&self, ranges: &[Range<u64>]) -> Snapshot {
        let mut logical = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let places = self.places_of(range);
            let next = logical.last().map_or(0, |&place: &u32| place + 1);
            logical.extend((places.start as u32).max(next)..places.end as u32);
        }
        let pins = self.values.pin(logical.iter().copied());
        Snapshot { pins, logical, block_bytes: self.geometry.block_bytes }
    }

    /// Pins values and slots as they are now, to be written to a checkpoint until somebody says that
    /// it is given up.
    pub(crate) fn image(&self, given_up: Arc<AtomicBool>) -> Image {
        let places = 0..self.geometry.places as u32;
        let slots = self.slots.as_ref().map(|slots| slots.pin(places.clone()));
        Image { geometry: self.geometry, values: self.values.pin(places), slots, given_up }
    }

    /// Prepares the change of these ranges, which makes `version`. What was drafted of another
    /// change is forgotten.
    pub(crate) fn begin(
        &mut self,
        ranges: &[Range<u64>],
        version: u64,
    ) -> Result<(), NoSpareBlock> {
        self.discard();
        if self.begin_in_place(ranges, version) {
            return Ok(());
        }
        self.can_change(ranges)
    }

    /// Whether these ranges can be changed whole with the memory that is free now. It stays so,
    /// because nothing but changes takes spare blocks.
    pub(crate) fn can_change(&mut self, ranges: &[Range<u64>]) -> Result<(), NoSpareBlock> {
        let block_bytes = self.geometry.block_bytes;
        // Two ranges may share a block; that counts it twice, which errs on the safe side, as far
        // as there are places at all.
        let places = || {
            let places = ranges.iter().filter(|range| !range.is_empty());
            places.flat_map(|range| places_of(range, block_bytes))
        };
        let enough = |pool: &mut Pool| {
            let need = pool.undrafted(places()).min(pool.places());
            need <= pool.spare()
        };
        let slots = self.slots.as_mut().is_none_or(enough);
        if enough(&mut self.values) && slots { Ok(()) } else { Err(NoSpareBlock) }
    }

    /// Changes a range, which lies within one partition, by bytes of the push.
    pub(crate) fn change(
        &mut self,
        change: Change<'_>,
        range: Range<u64>,
        input: &[u8],
    ) -> Result<(), NoSpareBlock> {
        let block_bytes = self.geometry.block_bytes;
        let (mut start, end) = (range.start as usize, range.end as usize);
        let mut input = input;
        while start < end {
            let place = start / block_bytes;
            let stop = end.min((place + 1) * block_bytes);
            let (head, rest) = input.split_at(stop - start);
            let within = start - place * block_bytes..stop - place * block_bytes;
            match self.in_place {
                Some(_) => {
                    let value = self.values.home(place);
                    let slot = self.slots.as_ref().map(|slots| slots.home(place));
                    self.change_block(change, value, slot, within, head);
                }
                None => self.change_shadow(change, place, within, head)?,
            }
            (start, input) = (stop, rest);
        }
        Ok(())
    }

    /// Puts the change into a transaction of the journal and lets it be read: what is read before
    /// the transaction is made must not leave the shard.
    pub(crate) fn publish(&mut self, journal: &mut Journal) {
        if let Some(rows) = &self.in_place {
            for (slots, place) in rows.iter().copied().filter(|_| self.integrity) {
                self.stage(journal, slots, place);
            }
        }
        let drafted: Vec<(bool, usize)> = [Some(&self.values), self.slots.as_ref()]
            .into_iter()
            .zip([false, true])
            .flat_map(|(pool, slots)| {
                pool.into_iter().flat_map(move |pool| pool.drafted().map(move |at| (slots, at.0)))
            })
            .collect();
        self.values.publish();
        self.slots.iter_mut().for_each(Pool::publish);
        for (slots, place) in drafted {
            self.stage(journal, slots, place);
        }
        if self.zoo.has(Bug::ReuseBeforeCommit) {
            self.committed();
        }
    }

    /// The transaction is made: what the change replaced is free.
    pub(crate) fn committed(&mut self) {
        self.values.committed(self.power);
        self.slots.iter_mut().for_each(|slots| slots.committed(self.power));
        if self.in_place.take().is_some() {
            self.undo.clear();
        }
    }

    /// An image of the tables is being written: what it names is not written again before the next
    /// one is.
    pub(crate) fn image_begun(&mut self) {
        self.values.image_begun();
        self.slots.iter_mut().for_each(Pool::image_begun);
    }

    /// The image is on the disk: what only older ones named is free.
    pub(crate) fn image_written(&mut self) {
        self.values.image_written();
        self.slots.iter_mut().for_each(Pool::image_written);
    }

    /// Forgets the change under way.
    ///
    /// # Panics
    /// If it is being made in place: such a change is made whole in one go.
    pub(crate) fn discard(&mut self) {
        assert!(self.in_place.is_none(), "a change in place is not given up");
        self.values.discard();
        self.slots.iter_mut().for_each(Pool::discard);
    }

    /// Stages where a place is, and the checksum of what it holds.
    fn stage(&self, journal: &mut Journal, slots: bool, place: usize) {
        let (pool, first) = match (&self.slots, slots) {
            (Some(pool), true) => (pool, self.geometry.places),
            _ => (&self.values, 0),
        };
        let home = pool.home(place);
        let crc = if self.integrity { crc32c::crc32c(pool.blocks.read(home)) } else { 0 };
        journal.stage(Address::Tables(first + place), u64::from(home) | u64::from(crc) << 32);
    }

    /// Stages the checksums of all blocks, once they hold their first values.
    pub(crate) fn seal(&self, journal: &mut Journal) {
        for slots in [false, true].into_iter().filter(|&slots| !slots || self.slots.is_some()) {
            (0..self.geometry.places).for_each(|place| self.stage(journal, slots, place));
        }
    }

    /// Compares every block with its checksum in the tables.
    pub(crate) fn verify(&self, journal: &Journal) -> Result<(), (Kind, Fault)> {
        let pools = [(Kind::Values, Some(&self.values)), (Kind::Slots, self.slots.as_ref())];
        for (index, (kind, pool)) in pools.into_iter().enumerate() {
            let Some(pool) = pool else { continue };
            for place in 0..pool.places() {
                let word = journal.load(Address::Tables(index * self.geometry.places + place));
                let expected = (word >> 32) as u32;
                let found = crc32c::crc32c(pool.blocks.read(pool.home(place)));
                if expected != found {
                    let offset = pool.blocks.offset(pool.home(place));
                    let what = format!("a block of checksum {expected:#x}, not {found:#x}");
                    return Err((kind, Fault::at(offset, what)));
                }
            }
        }
        Ok(())
    }

    /// Gives the partition the initial values its variable's specification says, from the
    /// `done`-th element on and for one block's worth of elements; returns how many are done.
    ///
    /// Nobody reads them before the shard is ready, so they are written where they belong.
    pub(crate) fn initialize(&mut self, index: usize, done: u64) -> u64 {
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
        self.write_home(Stream::Values, start, bytes);
        done + count
    }

    /// Writes values, or what a slot holds, where they belong by the last commit. For what nobody can
    /// read yet.
    pub(crate) fn write_home(&mut self, stream: Stream, start: u64, bytes: &[u8]) {
        let block_bytes = self.geometry.block_bytes;
        let (pool, first) = match (stream, &mut self.slots) {
            (Stream::Values, _) => (&mut self.values, 0),
            (Stream::Slot(slot), Some(slots)) => (slots, slot * (block_bytes + SKEW_BYTES)),
            (Stream::Slot(_), None) => return,
        };
        let (mut start, mut bytes) = (start as usize, bytes);
        while !bytes.is_empty() {
            let (place, within) = (start / block_bytes, start % block_bytes);
            let (head, rest) = bytes.split_at(bytes.len().min(block_bytes - within));
            let (home, within) = (pool.home(place), first + within);
            pool.blocks.write(home)[within..within + head.len()].copy_from_slice(head);
            (start, bytes) = (start + head.len(), rest);
        }
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

    fn places_of(&self, range: &Range<u64>) -> Range<usize> {
        places_of(range, self.geometry.block_bytes)
    }

    fn fill_slots(&mut self, optimizer: &dyn Optimizer) {
        let Some(slots) = &mut self.slots else { return };
        let block_bytes = self.geometry.block_bytes;
        for (index, spec) in optimizer.slots().iter().enumerate() {
            // A mapped file starts as zeros: nothing to touch.
            if spec.initial == 0.0 {
                continue;
            }
            for partition in self.layout.partitions() {
                let range = partition.offset..partition.offset + partition.bytes;
                for place in places_of(&range, block_bytes) {
                    let base = (place * block_bytes) as u64;
                    let start = range.start.max(base) - base;
                    let end = range.end.min(base + block_bytes as u64) - base;
                    let first = index * (block_bytes + SKEW_BYTES);
                    let home = slots.home(place);
                    let bytes =
                        &mut slots.blocks.write(home)[first + start as usize..first + end as usize];
                    match partition.dtype {
                        DType::F32 => bytemuck::cast_slice_mut(bytes).fill(spec.initial as f32),
                        DType::F64 => bytemuck::cast_slice_mut(bytes).fill(spec.initial),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Keeps what these ranges hold, if they are few enough bytes that changing them where they lie
    /// is cheaper than copying their blocks, and nobody reads those.
    fn begin_in_place(&mut self, ranges: &[Range<u64>], version: u64) -> bool {
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let blocks: usize = ranges.iter().map(|range| self.places_of(range).len()).sum();
        let streams = 1 + self.geometry.slots as u64;
        let worth_it = bytes.saturating_mul(8) < (blocks * self.geometry.block_bytes) as u64;
        if self.power || !worth_it || bytes.saturating_mul(streams) > UNDO_BYTES as u64 {
            return false;
        }
        let block_bytes = self.geometry.block_bytes;
        let mut touched = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            for place in self.places_of(range) {
                let base = (place * block_bytes) as u64;
                let start = (range.start.max(base) - base) as usize;
                let end = (range.end.min(base + block_bytes as u64) - base) as usize;
                if !self.keep(place, start..end) {
                    self.undo.clear();
                    return false;
                }
                touched.push((false, place));
                touched.extend(self.slots.iter().map(|_| (true, place)));
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

    /// Puts back what rows held; they are rows of this store, whose checksum is right.
    fn put_back(&mut self, rows: &[Row]) {
        for row in rows {
            let pool = match (row.pool, &mut self.slots) {
                (1, Some(slots)) => slots,
                _ => &mut self.values,
            };
            let start = row.start as usize;
            pool.blocks.write(row.block)[start..start + row.bytes.len()]
                .copy_from_slice(&row.bytes);
        }
        self.undo.clear();
    }

    fn change_shadow(
        &mut self,
        change: Change<'_>,
        place: usize,
        within: Range<usize>,
        input: &[u8],
    ) -> Result<(), NoSpareBlock> {
        let value = self.values.shadow(place)?;
        let slot = match &mut self.slots {
            Some(slots) if change.has_slots() => Some(slots.shadow(place)?),
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
    fn change_block(
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
        if let (Some(pool), Some(slot)) = (&mut self.slots, slot.filter(|_| change.has_slots())) {
            let stride = self.geometry.block_bytes + SKEW_BYTES;
            for (slot, bytes) in slots.iter_mut().zip(pool.blocks.write(slot).chunks_mut(stride)) {
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
            for (from, out) in from.chunks(stride).zip(out.chunks_mut(stride)) {
                (slots[count], slots_out[count]) =
                    (&from[within.clone()], &mut out[within.clone()]);
                count += 1;
            }
        }
        let (slots, slots_out) = (&slots[..count], &mut slots_out[..count]);
        if !change.streamed(self.past_cache, values, values_out, slots, slots_out, input) {
            return false;
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

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn check_invariants(&self) {
        self.values.check_invariants();
        self.slots.iter().for_each(Pool::check_invariants);
    }
}

/// How many rows were kept for a change that was not committed, when `version` was the last; `None`
/// if none were.
pub(crate) fn undo_rows(
    arena: &Arena,
    generation: u64,
    version: u64,
    geometry: &Geometry,
) -> Result<Option<usize>, StorageError> {
    let undo = Undo::open(arena.open(Kind::Undo, generation, Some(Undo::BYTES))?);
    let rows = undo.rows(version).and_then(|rows| check_rows(rows, geometry));
    let found = rows.and_then(|rows| Ok((undo.is_prepared()?, rows.len())));
    match found {
        Ok((prepared, rows)) => Ok(prepared.then_some(rows)),
        Err(fault) => Err(arena.place.corrupt(&file_name(Kind::Undo, generation), fault)),
    }
}

/// Makes an undo file that is idle.
pub(crate) fn idle_undo(arena: &Arena, generation: u64) -> Result<(), StorageError> {
    arena.create(Kind::Undo, generation, Undo::BYTES).map(|memory| drop(Undo::create(memory)))
}

/// The places that a range lies in.
fn places_of(range: &Range<u64>, block_bytes: usize) -> Range<usize> {
    let first = range.start as usize / block_bytes;
    let end = (range.end as usize).div_ceil(block_bytes);
    first..end.max(first)
}

/// Rows that lie in the blocks they name.
fn check_rows(rows: Vec<Row>, geometry: &Geometry) -> Result<Vec<Row>, Fault> {
    let lies = |row: &Row| {
        let grid = if row.pool == 0 { geometry.values() } else { geometry.slots() };
        let end = row.start as usize + row.bytes.len();
        row.pool <= 1 && (row.block as usize) < grid.count && end <= grid.block_bytes
    };
    match rows.iter().all(lies) {
        true => Ok(rows),
        false => Err(Fault::at(PAGE_BYTES, "rows of its blocks")),
    }
}

/// Where each place is, by the tables; each block is in one place at most.
fn table(journal: &Journal, first: usize, places: usize, blocks: usize) -> Result<Vec<u32>, Fault> {
    let mut used = vec![false; blocks];
    let homes = (first..first + places).map(|index| {
        let home = journal.load(Address::Tables(index)) as u32;
        let taken = used.get_mut(home as usize).map(|used| std::mem::replace(used, true));
        match taken {
            Some(false) => Ok(home),
            _ => {
                let what = format!("one of {blocks} blocks that is nowhere else, not {home}");
                Err(Fault::at(offset_of(Address::Tables(index)), what))
            }
        }
    });
    homes.collect()
}

fn as_elements<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

/// Values as they were at one version, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pins: Pins,
    /// Which stretch of the values each pinned block holds, in rising order.
    logical: Vec<u32>,
    block_bytes: usize,
}

impl Snapshot {
    /// Appends the bytes of a range that was asked for, as slices in order.
    pub(crate) fn slices<'a>(&'a self, range: Range<u64>, out: &mut Vec<IoSlice<'a>>) {
        let block_bytes = self.block_bytes;
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
