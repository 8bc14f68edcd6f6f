//! The variables and optimizer slots of a shard: read at one version, changed by commits.
//!
//! Values and slots are stored in blocks. A change either writes shadow blocks, or records the old
//! bytes of a few ranges in an undo file and updates them in place. It becomes visible with the
//! commit and has no effect before. A pull pins the blocks it sends, so it has one version and
//! delays no change.

mod block_memory;
mod geometry;
mod image;
mod open;
mod overflow;
mod pool;
mod readers;
mod rows;
mod snapshot;
mod write;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use pushpull_common::catalogue::{Catalogue, Partition, ShardLayout};
use pushpull_common::ids::PartitionId;
use pushpull_common::shared_values::ValueCounts;
use pushpull_optim::optimizer::Sums;

use crate::arena::Reservation;
use crate::change::{Change, ChangeInput, NoFreeBlock, SLOTS_MAX};
use crate::commit::{Address, Journal};
use crate::error::StorageError;
use crate::layout::{Fault, Kind};
use crate::planted::{Bug, PlantedBugs};
use crate::table::Table;
use crate::undo::{Undo, UndoRow};
pub use geometry::{BLOCK_BYTES, StoreGeometry};
use geometry::{logical_blocks_of, pieces_of};
pub use image::{MemoryNeeded, StoreImage, StoreTableImage};
pub use open::{StorePlan, count_undo_rows, idle_undo};
pub use overflow::Overflow;
use pool::Pool;
pub use readers::VALUES;
use rows::RowTile;
use rows::range_of;
pub use snapshot::Snapshot;

/// The maximum size of values and slots, in bytes, for which shadows are written through the cache.
/// Such a model stays in cache with its shadows; non-temporal stores would evict what the next push
/// reads.
pub const CACHED_BYTES_MAX: u64 = 16 << 20;

/// The size of a chunk of input to sum, in bytes. It is larger than for changes: a rule has a fixed
/// cost for each chunk, and nothing is written.
const SUM_CHUNK_BYTES: usize = 16 << 10;

/// The variables and optimizer slots of one shard.
///
/// A change has these steps: [`Store::begin`], then [`Store::change`] for each range of the push,
/// then [`Store::publish`] into a transaction, and [`Store::committed`] after the commit. A push
/// that is applied as it arrives begins each part with [`Store::can_change`] instead.
/// [`Store::discard`] abandons the change.
///
/// Invariant: a block that the committed tables name is changed only while its old bytes are in the
/// undo file.
#[derive(Debug)]
pub struct Store {
    catalogue: Arc<Catalogue>,
    layout: ShardLayout,
    geometry: StoreGeometry,
    values: Pool,
    slots: Option<Pool>,
    undo: Undo,
    /// The growing tables of the shard, in the order of the layout.
    tables: Vec<Table>,
    /// Whether the current change updates values in place.
    in_place: bool,
    /// The first non-finite value that the current change has made.
    overflow: Option<Overflow>,
    /// The logical blocks that a change in place touches, each once.
    touched_blocks: Vec<usize>,
    /// Scratch memory for the shadow writes of a range.
    shadow_writes: Vec<write::ShadowWrite>,
    /// Scratch memory for the logical blocks that a change moves: whether of slots, and the index.
    moved_blocks: Vec<(bool, usize)>,
    /// Whether the current change updates rows of tables in place.
    tables_in_place: bool,
    /// The old contents of table rows that an earlier process changed without a commit; kept until
    /// the tables are opened.
    undo_rows: Vec<UndoRow>,
    /// Scratch memory for the locations of rows that are changed in place.
    tile: RowTile,
    /// Whether shadows are written with non-temporal stores, where the loops have them.
    past_cache: bool,
    /// Whether the tables hold a checksum of every block.
    integrity: bool,
    /// Whether the state survives a power loss. Then blocks that an image names are never changed
    /// in place.
    power: bool,
    reservation: Reservation,
    planted: PlantedBugs,
}

impl Store {
    /// Returns the catalogue of all variables.
    pub fn catalogue(&self) -> &Arc<Catalogue> {
        &self.catalogue
    }

    /// Returns whether the tables hold a checksum of every block.
    pub fn has_integrity(&self) -> bool {
        self.integrity
    }

    /// Returns the number and the sizes of the blocks.
    pub fn geometry(&self) -> StoreGeometry {
        self.geometry
    }

    /// Returns the bytes reserved for the shard, with those that its tables have taken.
    pub fn reserved(&self) -> u64 {
        let pools = std::iter::once(&self.values).chain(&self.slots).map(Pool::bytes_taken);
        let taken = pools.chain(self.tables.iter().map(Table::bytes_taken));
        taken.fold(self.reservation.bytes(), u64::saturating_add)
    }

    /// Takes back the memory of blocks that no change has needed for a time, unless a change is
    /// under way, and lets a full file system be asked again after some. Call it regularly.
    pub fn pass_time(&mut self, now: Instant, is_changing: bool) {
        self.values.pass_time(now, is_changing);
        self.slots.iter_mut().for_each(|slots| slots.pass_time(now, is_changing));
    }

    /// Returns the layout of the variables on this shard.
    pub fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// Returns the tables, in the order of the layout.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Returns the tables, in the order of the layout, for changes.
    pub fn tables_mut(&mut self) -> &mut [Table] {
        &mut self.tables
    }

    /// Returns the table with this partition id.
    pub fn table(&self, id: PartitionId) -> Option<&Table> {
        self.tables.iter().find(|table| table.partition().id == id)
    }

    /// Returns a partition that is pulled by rows.
    pub fn partition_of_rows(&self, id: PartitionId) -> Option<&Partition> {
        let stored = self.partition(id).filter(|partition| partition.is_sparse());
        stored.or_else(|| self.table(id).map(Table::partition))
    }

    /// Pins the current values and slots for a checkpoint of a global step. Reading the image fails
    /// once `memory_needed` is set.
    pub fn image(&mut self, step: u64, memory_needed: Arc<AtomicBool>) -> StoreImage {
        let tables = self.tables.iter_mut().map(|table| {
            let image = table.image(step);
            let memory_needed = memory_needed.clone();
            StoreTableImage { image, memory_needed }
        });
        let tables = tables.collect();
        let logical_blocks = 0..self.geometry.logical_blocks as u32;
        let slots = self.slots.as_ref().map(|slots| slots.pin(logical_blocks.clone()));
        let values = self.values.pin(logical_blocks);
        StoreImage { tables, geometry: self.geometry, values, slots, memory_needed }
    }

    /// Prepares a change that makes `version`: of these ranges, by [`Store::change`], and of these
    /// rows, by [`Store::change_rows`]. Discards the shadows of an earlier change, but not a change
    /// of tables that was begun.
    pub fn begin<'a>(
        &mut self,
        ranges: &[Range<u64>],
        rows: impl Iterator<Item = (&'a Partition, &'a [u32])> + Clone,
        version: u64,
    ) -> Result<(), NoFreeBlock> {
        self.discard_blocks();
        if self.begin_in_place(ranges, rows.clone(), version) {
            return Ok(());
        }
        let rows =
            rows.flat_map(|(partition, rows)| rows.iter().map(|&row| range_of(partition, row)));
        self.can_change(ranges.iter().cloned().chain(rows))
    }

    /// Checks that enough blocks are free to change all these ranges. They stay free, because only
    /// changes allocate blocks.
    pub fn can_change(
        &mut self,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
    ) -> Result<(), NoFreeBlock> {
        let block_bytes = self.geometry.block_bytes;
        // Adjacent ranges may share a block, which is then counted twice. That is harmless: the
        // count is bounded by the number of logical blocks.
        let logical_blocks = || {
            let ranges = ranges.clone().filter(|range| !range.is_empty());
            write::distinct(ranges.flat_map(move |range| logical_blocks_of(&range, block_bytes)))
        };
        let enough = |pool: &mut Pool| {
            let need = pool.count_clean(logical_blocks()).min(pool.logical_blocks());
            need <= pool.free_up(need)
        };
        let slots = self.slots.as_mut().is_none_or(enough);
        if enough(&mut self.values) && slots { Ok(()) } else { Err(NoFreeBlock) }
    }

    /// Applies the push's input to a range, which is within one partition.
    pub fn change(
        &mut self,
        change: Change<'_>,
        range: Range<u64>,
        mut input: ChangeInput<'_>,
    ) -> Result<(), NoFreeBlock> {
        if !self.in_place {
            return self.change_shadows(change, &range, input);
        }
        for (logical, within) in self.pieces_of(&range) {
            self.write_committed_block(change, logical, within, &mut input);
        }
        Ok(())
    }

    /// Adds a range to the sums of its variable. The range must be in one partition and not yet
    /// changed; the ranges of a variable must come in order.
    pub fn add_up(
        &self,
        change: Change<'_>,
        range: Range<u64>,
        mut input: ChangeInput<'_>,
        sums: &mut Sums,
    ) {
        for (logical, within) in self.pieces_of(&range) {
            let values = self.values.blocks.read(self.values.committed_block(logical));
            let mut slots: [&[u8]; SLOTS_MAX] = Default::default();
            if let Some(pool) = self.slots.as_ref().filter(|_| change.slots() > 0) {
                let committed = pool.committed_block(logical);
                for (part, slot) in slots.iter_mut().enumerate().take(change.slots()) {
                    *slot = pool.blocks.read_part(committed, part);
                }
            }
            input.each_of::<SUM_CHUNK_BYTES>(within, |within, bytes| {
                let slots = slots.map(|slot| slot.get(within.clone()).unwrap_or_default());
                change.add_up(&values[within], &slots[..change.slots()], bytes, sums);
            });
        }
    }

    /// Applies consecutive rows of input to these rows of a partition.
    pub fn change_rows(
        &mut self,
        change: Change<'_>,
        partition: &Partition,
        rows: &[u32],
        input: &[u8],
    ) -> Result<(), NoFreeBlock> {
        if self.in_place {
            self.change_rows_in_place(change, partition, rows, input);
            return Ok(());
        }
        let row_bytes = partition.row_bytes() as usize;
        for (&row, input) in rows.iter().zip(input.chunks_exact(row_bytes)) {
            self.change(change, range_of(partition, row), input.into())?;
        }
        Ok(())
    }

    /// Changes rows of a table by consecutive rows of input. `rows` are positions among the rows
    /// that the change began with. [`Store::settle_tables`] must have been called.
    pub fn change_table(
        &mut self,
        table: usize,
        change: Change<'_>,
        rows: Range<usize>,
        input: &[u8],
    ) {
        let undo = &mut self.undo;
        let planted = self.planted;
        let found = self.tables[table].change_rows(change, rows, input, undo, planted);
        self.record_table_overflow(table, found);
    }

    /// Returns whether the current change is made in place. Such a change cannot be interrupted.
    pub fn is_in_place(&self) -> bool {
        self.in_place || self.tables_in_place
    }

    /// Returns the old contents of table rows that are still to be restored.
    pub fn undo_rows(&self) -> &[UndoRow] {
        &self.undo_rows
    }

    /// Extends the intent for the current changes of all tables.
    pub fn reserve_intent_for_tables(&self, journal: &mut Journal) -> Result<(), StorageError> {
        let words = self.tables.iter().map(Table::dirty_words).sum();
        journal.grow_intent(words)
    }

    /// Stages the change in the journal and makes it readable inside the shard. Data that is read
    /// before the commit must not leave the shard.
    pub fn publish(&mut self, journal: &mut Journal) {
        if self.in_place && self.integrity {
            for &logical in &self.touched_blocks {
                self.stage(journal, false, logical);
                if self.slots.is_some() {
                    self.stage(journal, true, logical);
                }
            }
        }
        let mut moved_blocks = std::mem::take(&mut self.moved_blocks);
        for (pool, slots) in
            [Some(&self.values), self.slots.as_ref()].into_iter().zip([false, true])
        {
            moved_blocks.extend(
                pool.into_iter().flat_map(Pool::dirty).map(|(logical, _)| (slots, logical)),
            );
        }
        self.values.publish();
        self.slots.iter_mut().for_each(Pool::publish);
        for (slots, logical) in moved_blocks.drain(..) {
            self.stage(journal, slots, logical);
        }
        self.moved_blocks = moved_blocks;
        self.tables.iter_mut().for_each(|table| table.publish(journal));
        if self.planted.has(Bug::ReuseBeforeCommit) {
            self.release_replaced();
        }
    }

    /// Completes a change after its commit. Readers of other processes see it with these counts;
    /// replaced blocks are freed.
    pub fn committed(&mut self, counts: ValueCounts) {
        self.values.publish_to_readers(counts);
        self.release_replaced();
    }

    fn release_replaced(&mut self) {
        self.values.committed(self.power);
        self.slots.iter_mut().for_each(|slots| slots.committed(self.power));
        self.tables.iter_mut().for_each(Table::committed);
        if self.is_in_place() {
            self.in_place = false;
            self.tables_in_place = false;
            self.undo.clear();
        }
    }

    /// Records that a write of an image of the tables has begun. The blocks that it names stay
    /// unchanged until the next image is written.
    pub fn image_begun(&mut self) {
        self.values.image_begun();
        self.slots.iter_mut().for_each(Pool::image_begun);
    }

    /// Records that the image is on disk. Blocks that only older images named are freed.
    pub fn image_written(&mut self) {
        self.values.image_written();
        self.slots.iter_mut().for_each(Pool::image_written);
    }

    /// Discards the current change.
    ///
    /// # Panics
    /// If the change is made in place. Such a change runs to its end.
    pub fn discard(&mut self) {
        self.discard_blocks();
        self.tables.iter_mut().for_each(Table::discard);
    }

    fn discard_blocks(&mut self) {
        assert!(!self.is_in_place(), "cannot discard a change that is made in place");
        self.overflow = None;
        self.values.discard();
        self.slots.iter_mut().for_each(Pool::discard);
    }

    /// Stages the table word of a logical block: its block number, and the block's checksum.
    fn stage(&self, journal: &mut Journal, slots: bool, logical: usize) {
        let (pool, first) = match (&self.slots, slots) {
            (Some(pool), true) => (pool, self.geometry.logical_blocks),
            _ => (&self.values, 0),
        };
        let committed = pool.committed_block(logical);
        let crc = if self.integrity { pool.checksum(committed) } else { 0 };
        journal
            .stage(Address::Tables(first + logical), u64::from(committed) | u64::from(crc) << 32);
    }

    /// Stages the checksums of all blocks, after they received their initial values.
    pub fn seal(&self, journal: &mut Journal) {
        for slots in [false, true].into_iter().filter(|&slots| !slots || self.slots.is_some()) {
            (0..self.geometry.logical_blocks)
                .for_each(|logical| self.stage(journal, slots, logical));
        }
    }

    /// Compares every block with its checksum in the tables.
    pub fn verify(&self, journal: &Journal) -> Result<(), (Kind, Fault)> {
        let pools = [(Kind::Values, Some(&self.values)), (Kind::Slots, self.slots.as_ref())];
        for (index, (kind, pool)) in pools.into_iter().enumerate() {
            let Some(pool) = pool else { continue };
            for logical in 0..pool.logical_blocks() {
                let word =
                    journal.load(Address::Tables(index * self.geometry.logical_blocks + logical));
                let expected = (word >> 32) as u32;
                let found = pool.checksum(pool.committed_block(logical));
                if expected != found {
                    let offset = pool.blocks.offset(pool.committed_block(logical));
                    let what = format!("a block of checksum {expected:#x}, not {found:#x}");
                    return Err((kind, Fault::at(offset, what)));
                }
            }
        }
        Ok(())
    }

    fn logical_blocks_of(&self, range: &Range<u64>) -> Range<usize> {
        logical_blocks_of(range, self.geometry.block_bytes)
    }

    fn pieces_of(&self, range: &Range<u64>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        pieces_of(range, self.geometry.block_bytes)
    }

    /// Returns whether the current change has shadows.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub fn is_dirty(&self) -> bool {
        let mut pools = std::iter::once(&self.values).chain(&self.slots);
        pools.any(|pool| pool.dirty().next().is_some())
    }

    /// Returns the committed contents of the values and of each slot, in the order of the layout;
    /// for tests.
    #[cfg(any(test, feature = "simulation"))]
    pub fn contents(&self) -> Vec<Vec<u8>> {
        let bytes = self.layout.bytes() as usize;
        let block_bytes = self.geometry.block_bytes;
        let concatenate = |pool: &Pool, part: usize| {
            let blocks = (0..pool.logical_blocks()).map(|logical| {
                let end = block_bytes.min(bytes - logical * block_bytes);
                &pool.blocks.read_part(pool.committed_block(logical), part)[..end]
            });
            blocks.collect::<Vec<_>>().concat()
        };
        let slots = self.slots.iter();
        let slots =
            slots.flat_map(|pool| (0..self.geometry.slots).map(|slot| concatenate(pool, slot)));
        [concatenate(&self.values, 0)].into_iter().chain(slots).collect()
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub fn check_invariants(&self) {
        self.values.check_invariants();
        self.slots.iter().for_each(Pool::check_invariants);
    }
}

#[cfg(test)]
mod tests;
