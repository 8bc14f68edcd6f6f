//! Creating a store's files and filling them with initial contents, and opening the files that an
//! earlier process left.

use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, ShardLayout};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::VariableRules;

use super::geometry::pieces_of;
use super::pool::{Occupied, Pool};
use super::rows::RowTile;
use super::{BLOCK_BYTES, Store, StoreGeometry};
use crate::arena::{Arena, Blocks, Budget, Grid, Memory, Reservation, fence, file_name};
use crate::commit::{Address, Journal, offset_of};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::planted::PlantedBugs;
use crate::table::{Table, TableFiles, TableInputs};
use crate::undo::{UNDO_BYTES, Undo, UndoRow};

/// The arguments for creating or opening a store.
#[derive(Debug)]
pub struct StorePlan {
    /// The shard's files.
    pub arena: Arena,
    /// The generation of the files.
    pub generation: u64,
    /// The catalogue of all variables.
    pub catalogue: Arc<Catalogue>,
    /// The layout of the variables on this shard.
    pub layout: ShardLayout,
    /// The number and the sizes of the blocks.
    pub geometry: StoreGeometry,
    /// Whether the tables hold a checksum of every block.
    pub integrity: bool,
    /// The maximum size of values and slots, in bytes, for which shadows are written through the
    /// cache.
    pub cached_bytes_max: u64,
    /// The budget for the memory of blocks beyond those that changes need while no block is pinned;
    /// none if it is in the reservation of the store.
    pub pin_budget: Option<Budget>,
    /// Whether replaced blocks stay unused until an image of the tables no longer names them.
    pub power: bool,
    /// The planted bug, if any.
    pub planted: PlantedBugs,
}

impl StorePlan {
    fn corrupt(&self, kind: Kind, fault: Fault) -> StorageError {
        self.arena.storage.corrupt(&file_name(kind, self.generation), fault)
    }

    /// Returns which blocks have memory: all, if they are all used all the time, as images on disk
    /// name blocks after they were replaced; or if they are all reserved, and the file system might
    /// have no space for them later.
    fn occupied(&self) -> Occupied<'_> {
        let is_reserved = self.pin_budget.is_none() && self.arena.storage.is_folder();
        match self.power || is_reserved {
            true => Occupied::All,
            false => Occupied::Needed(self.pin_budget.as_ref()),
        }
    }

    /// Creates a pool in a new file.
    fn create_pool(&self, kind: Kind, grid: Grid) -> Result<Pool, StorageError> {
        let logical_blocks = self.geometry.logical_blocks;
        let occupied = match self.occupied() {
            Occupied::All => grid.count,
            Occupied::Needed(_) => 2 * logical_blocks,
        };
        let bytes = grid.need() - PAGE_BYTES as u64;
        // A word behind the first block says which process owns the file.
        let ranges = grid.ranges_of_first(occupied.max(1));
        let memory = self.arena.create_sparse(kind, self.generation, bytes, ranges)?;
        let committed = (0..logical_blocks as u32).collect();
        Ok(Pool::new(Blocks::new(memory, grid), committed, self.occupied()))
    }

    /// Opens a pool in a file that an earlier process left.
    fn open_pool(
        &self,
        kind: Kind,
        grid: Grid,
        committed: Vec<u32>,
        take_over: impl FnOnce(Memory) -> Memory,
    ) -> Result<Pool, StorageError> {
        let bytes = grid.need() - PAGE_BYTES as u64;
        let memory = self.arena.open(kind, self.generation, Some(bytes))?;
        let blocks = Blocks::new(take_over(memory), grid);
        let mut pool = Pool::new(blocks, committed, self.occupied());
        pool.settle_memory().map_err(|source| {
            let path = self.arena.storage.path(&file_name(kind, self.generation));
            StorageError::Io { doing: "reserve space for", path, source }
        })?;
        Ok(pool)
    }
}

impl Store {
    /// Creates the memory for a shard's variables and slots. Variables are zeros; slots have the
    /// initial values of their rules. `reservation` covers all memory of the shard.
    pub fn create(
        plan: StorePlan,
        reservation: Reservation,
        rules: &VariableRules,
    ) -> Result<Store, StorageError> {
        let values = plan.create_pool(Kind::Values, plan.geometry.values())?;
        let slots = match plan.geometry.slots {
            0 => None,
            _ => Some(plan.create_pool(Kind::Slots, plan.geometry.slots())?),
        };
        let undo_bytes = plan.geometry.undo_file_bytes();
        let undo = Undo::create(plan.arena.create(Kind::Undo, plan.generation, undo_bytes)?);
        let mut store = Store::new(plan, reservation, values, slots, undo);
        store.fill_slots(rules);
        fence();
        Ok(store)
    }

    /// Opens the files that an earlier process left. The caller has verified the tables.
    ///
    /// Rolls back an uncommitted change in place, except for rows of tables, which
    /// [`Store::attach_tables`] restores. `version` is the version of the last commit.
    pub fn open(
        plan: StorePlan,
        reservation: Reservation,
        journal: &Journal,
        version: u64,
    ) -> Result<Store, StorageError> {
        let committed = |first: usize, grid: Grid| {
            committed_blocks_of(journal, first, plan.geometry.logical_blocks, grid.count)
                .map_err(|fault| plan.corrupt(Kind::Tables, fault))
        };
        let grid = plan.geometry.values();
        let take_over = raise_owner_generation(grid);
        let values = plan.open_pool(Kind::Values, grid, committed(0, grid)?, take_over)?;
        let slots = match plan.geometry.slots {
            0 => None,
            _ => {
                let grid = plan.geometry.slots();
                let committed = committed(plan.geometry.logical_blocks, grid)?;
                Some(plan.open_pool(Kind::Slots, grid, committed, |memory| memory)?)
            }
        };
        let undo = open_undo(&plan.arena, plan.generation)?;
        let tables = plan.layout.tables().len();
        let rows = undo.rows(version).and_then(|rows| check_rows(rows, &plan.geometry, tables));
        let rows = rows.map_err(|fault| plan.corrupt(Kind::Undo, fault))?;
        let mut store = Store::new(plan, reservation, values, slots, undo);
        store.apply_undo(rows);
        if store.power {
            store.values.hold_free();
            store.slots.iter_mut().for_each(Pool::hold_free);
        }
        Ok(store)
    }

    fn new(
        plan: StorePlan,
        reservation: Reservation,
        values: Pool,
        slots: Option<Pool>,
        undo: Undo,
    ) -> Store {
        let StorePlan {
            catalogue,
            layout,
            geometry,
            integrity,
            cached_bytes_max,
            power,
            planted,
            ..
        } = plan;
        let streams = 1 + geometry.slots;
        let past_cache = layout.bytes().saturating_mul(streams as u64) > cached_bytes_max;
        let tables = Vec::new();
        let undo_rows = Vec::new();
        let in_place = false;
        let tables_in_place = false;
        let tile = RowTile::default();
        Store {
            catalogue,
            layout,
            geometry,
            values,
            slots,
            undo,
            tables,
            in_place,
            overflow: None,
            touched_blocks: Vec::new(),
            shadow_writes: Vec::new(),
            moved_blocks: Vec::new(),
            tables_in_place,
            undo_rows,
            tile,
            past_cache,
            integrity,
            power,
            reservation,
            planted,
        }
    }

    /// Attaches the tables, which `make` creates or opens with [`Table::create`] or
    /// [`Table::open`]. What they may need, if at most `pushes` pushes are applied together, is
    /// promised to them. Then clears the undo, because every uncommitted change in place has been
    /// rolled back.
    pub fn attach_tables(
        &mut self,
        arena: &Arena,
        generation: u64,
        budget: &Budget,
        rules: &VariableRules,
        pushes: u64,
        mut make: impl FnMut(TableInputs<'_>) -> Result<Table, StorageError>,
    ) -> Result<(), StorageError> {
        let undo_rows = std::mem::take(&mut self.undo_rows);
        for (table, partition) in (0..).zip(self.layout.tables()) {
            let slots = rules.optimizer(partition.variable).slots();
            let need = Table::need(&self.catalogue, partition, slots.len(), pushes);
            let promises = need.promised(budget);
            let inputs = TableInputs {
                files: TableFiles { arena: arena.clone(), generation, table, promises },
                catalogue: &self.catalogue,
                partition,
                slots,
                integrity: self.integrity,
                undo_rows: &undo_rows,
            };
            self.tables.push(make(inputs)?);
        }
        self.undo.clear();
        Ok(())
    }

    /// Stages the indices of restored tables.
    pub fn tables_restored(&mut self, journal: &mut Journal) -> Result<(), StorageError> {
        self.tables.iter_mut().try_for_each(|table| table.restored(journal))
    }

    /// Writes the initial values of a partition, as specified for its variable, from element `done`
    /// on: at most one block's worth of elements. Returns the new `done`.
    ///
    /// The values are written in place, because nothing reads them before the shard is ready.
    pub fn initialize(&mut self, index: usize, done: u64) -> u64 {
        let partition = self.layout.partitions()[index].clone();
        let count = (partition.elements.end - partition.elements.start - done)
            .min((BLOCK_BYTES / 8) as u64);
        // Words of 8 bytes align the buffer for every type.
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
        self.write_committed(StoredStream::Values, start, bytes);
        done + count
    }

    /// Writes values, or a slot, to the committed blocks. Only for a store that nothing can read
    /// yet.
    pub fn write_committed(&mut self, stream: StoredStream, start: u64, bytes: &[u8]) {
        let block_bytes = self.geometry.block_bytes;
        let (pool, part) = match (stream, &mut self.slots) {
            (StoredStream::Values, _) => (&mut self.values, 0),
            (StoredStream::Slot(slot), Some(slots)) => (slots, slot),
            (StoredStream::Slot(_), None) => return,
        };
        let mut bytes = bytes;
        for (logical, within) in pieces_of(&(start..start + bytes.len() as u64), block_bytes) {
            let (head, rest) = bytes.split_at(within.len());
            pool.blocks.write_part(pool.committed_block(logical), part)[within]
                .copy_from_slice(head);
            bytes = rest;
        }
    }

    /// Writes the initial slots of the rules, in place because nothing can read them yet.
    fn fill_slots(&mut self, rules: &VariableRules) {
        let Some(slots) = &mut self.slots else { return };
        let block_bytes = self.geometry.block_bytes;
        for partition in self.layout.partitions().iter().filter(|partition| partition.trainable) {
            let range = partition.offset..partition.offset + partition.bytes;
            let specs = rules.optimizer(partition.variable).slots();
            for (index, spec) in specs.iter().enumerate() {
                // A new mapped file already contains zeros.
                if spec.initial == 0.0 {
                    continue;
                }
                for (logical, within) in pieces_of(&range, block_bytes) {
                    let block = slots.blocks.write_part(slots.committed_block(logical), index);
                    let bytes = &mut block[within];
                    match partition.dtype {
                        DType::F32 => bytemuck::cast_slice_mut(bytes).fill(spec.initial as f32),
                        DType::F64 => bytemuck::cast_slice_mut(bytes).fill(spec.initial),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Rolls back the current change in place, as the next process would after a kill at this
    /// point. Returns false if the undo rows cannot be read.
    pub(super) fn roll_back_in_place(&mut self) -> bool {
        let Ok(rows) = self.undo.uncommitted_rows() else { return false };
        self.apply_undo(rows);
        self.values.readers.cancel_in_place();
        true
    }

    /// Restores the old contents of rows that were decoded from a valid undo of this store.
    fn apply_undo(&mut self, rows: Vec<UndoRow>) {
        let (of_tables, rows): (_, Vec<UndoRow>) =
            rows.into_iter().partition(|row| row.table.is_some());
        // If bytes were recorded twice, the first record has the oldest contents, so it is applied
        // last.
        for row in rows.iter().rev() {
            let (pool, part) = match (row.stream, &mut self.slots) {
                (0, _) | (_, None) => (&mut self.values, 0),
                (stream, Some(slots)) => (slots, stream - 1),
            };
            pool.blocks.write_part(row.block, part)[row.start..row.start + row.bytes.len()]
                .copy_from_slice(&row.bytes);
        }
        self.undo_rows = of_tables;
        // Rows of tables are still to be restored.
        if self.undo_rows.is_empty() {
            self.undo.clear();
        }
    }
}

/// Returns the number of rows recorded for a change that was not committed, or `None` if the undo
/// is idle. `version` is the version of the last commit.
pub fn count_undo_rows(
    arena: &Arena,
    generation: u64,
    version: u64,
    geometry: &StoreGeometry,
    tables: usize,
) -> Result<Option<usize>, StorageError> {
    let undo = open_undo(arena, generation)?;
    let rows = undo.rows(version).and_then(|rows| check_rows(rows, geometry, tables));
    let found = rows.and_then(|rows| Ok((undo.is_prepared()?, rows.len())));
    match found {
        Ok((prepared, rows)) => Ok(prepared.then_some(rows)),
        Err(fault) => Err(arena.storage.corrupt(&file_name(Kind::Undo, generation), fault)),
    }
}

/// Creates an idle undo file.
pub fn idle_undo(arena: &Arena, generation: u64) -> Result<(), StorageError> {
    let memory = arena.create(Kind::Undo, generation, Undo::bytes(UNDO_BYTES));
    memory.map(|memory| drop(Undo::create(memory)))
}

/// Returns a function that raises the owner generation in the memory. Readers that mapped the
/// values of an earlier process notice it; from then on the values are written regardless of their
/// pins.
fn raise_owner_generation(grid: Grid) -> impl Fn(Memory) -> Memory {
    move |mut memory| {
        let word = grid.geometry(0).owner_generation_word();
        memory.store(word, memory.load(word).wrapping_add(1));
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        memory
    }
}

/// Opens the undo file of an earlier process. It is at least as long as a new idle one, and longer
/// if that process created it so.
fn open_undo(arena: &Arena, generation: u64) -> Result<Undo, StorageError> {
    let memory = arena.open(Kind::Undo, generation, None)?;
    let least = Undo::bytes(UNDO_BYTES) as usize + PAGE_BYTES;
    match memory.len() >= least {
        true => Ok(Undo::open(memory)),
        false => {
            let what = format!("a file of at least {least} bytes, not of {}", memory.len());
            let fault = Fault::at(memory.len(), what);
            Err(arena.storage.corrupt(&file_name(Kind::Undo, generation), fault))
        }
    }
}

/// Checks that every row is inside the block that it names. Rows of tables are checked by their
/// tables.
fn check_rows(
    rows: Vec<UndoRow>,
    geometry: &StoreGeometry,
    tables: usize,
) -> Result<Vec<UndoRow>, Fault> {
    let is_inside = |row: &UndoRow| {
        if let Some(table) = row.table {
            return usize::from(table) < tables;
        }
        let grid = if row.stream == 0 { geometry.values() } else { geometry.slots() };
        let end = row.start + row.bytes.len();
        row.stream <= geometry.slots
            && (row.block as usize) < grid.count
            && end <= geometry.block_bytes
    };
    match rows.iter().all(is_inside) {
        true => Ok(rows),
        false => Err(Fault::at(PAGE_BYTES, "rows inside their blocks")),
    }
}

/// Returns the committed block of each logical block, as the tables name it. No block may be named
/// twice.
fn committed_blocks_of(
    journal: &Journal,
    first: usize,
    logical_blocks: usize,
    blocks: usize,
) -> Result<Vec<u32>, Fault> {
    let mut used = vec![false; blocks];
    let committed = (first..first + logical_blocks).map(|index| {
        let committed = journal.load(Address::Tables(index)) as u32;
        let taken = used.get_mut(committed as usize).map(|used| std::mem::replace(used, true));
        match taken {
            Some(false) => Ok(committed),
            _ => {
                let what = format!("one of {blocks} blocks that is named once, not {committed}");
                Err(Fault::at(offset_of(Address::Tables(index)), what))
            }
        }
    });
    committed.collect()
}

fn as_elements<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}
