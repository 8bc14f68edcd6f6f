//! Growing embedding tables: rows by 64-bit ids, added by the pushes that contain new ids.
//!
//! A table is an `index` over `records`. The index consists of durable words and changes only in
//! commits. A record is written before the commit whose index names it, or changed in place under
//! the undo of the store. So a killed process always leaves the table of one commit; neither growth
//! nor eviction needs a recovery of its own.
//!
//! A pull changes nothing. For an id without a row it returns the row's initial values.

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

use crate::arena::Reservation;
use crate::commit::{Address, Journal, page_word};
use crate::undo::RowLocation;
use change::{DirtyRows, NewId};
use index::{ENTRIES, IndexEntry, Pages, find, page_of, tag_of};
pub use open::TableInputs;
use records::{HEAD_BYTES, Records, id_of};
pub use records::{TableFiles, TableNeed, TablePromises};
use rows::RestoredIndex;
pub(crate) use rows::TableImage;

/// The counters of a table since they were last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// Ids of pushes that had a row.
    pub hits: u64,
    /// Ids of pushes that had no row.
    pub misses: u64,
    /// Rows added.
    pub admitted: u64,
    /// Rows of pushes whose ids got no row. Their gradients are dropped.
    pub turned_away: u64,
    /// Rows evicted, including expired ones.
    pub evicted: u64,
}

/// One partition of a table.
///
/// A change has these steps: [`Table::begin`], `settle`, the rows of the push, `publish` into a
/// transaction, and `committed` after the commit. [`Table::discard`] abandons it. The store takes
/// all steps but the first, together with those of its blocks.
///
/// Invariants: `rows` and `candidates` are the counts in the committed index. Each row's id has one
/// entry, in the page of its tag and reachable from its home.
#[derive(Debug)]
pub struct Table {
    number: u16,
    partition: Partition,
    spec: TableSpec,
    initial: Initial,
    records: Records,
    /// The key of the index's hash.
    salt: u64,
    pages: u32,
    rows: u64,
    candidates: u64,
    /// The maximum number of rows.
    limit: u64,
    /// The newest global step known at the last change or save.
    step: u64,
    integrity: bool,
    /// The budget that the index's memory uses.
    index_reservations: Vec<Reservation>,
    dirty_rows: Option<DirtyRows>,
    /// The buffers of the last finished change, for reuse.
    pooled_dirty_rows: DirtyRows,
    /// The ids of the change in progress that have no row.
    new_ids: Vec<NewId>,
    /// The index being rebuilt from a checkpoint.
    restored: Option<RestoredIndex>,
    counts: TableCounts,
    /// A buffer for copying a row to another record.
    row_buffer: Vec<u8>,
    /// A buffer for the locations of the rows saved for undo.
    locations: Vec<RowLocation>,
}

/// The initial values of a row.
#[derive(Clone, Debug)]
struct Initial {
    initializer: Initializer,
    key: InitialKey,
    slots: Vec<f64>,
}

impl Initial {
    /// Writes the initial values of a row.
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

/// The words of the index's header cell.
const PAGES_WORD: usize = 0;
const FILES_WORD: usize = 1;
const STEP_WORD: usize = 2;
const SLOTS_WORD: usize = 3;

/// The lookup distance: the number of ids between two steps of the lookup of one id.
const LOOKUP_DISTANCE: usize = 16;

/// A lookup in progress.
#[derive(Clone, Copy, Debug, Default)]
struct Lookup {
    id: u64,
    tag: u32,
    page: u32,
    /// The record of the first row entry with its tag.
    row: Option<u32>,
}

/// The committed pages of a table's index.
struct CommittedPages<'a> {
    journal: &'a Journal,
    table: u16,
}

impl Pages for CommittedPages<'_> {
    fn page(&self, page: u32) -> &[u64] {
        match (page as usize) < self.journal.index_pages(self.table) {
            true => self.journal.index_page(self.table, page),
            // A page that a change adds.
            false => &[0; ENTRIES],
        }
    }
}

/// The state of an id in the committed index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdState {
    Absent,
    Candidate { pushes: u32 },
    Row { record: u32 },
}

impl Table {
    /// Returns the partition whose rows the table holds.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the maximum number of rows.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns whether a full table rejects new rows.
    pub fn rejects_when_full(&self) -> bool {
        self.spec.eviction == Eviction::Refuse
    }

    /// Returns whether ids are admitted by chance.
    pub fn admits_by_chance(&self) -> bool {
        matches!(self.spec.admission, RowAdmission::Chance { .. })
    }

    /// Returns the memory of the records, in bytes.
    pub fn bytes(&self) -> u64 {
        self.records.bytes()
    }

    /// Returns the bytes that the records and the index have taken off the budget.
    pub(crate) fn bytes_taken(&self) -> u64 {
        let index = self.index_reservations.iter().map(Reservation::bytes);
        index.fold(self.bytes(), u64::saturating_add)
    }

    /// Returns the counters, and resets them to 0.
    pub fn take_counts(&mut self) -> TableCounts {
        std::mem::take(&mut self.counts)
    }

    fn committed_pages<'a>(&self, journal: &'a Journal) -> CommittedPages<'a> {
        CommittedPages { journal, table: self.number }
    }

    /// Stages the table's header words. Called once in each transaction.
    pub fn stage_head(&self, journal: &mut Journal) {
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

    /// Looks up ids, and calls `found_at` with the position, id and state of each, in order.
    /// `fetched` is the number of bytes to prefetch from each record.
    ///
    /// A lookup has three steps, [`LOOKUP_DISTANCE`] other ids apart: it prefetches the cache line
    /// of the index entry, reads the entry and prefetches its record, and reads the record. Many
    /// lookups wait for memory at once, so none waits long.
    fn look_up(
        &self,
        journal: &Journal,
        ids: impl Iterator<Item = u64>,
        fetched: usize,
        mut found_at: impl FnMut(usize, u64, IdState),
    ) {
        let pages = self.committed_pages(journal);
        let mut lookups = [Lookup::default(); 2 * LOOKUP_DISTANCE];
        let mut ids = ids.fuse();
        let mut begun = 0;
        for round in 0_usize.. {
            if let Some(place) = round.checked_sub(2 * LOOKUP_DISTANCE) {
                if place == begun {
                    break;
                }
                let Lookup { id, tag, row, .. } = lookups[place % (2 * LOOKUP_DISTANCE)];
                // Another id with the same tag is rare.
                let its = row.filter(|&record| id_of(self.records.read(record)) == id);
                let found = match its {
                    Some(record) => IdState::Row { record },
                    None => self.find(&pages, id, tag),
                };
                found_at(place, id, found);
            }
            if let Some(place) = round.checked_sub(LOOKUP_DISTANCE).filter(|&place| place < begun) {
                let lookup = &mut lookups[place % (2 * LOOKUP_DISTANCE)];
                let row = |entry| matches!(entry, IndexEntry::Row(_));
                let found = find(pages.page(lookup.page), lookup.tag, row);
                if let Some((_, IndexEntry::Row(record))) = found {
                    self.records.prefetch(record, fetched);
                    lookup.row = Some(record);
                }
            }
            if let Some(id) = ids.next() {
                let tag = tag_of(id, self.salt);
                let page = page_of(tag, self.pages);
                lookups[round % (2 * LOOKUP_DISTANCE)] = Lookup { id, tag, page, row: None };
                crate::cache::prefetch(&pages.page(page)[index::home_of(tag)]);
                begun += 1;
            }
        }
    }

    fn find(&self, pages: &CommittedPages<'_>, id: u64, tag: u32) -> IdState {
        let page = pages.page(page_of(tag, self.pages));
        let its_row = |entry| match entry {
            IndexEntry::Row(record) => id_of(self.records.read(record)) == id,
            _ => false,
        };
        if let Some((_, IndexEntry::Row(record))) = find(page, tag, its_row) {
            return IdState::Row { record };
        }
        // Ids with the same tag share one candidate; at worst they are admitted too early.
        match find(page, tag, |entry| matches!(entry, IndexEntry::Candidate(_))) {
            Some((_, IndexEntry::Candidate(pushes))) => IdState::Candidate { pushes },
            _ => IdState::Absent,
        }
    }

    /// Appends the rows of these ids to `gathered`, as committed, and returns how many of the ids
    /// have a row. `first` is a buffer for initial values.
    pub fn gather(
        &self,
        journal: &Journal,
        ids: Numbers<'_>,
        first: &mut Vec<u64>,
        gathered: &mut Vec<u8>,
    ) -> u64 {
        let shape = self.records.shape;
        gathered.reserve(ids.len() * shape.row_bytes);
        // Words, so that the buffer is aligned for every type.
        first.clear();
        first.resize(shape.row_bytes.div_ceil(8), 0);
        let mut have = 0;
        self.look_up(journal, ids, shape.stream(0).end, |_, id, found| match found {
            IdState::Row { record } => {
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

    /// Returns how many rows the pushes with these ids may add. The ids ascend, and each occurs
    /// once per push that contains it. `assigned` means that one of the pushes assigns values.
    pub fn count_new(&self, journal: &Journal, ids: &[u64], assigned: bool) -> u64 {
        let mut new = 0;
        let each = ids.chunk_by(|a, b| a == b);
        // Lookups are reported in order.
        let mut pushes = each.clone().map(|of| u32::try_from(of.len()).unwrap_or(u32::MAX));
        self.look_up(journal, each.map(|of| of[0]), HEAD_BYTES, |_, _, found| {
            let pushes = pushes.next().expect("one result per id");
            new += u64::from(self.may_admit(found, pushes, assigned));
        });
        new
    }

    /// Returns the committed rows by id, each with its head and slots; for tests.
    #[cfg(any(test, feature = "simulation"))]
    pub fn contents(&self, journal: &Journal) -> std::collections::BTreeMap<u64, Vec<u8>> {
        let pages = self.committed_pages(journal);
        let words = (0..self.pages).flat_map(|page| pages.page(page).to_vec());
        let records = words.filter_map(|word| match IndexEntry::of(word) {
            IndexEntry::Row(record) => Some(self.records.read(record)),
            _ => None,
        });
        records.map(|record| (id_of(record), record.to_vec())).collect()
    }

    /// Returns the journal address of an entry.
    fn address(&self, page: u32, place: usize) -> Address {
        page_word(self.number, page, place)
    }
}
