//! The variables of a shard and their slots: read as a whole, changed by commits.
//!
//! Values and slots are cut into blocks. A change writes shadow blocks, or keeps what a few rows
//! were and changes them where they lie; either becomes visible with the commit and is nothing
//! before it. A pull pins the blocks it sends: it is of one version, and holds no change up.

mod change;
mod fill;
mod geometry;
mod image;
mod input;
mod open;
mod overflow;
mod pool;
mod readers;
mod rows;
mod snapshot;
mod sums;
mod tables;
mod undo;
mod write;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pushpull_common::catalogue::{Catalogue, Partition, ShardLayout};
use pushpull_common::shared_values::Counts;

use crate::arena::Loan;
use crate::commit::{Address, Journal};
use crate::layout::{Fault, Kind};
use crate::planted::{Bug, PlantedBugs};
use crate::table::Table;
pub(crate) use change::{Change, Stretches, with_slots};
pub(crate) use geometry::{BLOCK_BYTES, Geometry, SLOTS_MAX};
use geometry::{logical_blocks_of, pieces_of};
pub(crate) use image::{Image, TableOfImage};
pub(crate) use input::{Give, Input, SharedInput};
pub(crate) use open::{Plan, idle_undo, undo_rows};
pub(crate) use overflow::Overflow;
use pool::Pool;
pub(crate) use pool::{NoFreeBlock, Stalled};
pub(crate) use readers::VALUES;
use rows::Tile;
use rows::range_of;
pub(crate) use snapshot::Snapshot;
#[cfg(test)]
pub(crate) use undo::reseal as reseal_undo;
pub(crate) use undo::{Row as UndoneRow, RowLocation, Undo};

/// Up to so many bytes of values and slots a model and its shadows stay in cache, and are written
/// through it. Non-temporal stores would put out what the next push reads.
pub(crate) const CACHED_BYTES_MAX: u64 = 16 << 20;

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
    /// The partitions of tables that grow, in the order of the layout.
    tables: Vec<Table>,
    /// Whether the change under way is made where the values lie.
    in_place: bool,
    /// What the change under way has made that is not finite.
    overflow: Option<Overflow>,
    /// The places that it touches then, each once.
    touched: Vec<usize>,
    /// Memory for where a change is written.
    shadow_writes: Vec<write::ShadowWrite>,
    /// Memory for what a change has moved.
    moved: Vec<(bool, usize)>,
    /// Whether it is made where the rows of tables lie.
    tables_in_place: bool,
    /// What rows of tables held that an earlier process has changed without committing it, until the
    /// tables are opened.
    undone: Vec<UndoneRow>,
    /// Where rows are that are changed in place, a few at a time.
    tile: Tile,
    /// Whether shadows are written past the cache.
    past_cache: bool,
    /// Whether the tables hold a checksum of every block.
    integrity: bool,
    /// Whether a loss of power is survived: nothing that an image names is changed in place.
    power: bool,
    loan: Loan,
    planted: PlantedBugs,
}

impl Store {
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

    /// Pins values and slots as they are now, to be written to a checkpoint of a global step until
    /// somebody says that it is given up.
    pub(crate) fn image(&mut self, step: u64, given_up: Arc<AtomicBool>) -> Image {
        let tables = self.tables.iter_mut().map(|table| {
            let (image, given_up) = (table.image(step), given_up.clone());
            TableOfImage { image, given_up }
        });
        let tables = tables.collect();
        let logical_blocks = 0..self.geometry.logical_blocks as u32;
        let slots = self.slots.as_ref().map(|slots| slots.pin(logical_blocks.clone()));
        let values = self.values.pin(logical_blocks);
        Image { tables, geometry: self.geometry, values, slots, given_up }
    }

    /// Prepares the change of these ranges by [`Store::change`], and of these rows, each a range of
    /// its own, by [`Store::change_rows`]; it makes `version`. What was drafted of another change is
    /// forgotten, but not what was begun of tables.
    pub(crate) fn begin<'a>(
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

    /// Whether these ranges can be changed whole with the memory that is free now. It stays so,
    /// because nothing but changes takes spare blocks.
    pub(crate) fn can_change(
        &mut self,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
    ) -> Result<(), NoFreeBlock> {
        let block_bytes = self.geometry.block_bytes;
        // Ranges that do not follow each other may share a block; that counts it twice, which errs on
        // the safe side, as far as there are places at all.
        let logical_blocks = || {
            let ranges = ranges.clone().filter(|range| !range.is_empty());
            write::distinct(ranges.flat_map(move |range| logical_blocks_of(&range, block_bytes)))
        };
        let enough = |pool: &mut Pool| {
            let need = pool.clean(logical_blocks()).min(pool.logical_blocks());
            need <= pool.free_count()
        };
        let slots = self.slots.as_mut().is_none_or(enough);
        if enough(&mut self.values) && slots { Ok(()) } else { Err(NoFreeBlock) }
    }

    /// Changes a range, which lies within one partition, by what the push has for it.
    pub(crate) fn change(
        &mut self,
        change: Change<'_>,
        range: Range<u64>,
        mut input: Input<'_>,
    ) -> Result<(), NoFreeBlock> {
        if !self.in_place {
            return self.change_shadows(change, &range, input);
        }
        for (logical, within) in self.pieces_of(&range) {
            self.write_committed_block(change, logical, within, &mut input);
        }
        Ok(())
    }

    /// Changes rows of a partition by rows that lie one behind the other.
    pub(crate) fn change_rows(
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

    /// Whether the change under way is made where the values lie: then it is made in one go.
    pub(crate) fn is_in_place(&self) -> bool {
        self.in_place || self.tables_in_place
    }

    /// What rows of tables held that are to be put back.
    pub(crate) fn undone(&self) -> &[UndoneRow] {
        &self.undone
    }

    /// Puts the change into a transaction of the journal and lets it be read: what is read before
    /// the transaction is made must not leave the shard.
    pub(crate) fn publish(&mut self, journal: &mut Journal) {
        if self.in_place && self.integrity {
            for &logical in &self.touched {
                self.stage(journal, false, logical);
                if self.slots.is_some() {
                    self.stage(journal, true, logical);
                }
            }
        }
        let mut moved = std::mem::take(&mut self.moved);
        for (pool, slots) in
            [Some(&self.values), self.slots.as_ref()].into_iter().zip([false, true])
        {
            moved.extend(
                pool.into_iter().flat_map(Pool::dirty).map(|(logical, _)| (slots, logical)),
            );
        }
        self.values.publish();
        self.slots.iter_mut().for_each(Pool::publish);
        for (slots, logical) in moved.drain(..) {
            self.stage(journal, slots, logical);
        }
        self.moved = moved;
        self.tables.iter_mut().for_each(|table| table.publish(journal));
        if self.planted.has(Bug::ReuseBeforeCommit) {
            self.let_go();
        }
    }

    /// The transaction is made: whoever reads without a request sees what it has made, which is of what
    /// `counts` says, and what the change replaced is free.
    pub(crate) fn committed(&mut self, counts: Counts) {
        self.values.show(counts);
        self.let_go();
    }

    fn let_go(&mut self) {
        self.values.committed(self.power);
        self.slots.iter_mut().for_each(|slots| slots.committed(self.power));
        self.tables.iter_mut().for_each(Table::committed);
        if self.is_in_place() {
            (self.in_place, self.tables_in_place) = (false, false);
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
        self.discard_blocks();
        self.tables.iter_mut().for_each(Table::discard);
    }

    fn discard_blocks(&mut self) {
        assert!(!self.is_in_place(), "a change in place is not given up");
        self.overflow = None;
        self.values.discard();
        self.slots.iter_mut().for_each(Pool::discard);
    }

    /// Stages where a place is, and the checksum of what it holds.
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

    /// Stages the checksums of all blocks, once they hold their first values.
    pub(crate) fn seal(&self, journal: &mut Journal) {
        for slots in [false, true].into_iter().filter(|&slots| !slots || self.slots.is_some()) {
            (0..self.geometry.logical_blocks)
                .for_each(|logical| self.stage(journal, slots, logical));
        }
    }

    /// Compares every block with its checksum in the tables.
    pub(crate) fn verify(&self, journal: &Journal) -> Result<(), (Kind, Fault)> {
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

    /// Whether a change is under way in shadows.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn is_dirty(&self) -> bool {
        let mut pools = std::iter::once(&self.values).chain(&self.slots);
        pools.any(|pool| pool.dirty().next().is_some())
    }

    /// Asserts the invariants; for tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        self.values.check_invariants();
        self.slots.iter().for_each(Pool::check_invariants);
    }
}

#[cfg(test)]
mod tests;
