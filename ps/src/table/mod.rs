//! Embedding tables that grow: rows by 64-bit ids, which come with the pushes that have them.
//!
//! A table is an `index` over `records`. Its index is durable words like any other and changes in
//! commits only; a record is written before the commit whose index names it, or changed where it lies
//! under the undo of the store. So a table is what it was at one commit, whenever its process is
//! killed, and needs nothing of its own for that: neither its growth nor an eviction.
//!
//! What a pull reads does not change anything: the row of an id that has none is its first values.

mod admission;
mod change;
mod eviction;
mod index;
mod open;
mod records;
mod rows;
#[cfg(test)]
mod tests;
mod write;

use pushpull_common::catalogue::Partition;
use pushpull_common::initializer::{InitialKey, Initializer};
use pushpull_common::rows::Numbers;
use pushpull_common::table::{Eviction, RowAdmission, TableSpec};
use pushpull_common::tensor::DType;

use crate::arena::Loan;
use crate::commit::{Address, Journal, page_word};
use crate::store::RowLocation;
use change::{DirtyRows, New};
use index::{Entry, Pages, find, page_of, tag_of};
pub(crate) use open::Making;
pub(crate) use records::Files;
use records::{HEAD_BYTES, Records, id_of};
use rows::Restored;
pub(crate) use rows::TableImage;

/// What a table counts, since somebody asked last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableCounts {
    /// Rows that a push or a pull looked for and found.
    pub(crate) hits: u64,
    /// Ids that had no row then.
    pub(crate) misses: u64,
    /// Rows that ids were given.
    pub(crate) admitted: u64,
    /// Rows of pushes whose ids were not given one: their gradients are dropped.
    pub(crate) turned_away: u64,
    /// Rows that were evicted.
    pub(crate) evicted: u64,
}

/// One partition of a table.
///
/// A change is made in steps, as in a [`crate::store::Store`]: [`Table::begin`], [`Table::settle`], then
/// the rows of the push, then [`Table::publish`] into a transaction, and [`Table::committed`] when that is made; or
/// [`Table::discard`].
///
/// Invariants: `rows` and `candidates` are what the committed index has; each row's id has one entry,
/// in the page and near the home that its tag says.
#[derive(Debug)]
pub(crate) struct Table {
    number: u16,
    partition: Partition,
    spec: TableSpec,
    initial: Initial,
    records: Records,
    /// Keys the hash of the index.
    salt: u64,
    pages: u32,
    rows: u64,
    candidates: u64,
    /// The most rows.
    limit: u64,
    /// The newest global step that was known when something changed, or was saved.
    step: u64,
    integrity: bool,
    /// What the memory of the index has taken off the budget.
    index_loans: Vec<Loan>,
    dirty_pages: Option<DirtyRows>,
    /// Memory of a change that is over.
    pooled_vec: DirtyRows,
    /// The ids of a change that have no row.
    new: Vec<New>,
    /// An index that is made anew of a checkpoint.
    restored: Option<Restored>,
    counts: TableCounts,
    /// A row on its way to another record.
    held: Vec<u8>,
    /// Where that lies of it which is kept.
    locations: Vec<RowLocation>,
}

/// What a row is at first.
#[derive(Clone, Debug)]
struct Initial {
    initializer: Initializer,
    key: InitialKey,
    slots: Vec<f64>,
}

impl Initial {
    /// The first values of a row.
    fn fill(&self, dtype: DType, id: u64, out: &mut [u8]) {
        let Initial { initializer, key, .. } = self;
        match dtype {
            DType::F32 => initializer.fill_row::<f32>(*key, id, bytemuck::cast_slice_mut(out)),
            DType::F64 => initializer.fill_row::<f64>(*key, id, bytemuck::cast_slice_mut(out)),
            DType::I64 => initializer.fill_row::<i64>(*key, id, bytemuck::cast_slice_mut(out)),
            _ => unreachable!("a catalogue holds known types only"),
        }
    }

    fn fill_slot(&self, dtype: DType, slot: usize, out: &mut [u8]) {
        match dtype {
            DType::F32 => bytemuck::cast_slice_mut(out).fill(self.slots[slot] as f32),
            DType::F64 => bytemuck::cast_slice_mut(out).fill(self.slots[slot]),
            _ => out.fill(0),
        }
    }
}

/// The words of the index's own cell.
const PAGES_WORD: usize = 0;
const FILES_WORD: usize = 1;
const STEP_WORD: usize = 2;
const SLOTS_WORD: usize = 3;

/// So many ids lie between two steps of looking for one.
const AHEAD: usize = 16;

/// An id that is looked for.
#[derive(Clone, Copy, Debug, Default)]
struct Looked {
    id: u64,
    tag: u32,
    page: u32,
    /// The record of the first row of its tag.
    row: Option<u32>,
}

/// The committed pages of a table's index.
struct Committed<'a> {
    journal: &'a Journal,
    table: u16,
}

impl Pages for Committed<'_> {
    fn page(&self, page: u32) -> &[u64] {
        self.journal.index_page(self.table, page)
    }
}

/// Where an id is in the committed index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Absent,
    Candidate { pushes: u32 },
    Row { record: u32 },
}

impl Table {
    pub(crate) fn partition(&self) -> &Partition {
        &self.partition
    }

    /// How many rows it has.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// How many it may have.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether it refuses rows when it is full.
    pub(crate) fn refuses(&self) -> bool {
        self.spec.eviction == Eviction::Refuse
    }

    /// Whether chance decides who comes.
    pub(crate) fn draws(&self) -> bool {
        matches!(self.spec.admission, RowAdmission::Chance { .. })
    }

    /// The memory of its records, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.records.bytes()
    }

    /// What it has counted; it counts from 0 again.
    pub(crate) fn take_counts(&mut self) -> TableCounts {
        std::mem::take(&mut self.counts)
    }

    fn committed_pages<'a>(&self, journal: &'a Journal) -> Committed<'a> {
        Committed { journal, table: self.number }
    }

    /// Stages what belongs to the table itself: once in each transaction.
    pub(crate) fn stage_head(&self, journal: &mut Journal) {
        for (address, value) in self.head() {
            journal.stage(address, value);
        }
    }

    fn head(&self) -> [(Address, u64); 4] {
        let head = [
            (PAGES_WORD, self.pages.into()),
            (FILES_WORD, self.records.file_count().into()),
            (STEP_WORD, self.step),
            (SLOTS_WORD, self.records.shape.slots as u64),
        ];
        head.map(|(word, value)| (Address::Index(self.number, word), value))
    }

    /// Looks for ids, and calls `found_at` with the place of each and where it is. So many bytes of the
    /// record of each are soon read.
    ///
    /// An id goes through three steps, [`AHEAD`] other ids apart: the line of the index is fetched that
    /// its entry is in; that is read, and its record fetched; and the record is read. So memory is
    /// waited for by many ids at once, and by none for long.
    fn look(
        &self,
        journal: &Journal,
        ids: impl Iterator<Item = u64>,
        fetched: usize,
        mut found_at: impl FnMut(usize, u64, Place),
    ) {
        let pages = self.committed_pages(journal);
        let mut some = [Looked::default(); 2 * AHEAD];
        let (mut ids, mut begun) = (ids.fuse(), 0);
        for turn in 0_usize.. {
            if let Some(place) = turn.checked_sub(2 * AHEAD) {
                if place == begun {
                    break;
                }
                let Looked { id, tag, row, .. } = some[place % (2 * AHEAD)];
                // Hardly ever is it of another id with the same tag.
                let its = row.filter(|&record| id_of(self.records.read(record)) == id);
                let found = match its {
                    Some(record) => Place::Row { record },
                    None => self.find(&pages, id, tag),
                };
                found_at(place, id, found);
            }
            if let Some(place) = turn.checked_sub(AHEAD).filter(|&place| place < begun) {
                let looked = &mut some[place % (2 * AHEAD)];
                let row = |entry| matches!(entry, Entry::Row(_));
                let found = find(pages.page(looked.page), looked.tag, row);
                if let Some((_, Entry::Row(record))) = found {
                    self.records.fetch(record, fetched);
                    looked.row = Some(record);
                }
            }
            if let Some(id) = ids.next() {
                let tag = tag_of(id, self.salt);
                let page = page_of(tag, self.pages);
                some[turn % (2 * AHEAD)] = Looked { id, tag, page, row: None };
                crate::cache::fetch(&pages.page(page)[index::home_of(tag)]);
                begun += 1;
            }
        }
    }

    fn find(&self, pages: &Committed<'_>, id: u64, tag: u32) -> Place {
        let page = pages.page(page_of(tag, self.pages));
        let its_row = |entry| match entry {
            Entry::Row(record) => id_of(self.records.read(record)) == id,
            _ => false,
        };
        if let Some((_, Entry::Row(record))) = find(page, tag, its_row) {
            return Place::Row { record };
        }
        // Ids of one tag are one candidate: they are admitted earlier, at worst.
        match find(page, tag, |entry| matches!(entry, Entry::Candidate(_))) {
            Some((_, Entry::Candidate(pushes))) => Place::Candidate { pushes },
            _ => Place::Absent,
        }
    }

    /// Appends the rows of these ids, one behind the other, as they were before the change under way; how
    /// many of the ids have one. `first` is memory for the first values of a row.
    pub(crate) fn gather(
        &self,
        journal: &Journal,
        ids: Numbers<'_>,
        first: &mut Vec<u64>,
        gathered: &mut Vec<u8>,
    ) -> u64 {
        let shape = self.records.shape;
        gathered.reserve(ids.len() * shape.row_bytes);
        // In words, as it is aligned for every type.
        first.clear();
        first.resize(shape.row_bytes.div_ceil(8), 0);
        let mut have = 0;
        self.look(journal, ids, shape.stream(0).end, |_, id, found| match found {
            Place::Row { record } => {
                have += 1;
                gathered.extend_from_slice(&self.records.read(record)[shape.stream(0)]);
            }
            _ => {
                let first = &mut bytemuck::cast_slice_mut(first)[..shape.row_bytes];
                self.initial.fill(shape.dtype, id, first);
                gathered.extend_from_slice(first);
            }
        });
        have
    }

    /// How many rows may come by pushes that have these ids, which rise and are there once for each
    /// push; `assigned` says that one of them gives values.
    pub(crate) fn count_new(&self, journal: &Journal, ids: &[u64], assigned: bool) -> u64 {
        let mut new = 0;
        let each = ids.chunk_by(|a, b| a == b);
        // They are found in their order.
        let mut pushes = each.clone().map(|of| u32::try_from(of.len()).unwrap_or(u32::MAX));
        self.look(journal, each.map(|of| of[0]), HEAD_BYTES, |_, _, found| {
            let pushes = pushes.next().expect("no more are found than are looked for");
            new += u64::from(self.comes(found, pushes, assigned));
        });
        new
    }

    /// The word of an entry in the journal.
    fn address(&self, page: u32, place: usize) -> Address {
        page_word(self.number, page, place)
    }
}
