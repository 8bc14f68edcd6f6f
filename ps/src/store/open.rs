//! A store's files: made, and opened again as an earlier process left them.

use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, ShardLayout};

use super::pool::Pool;
use super::rows::Tile;
use super::undo::{Row, UNDO_BYTES, Undo};
use super::{Geometry, Store};
use crate::arena::{Arena, Blocks, Grid, Loan, Memory, fence, file_name};
use crate::commit::{Address, Journal, offset_of};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::optimizer::VariableRules;
use crate::planted::PlantedBugs;

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
    pub(crate) planted: PlantedBugs,
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
        committed: Vec<u32>,
        file: impl FnOnce(Kind, u64) -> Result<Memory, StorageError>,
    ) -> Result<Pool, StorageError> {
        let memory = file(kind, grid.need() - PAGE_BYTES as u64)?;
        Ok(Pool::new(Blocks::new(memory, grid), grid.count as u32, committed))
    }
}

impl Store {
    /// Maps the memory for a shard's variables and slots, zeroed; the slots start as the rules
    /// say. `loan` is what they and all beside them have taken off the budget.
    pub(crate) fn create(
        plan: Plan,
        loan: Loan,
        rules: &VariableRules,
    ) -> Result<Store, StorageError> {
        let make = |kind, bytes| plan.arena.create(kind, plan.generation, bytes);
        let committed = || (0..plan.geometry.logical_blocks as u32).collect();
        let values = plan.pool(Kind::Values, plan.geometry.values(), committed(), make)?;
        let slots = match plan.geometry.slots {
            0 => None,
            _ => Some(plan.pool(Kind::Slots, plan.geometry.slots(), committed(), make)?),
        };
        let undo = Undo::create(make(Kind::Undo, plan.geometry.undo_file_bytes())?);
        let mut store = Store::new(plan, loan, values, slots, undo);
        store.fill_slots(rules);
        fence();
        Ok(store)
    }

    /// Opens what an earlier process left, by tables that are verified; puts back what a change
    /// that was not committed had changed in place, but for rows of tables, which
    /// [`Store::have_tables`] does. `version` is that of the last commit.
    pub(crate) fn open(
        plan: Plan,
        loan: Loan,
        journal: &Journal,
        version: u64,
    ) -> Result<Store, StorageError> {
        let find = |kind, bytes| plan.arena.open(kind, plan.generation, Some(bytes));
        let committed = |first: usize, grid: Grid| {
            table(journal, first, plan.geometry.logical_blocks, grid.count)
                .map_err(|fault| plan.corrupt(Kind::Tables, fault))
        };
        let grid = plan.geometry.values();
        let take_over = |kind, bytes| find(kind, bytes).map(taken_over(grid));
        let values = plan.pool(Kind::Values, grid, committed(0, grid)?, take_over)?;
        let slots = match plan.geometry.slots {
            0 => None,
            _ => {
                let grid = plan.geometry.slots();
                let committed = committed(plan.geometry.logical_blocks, grid)?;
                Some(plan.pool(Kind::Slots, grid, committed, find)?)
            }
        };
        let undo = open_undo(&plan.arena, plan.generation)?;
        let tables = plan.layout.tables().len();
        let rows = undo.rows(version).and_then(|rows| check_rows(rows, &plan.geometry, tables));
        let rows = rows.map_err(|fault| plan.corrupt(Kind::Undo, fault))?;
        let mut store = Store::new(plan, loan, values, slots, undo);
        store.put_back(rows);
        if store.power {
            store.values.hold_free();
            store.slots.iter_mut().for_each(Pool::hold_free);
        }
        Ok(store)
    }

    fn new(plan: Plan, loan: Loan, values: Pool, slots: Option<Pool>, undo: Undo) -> Store {
        let Plan {
            catalogue, layout, geometry, integrity, cached_bytes_max, power, planted, ..
        } = plan;
        let streams = 1 + geometry.slots;
        let past_cache = layout.bytes().saturating_mul(streams as u64) > cached_bytes_max;
        let (tables, undone) = (Vec::new(), Vec::new());
        let (in_place, tables_in_place, tile) = (false, false, Tile::default());
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
            touched: Vec::new(),
            shadow_writes: Vec::new(),
            moved: Vec::new(),
            tables_in_place,
            undone,
            tile,
            past_cache,
            integrity,
            power,
            loan,
            planted,
        }
    }

    /// Puts back what was kept for the change in place under way, as the next process would if this one were
    /// killed now. False if it cannot be read.
    pub(super) fn put_back_kept(&mut self) -> bool {
        let Ok(rows) = self.undo.kept() else { return false };
        self.put_back(rows);
        self.values.readers.change_taken_back();
        true
    }

    /// Puts back what rows held; they are rows of this store, whose checksum is right.
    fn put_back(&mut self, rows: Vec<Row>) {
        let (of_tables, rows): (_, Vec<Row>) =
            rows.into_iter().partition(|row| row.table.is_some());
        // What was kept first was there first.
        for row in rows.iter().rev() {
            let (pool, part) = match (row.stream, &mut self.slots) {
                (0, _) | (_, None) => (&mut self.values, 0),
                (stream, Some(slots)) => (slots, stream - 1),
            };
            pool.blocks.write_part(row.block, part)[row.start..row.start + row.bytes.len()]
                .copy_from_slice(&row.bytes);
        }
        self.undone = of_tables;
        // What is still to be put back is not forgotten.
        if self.undone.is_empty() {
            self.undo.clear();
        }
    }
}

/// How many rows were kept for a change that was not committed, when `version` was the last; `None`
/// if none were.
pub(crate) fn undo_rows(
    arena: &Arena,
    generation: u64,
    version: u64,
    geometry: &Geometry,
    tables: usize,
) -> Result<Option<usize>, StorageError> {
    let undo = open_undo(arena, generation)?;
    let rows = undo.rows(version).and_then(|rows| check_rows(rows, geometry, tables));
    let found = rows.and_then(|rows| Ok((undo.is_prepared()?, rows.len())));
    match found {
        Ok((prepared, rows)) => Ok(prepared.then_some(rows)),
        Err(fault) => Err(arena.place.corrupt(&file_name(Kind::Undo, generation), fault)),
    }
}

/// Makes an undo file that is idle.
pub(crate) fn idle_undo(arena: &Arena, generation: u64) -> Result<(), StorageError> {
    let memory = arena.create(Kind::Undo, generation, Undo::bytes(UNDO_BYTES));
    memory.map(|memory| drop(Undo::create(memory)))
}

/// Has whoever was lent values by an earlier process know that they are in other hands: they may be
/// written from now on without regard to it.
fn taken_over(grid: Grid) -> impl Fn(Memory) -> Memory {
    move |mut memory| {
        let word = grid.geometry(0).owner_generation_word();
        memory.store(word, memory.load(word).wrapping_add(1));
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        memory
    }
}

/// The rows that an earlier process has kept. Their file has at least the length of one that is made
/// idle, and is longer where that process has made it so.
fn open_undo(arena: &Arena, generation: u64) -> Result<Undo, StorageError> {
    let memory = arena.open(Kind::Undo, generation, None)?;
    let least = Undo::bytes(UNDO_BYTES) as usize + PAGE_BYTES;
    match memory.len() >= least {
        true => Ok(Undo::open(memory)),
        false => {
            let what = format!("a file of at least {least} bytes, not of {}", memory.len());
            let fault = Fault::at(memory.len(), what);
            Err(arena.place.corrupt(&file_name(Kind::Undo, generation), fault))
        }
    }
}

/// Rows that lie in the blocks they name, or in tables, which know by themselves.
fn check_rows(rows: Vec<Row>, geometry: &Geometry, tables: usize) -> Result<Vec<Row>, Fault> {
    let lies = |row: &Row| {
        if let Some(table) = row.table {
            return usize::from(table) < tables;
        }
        let grid = if row.stream == 0 { geometry.values() } else { geometry.slots() };
        let end = row.start + row.bytes.len();
        row.stream <= geometry.slots
            && (row.block as usize) < grid.count
            && end <= geometry.block_bytes
    };
    match rows.iter().all(lies) {
        true => Ok(rows),
        false => Err(Fault::at(PAGE_BYTES, "rows of its blocks")),
    }
}

/// Where each place is, by the tables; each block is in one place at most.
fn table(
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
                let what = format!("one of {blocks} blocks that is nowhere else, not {committed}");
                Err(Fault::at(offset_of(Address::Tables(index)), what))
            }
        }
    });
    committed.collect()
}
