//! Creation of a table's files, and recovery of the files that an earlier process left.

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::initializer::InitialKey;
use pushpull_optim::optimizer::OptimizerSlot;

use super::change::DirtyRows;
use super::index::{
    ENTRIES, IndexEntry, Pages, RECORDS_MAX, find, grown_index, page_of, pages_for, tag_in, tag_of,
};
use super::records::{RecordShape, Records, TableFiles, TableNeed, id_of, is_sound};
use super::{FILES_WORD, Initial, PAGES_WORD, SLOTS_WORD, STEP_WORD, Table, TableCounts};
use crate::arena::Part;
use crate::commit::{Address, Journal, index_bytes, offset_of};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES};
use crate::undo::UndoRow;

/// The page capacity of a new index.
const FIRST_PAGES: usize = 8;

/// The parameters for creating or opening a table.
#[derive(Debug)]
pub struct TableInputs<'a> {
    /// The files of the table.
    pub files: TableFiles,
    /// The catalogue of all variables.
    pub catalogue: &'a Catalogue,
    /// The partition whose rows the table holds.
    pub partition: &'a Partition,
    /// The slots of the variable's optimizer.
    pub slots: &'a [OptimizerSlot],
    /// Whether records hold checksums.
    pub integrity: bool,
    /// The old contents of rows from a change that was not committed. May include rows of other
    /// tables.
    pub undo_rows: &'a [UndoRow],
}

impl Table {
    /// Creates an empty table, as the next index of the journal. No committed word names it yet.
    pub fn create(inputs: TableInputs<'_>, journal: &mut Journal) -> Result<Table, StorageError> {
        let TableFiles { arena, generation, table, promises } = &inputs.files;
        let part = Part::Table(*table);
        let bytes = index_bytes(FIRST_PAGES);
        arena.storage.remove(&part.file_name(Kind::Index, *generation))?;
        let reservation = promises.index.reserve(bytes)?;
        let memory = arena.create_part(Kind::Index, *generation, part, bytes)?;
        journal.use_index(memory, *generation);
        let table = *table;
        let shape = shape_of(&inputs);
        let records = Records::new(inputs.files.clone(), shape, limit_of(&inputs));
        let mut made = Table::of(inputs, records);
        made.index_reservations.push(reservation);
        made.head().into_iter().for_each(|(address, value)| journal.fill_index(address, value));
        journal.seal_index(table);
        Ok(made)
    }

    fn of(inputs: TableInputs<'_>, records: Records) -> Table {
        let limit = limit_of(&inputs);
        let variable = inputs.catalogue.variable(inputs.partition.variable);
        let key = InitialKey::new(variable.seed, variable.name());
        let slots = inputs.slots.iter().map(|slot| slot.initial).collect();
        let spec = variable.as_table().copied();
        Table {
            number: inputs.files.table,
            partition: inputs.partition.clone(),
            spec: spec.unwrap_or(pushpull_common::table::TableSpec::new(0)),
            initial: Initial { initializer: variable.initializer, key, slots },
            records,
            salt: inputs.files.arena.stamp.arena,
            pages: 1,
            rows: 0,
            candidates: 0,
            limit,
            step: 0,
            integrity: inputs.integrity,
            index_reservations: Vec::new(),
            dirty_rows: None,
            pooled_dirty_rows: DirtyRows::default(),
            new_ids: Vec::new(),
            restored: None,
            counts: TableCounts::default(),
            row_buffer: Vec::new(),
            locations: Vec::new(),
        }
    }

    /// Maps the index left by an earlier process, as the next index of the journal. Called before
    /// the committed intent is redone.
    pub fn map_index(
        arena: &crate::arena::Arena,
        generation: u64,
        table: u16,
        journal: &mut Journal,
    ) -> Result<(), StorageError> {
        let memory = arena.open_part(Kind::Index, generation, Part::Table(table), None)?;
        journal.use_index(memory, generation);
        Ok(())
    }

    /// Returns the maximum memory of a table partition, while nothing is pinned: for all the rows
    /// that it may have and for those of `pushes` pushes that are applied together.
    pub fn need(
        catalogue: &Catalogue,
        partition: &Partition,
        slots: usize,
        pushes: u64,
    ) -> TableNeed {
        let (shape, limit) = sizes_of(catalogue, partition, slots);
        let rows = limit.saturating_add(partition.row_count().saturating_mul(pushes));
        // Candidates have entries in the index too.
        let pages = pages_for(limit.saturating_mul(2)) as usize;
        let index = index_bytes(grown_index(pages).max(FIRST_PAGES));
        TableNeed { index, records: Records::need(shape, limit, rows) }
    }

    /// Returns the undo bytes for the rows of one push, in a partition whose rows have `slots`
    /// slots.
    pub(crate) fn undo_bytes_of_push(partition: &Partition, slots: usize) -> u64 {
        let dtype = partition.dtype;
        let row_bytes = partition.row_bytes() as usize;
        let shape = RecordShape { dtype, row_bytes, slots };
        partition.row_count().saturating_mul(shape.undo_bytes() as u64)
    }

    /// Returns the number of slots per row of a table, given its index in the journal.
    pub fn slots_of(journal: &Journal, table: u16) -> u64 {
        match journal.index_pages(table) {
            0 => 0,
            _ => journal.load(Address::Index(table, SLOTS_WORD)),
        }
    }

    /// Opens a table left by an earlier process, whose index the journal has mapped.
    pub fn open(inputs: TableInputs<'_>, journal: &mut Journal) -> Result<Table, StorageError> {
        let TableFiles { arena, generation, table, promises } = inputs.files.clone();
        let name = Part::Table(table).file_name(Kind::Index, generation);
        let corrupt = |fault| arena.storage.corrupt(&name, fault);
        let head = |word| Address::Index(table, word);
        if journal.index_pages(table) == 0 {
            return Err(corrupt(Fault::at(0, "a page of an index")));
        }
        let slots = shape_of(&inputs).slots as u64;
        let found = Table::slots_of(journal, table);
        if slots != found {
            let what = format!("rows of {slots} slots, not of {found}");
            return Err(corrupt(Fault::at(offset_of(head(SLOTS_WORD)), what)));
        }
        let pages = journal.load(head(PAGES_WORD));
        let fault = |word, what: &str| corrupt(Fault::at(offset_of(head(word)), what));
        let count = u32::try_from(pages).ok().filter(|&pages| pages > 0);
        let count = count.ok_or_else(|| fault(PAGES_WORD, "a number of pages"))?;
        journal.verify_index(table, count as usize).map_err(corrupt)?;
        let files = u32::try_from(journal.load(head(FILES_WORD)));
        let files = files.map_err(|_| fault(FILES_WORD, "a number of files"))?;
        let shape = shape_of(&inputs);
        let limit = limit_of(&inputs);
        let records = Records::open(inputs.files.clone(), shape, limit, files)?;
        let index = index_bytes(journal.index_pages(table));
        let reservation = promises.index.reserve_recovered(index)?;
        let undo_rows = inputs.undo_rows;
        let mut opened = Table::of(inputs, records);
        opened.index_reservations.push(reservation);
        opened.pages = count;
        opened.step = journal.load(head(STEP_WORD));
        opened.apply_undo(undo_rows).map_err(|fault| {
            let name = crate::arena::file_name(Kind::Undo, generation);
            arena.storage.corrupt(&name, fault)
        })?;
        opened.recover(journal).map_err(|(page, place, what)| {
            corrupt(Fault::at(offset_of(opened.address(page, place)), what))
        })?;
        Ok(opened)
    }

    /// Restores the contents that rows had before an uncommitted change.
    pub(super) fn apply_undo(&mut self, undo_rows: &[UndoRow]) -> Result<(), Fault> {
        let record_bytes = self.records.shape.record_bytes();
        for row in undo_rows.iter().rev().filter(|row| row.table == Some(self.number)) {
            let is_whole = (row.stream, row.start, row.bytes.len()) == (0, 0, record_bytes);
            if !is_whole || u64::from(row.block) >= self.records.count() {
                return Err(Fault::at(PAGE_BYTES, "rows of its tables"));
            }
            self.records.write(row.block).copy_from_slice(&row.bytes);
        }
        Ok(())
    }

    /// Recovers the rows that the index names, and verifies their entries.
    fn recover(&mut self, journal: &Journal) -> Result<(), (u32, usize, String)> {
        for number in 0..self.pages {
            let pages = super::CommittedPages { journal, table: self.number };
            let page = pages.page(number);
            for place in 0..ENTRIES {
                let word = page[place];
                let tag = tag_in(page[place]);
                let fault = |what: &str| (number, place, what.to_owned());
                let entry = IndexEntry::of(word);
                if entry == IndexEntry::Empty {
                    continue;
                }
                let reached = find(page, tag, |other| other == entry);
                let here = page_of(tag, self.pages) == number;
                if !here || reached.is_none_or(|(found, _)| found != place) {
                    return Err(fault("an entry that its tag's probe sequence reaches"));
                }
                let record = match entry {
                    IndexEntry::Row(record) => record,
                    _ => {
                        self.candidates += 1;
                        continue;
                    }
                };
                if u64::from(record) >= self.records.count() || self.records.is_live(record) {
                    return Err(fault("an existing record that no other entry names"));
                }
                self.records.set_live(record);
                self.rows += 1;
                let bytes = self.records.read(record);
                if tag_of(id_of(bytes), self.salt) != tag {
                    return Err(fault("the tag of the row"));
                }
                if self.integrity && !is_sound(bytes) {
                    return Err(fault("a row with a correct checksum"));
                }
            }
        }
        self.records.finish_open();
        Ok(())
    }

    /// Returns the names of the files in use.
    pub fn file_names(&self) -> impl Iterator<Item = String> {
        let TableFiles { generation, table, .. } = *self.records.files();
        let index = Part::Table(table).file_name(Kind::Index, generation);
        let of = move |number| Part::OfTable(table, number).file_name(Kind::Rows, generation);
        std::iter::once(index).chain((0..self.records.file_count()).map(of))
    }

    /// Asserts the invariants. For tests and the simulator.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub fn check_invariants(&self, journal: &Journal) {
        let taken: Vec<u32> = self.dirty_rows.iter().flat_map(|dirty| dirty.taken()).collect();
        self.records.check_invariants(&taken);
        let pages = super::CommittedPages { journal, table: self.number };
        let mut rows = 0;
        let mut candidates = 0;
        for number in 0..self.pages {
            let page = pages.page(number);
            for &word in page.iter().filter(|&&word| word != 0) {
                let tag = tag_in(word);
                assert_eq!(
                    page_of(tag, self.pages),
                    number,
                    "an entry must be in the page of its tag"
                );
                assert!(find(page, tag, |other| other == IndexEntry::of(word)).is_some());
                match IndexEntry::of(word) {
                    IndexEntry::Row(record) => {
                        assert!(self.records.is_live(record));
                        assert_eq!(tag_of(id_of(self.records.read(record)), self.salt), tag);
                        rows += 1;
                    }
                    _ => candidates += 1,
                }
            }
        }
        assert_eq!((rows, candidates), (self.rows, self.candidates));
        assert!(self.rows <= self.limit, "{} rows of {}", self.rows, self.limit);
    }
}

fn shape_of(inputs: &TableInputs<'_>) -> RecordShape {
    sizes_of(inputs.catalogue, inputs.partition, inputs.slots.len()).0
}

fn limit_of(inputs: &TableInputs<'_>) -> u64 {
    sizes_of(inputs.catalogue, inputs.partition, inputs.slots.len()).1
}

/// Returns the record layout of a table partition, and the maximum number of rows.
fn sizes_of(catalogue: &Catalogue, partition: &Partition, slots: usize) -> (RecordShape, u64) {
    let slots = if partition.trainable { slots } else { 0 };
    let dtype = partition.dtype;
    let row_bytes = partition.row_bytes();
    let shape = RecordShape { dtype, row_bytes: row_bytes as usize, slots };
    let buckets = partition.rows.end - partition.rows.start;
    let table = catalogue.variable(partition.variable).as_table();
    let bytes = row_bytes.next_multiple_of(8) * (1 + slots as u64);
    let limit = table.map_or(0, |table| table.rows_max(buckets, bytes));
    (shape, limit.min(u64::from(RECORDS_MAX) / 4))
}
