//! The change that a push makes to a table: prepared, written to free records or in place, and
//! published by a commit.

use pushpull_common::table::{Eviction, RowHead};

use super::admission::AdmissionDecision;
use super::index::{
    ChangedPages, DirtyPage, DirtyPages, IndexEntry, PageFull, Pages, RECORDS_MAX, find,
    grown_index, page_of, pages_for, tag_of,
};
use super::records::{HEAD_BYTES, TableFiles, head_of, put_head};
use super::{CommittedPages, IdState, Table};
use crate::arena::Part;
use crate::change::Stalled;
use crate::commit::{Journal, index_bytes};
use crate::error::StorageError;
use crate::layout::Kind;

/// A change in progress.
#[derive(Debug, Default)]
pub(super) struct DirtyRows {
    /// The rows of the push, in its order.
    pub(super) rows: Vec<RowMove>,
    /// Whether the target records of the rows are assigned.
    pub(super) settled: bool,
    /// A reused buffer for changed words of otherwise unchanged pages: page, position, word.
    words: Vec<(u32, usize, u64)>,
    /// Dirty pages: those with insertions or removals.
    pages: ChangedPages,
    page_count: u32,
    /// The records of evicted rows.
    pub(super) gone: Vec<u32>,
    /// The global step in the heads of the written rows.
    step: u64,
    /// The number of candidates after the change.
    candidates: u64,
    admitted: u64,
    turned_away: u64,
    misses: u64,
}

/// A row of a change: in place or moved to another record.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowMove {
    pub(super) id: u64,
    /// The current record; `None` if the row is new.
    pub(super) from: Option<u32>,
    /// The target record, once settled; `None` if the id gets no row.
    pub(super) to: Option<u32>,
}

/// An id of a push without a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewId {
    /// The position of the id in the push.
    at: usize,
    state: IdState,
    decision: AdmissionDecision,
}

impl DirtyRows {
    /// Returns the free records that the change writes.
    pub(super) fn taken(&self) -> impl DoubleEndedIterator<Item = u32> {
        self.rows.iter().filter(|row| row.to != row.from).filter_map(|row| row.to)
    }

    /// Returns an upper bound on the number of words that change.
    fn words(&self) -> usize {
        self.rows.len() + self.pages.values().map(DirtyPage::words_max).sum::<usize>()
    }
}

impl Table {
    /// Prepares a change of the rows with these ascending ids at a global step, by the gradient with
    /// the number `count` in the training. Discards the previous change if it was not published.
    ///
    /// # Errors
    /// If there is no memory for the change now. Nothing was changed then.
    pub fn begin(
        &mut self,
        journal: &mut Journal,
        ids: &[u64],
        step: u64,
        count: u64,
        assigned: bool,
    ) -> Result<(), Stalled> {
        self.discard();
        self.step = self.step.max(step);
        self.ensure_free_records(ids.len())?;
        let before = std::mem::take(&mut self.pooled_dirty_rows);
        let mut dirty = DirtyRows {
            rows: before.rows,
            words: before.words,
            page_count: self.pages,
            candidates: self.candidates,
            ..DirtyRows::default()
        };
        let mut new_ids = std::mem::take(&mut self.new_ids);
        new_ids.clear();
        self.look_up(journal, ids.iter().copied(), HEAD_BYTES, |at, id, state| {
            let from = match state {
                IdState::Row { record } => Some(record),
                _ => {
                    let decision = self.decide(id, state, count, assigned);
                    new_ids.push(NewId { at, state, decision });
                    None
                }
            };
            dirty.rows.push(RowMove { id, from, to: from });
        });
        let adds_entries = new_ids.iter().any(|new| new.decision != AdmissionDecision::Rejected);
        if adds_entries || self.spec.expire_after_steps.is_some() {
            self.prepare_dirty_pages(journal, ids, &mut new_ids, &mut dirty, count);
        }
        let rejected = new_ids.iter().filter(|new| new.decision != AdmissionDecision::Row).count();
        dirty.misses = new_ids.len() as u64;
        dirty.turned_away = rejected as u64;
        self.new_ids = new_ids;
        let pages = dirty.page_count as usize;
        dirty.step = self.step;
        self.dirty_rows = Some(dirty);
        let reserved = self.ensure_pages(journal, pages);
        if reserved.is_err() {
            self.discard();
        }
        Ok(reserved?)
    }

    /// Returns whether the target records of the change are assigned. Also true if there is no
    /// change.
    pub(crate) fn is_settled(&self) -> bool {
        self.dirty_rows.as_ref().is_none_or(|dirty| dirty.settled)
    }

    /// Returns the undo bytes needed to change the rows in place; `None` if a reader pins records,
    /// so that they cannot be changed in place.
    pub(crate) fn undo_need(&mut self) -> Option<usize> {
        let Some(dirty) = &self.dirty_rows else { return Some(0) };
        // Counted as one tile per row, which is an upper bound for any tile size.
        let need = dirty.rows.len().saturating_mul(self.records.shape.undo_bytes());
        if self.records.are_pinned() { None } else { Some(need) }
    }

    /// Assigns the target records of the change. Existing rows stay in place if `in_place`; all
    /// other rows get free records.
    pub(crate) fn settle(&mut self, in_place: bool) {
        let Some(dirty) = &mut self.dirty_rows else { return };
        let mut take = || self.records.take().expect("begin reserved enough free records");
        if !in_place {
            let existing = dirty.rows.iter_mut().filter(|row| row.from.is_some());
            existing.for_each(|row| row.to = Some(take()));
        }
        for new in self.new_ids.iter().filter(|new| new.decision == AdmissionDecision::Row) {
            dirty.rows[new.at].to = Some(take());
        }
        dirty.settled = true;
    }

    /// Returns an upper bound on the words that the change adds to its transaction.
    pub(crate) fn dirty_words(&self) -> usize {
        self.dirty_rows.as_ref().map_or(0, DirtyRows::words)
    }

    /// Ensures that at least `rows` records are free.
    fn ensure_free_records(&mut self, rows: usize) -> Result<(), Stalled> {
        while self.records.free_count() < rows {
            // While a checkpoint pins records, a table may use twice its limit.
            let most = (2 * self.limit).saturating_add(rows as u64);
            if self.records.count() >= most {
                return Err(Stalled::NoFreeBlock);
            }
            match self.records.grow() {
                // A checkpoint that ends gives back enough, so nobody has to wait for memory.
                Err(StorageError::DoesNotFit { .. })
                    if self.records.free_count_unpinned() >= rows =>
                {
                    return Err(Stalled::NoFreeBlock);
                }
                grown => grown?,
            }
        }
        Ok(())
    }

    /// Ensures that the index has a capacity of `pages` pages.
    pub(super) fn ensure_pages(
        &mut self,
        journal: &mut Journal,
        pages: usize,
    ) -> Result<(), StorageError> {
        let before = journal.index_pages(self.number);
        if pages > before {
            let TableFiles { arena, generation, promises, .. } = self.records.files();
            let name = Part::Table(self.number).file_name(Kind::Index, *generation);
            let path = arena.storage.path(&name);
            let more = grown_index(pages);
            let bytes = index_bytes(more) - index_bytes(before);
            let reservation = promises.index.reserve(bytes)?;
            journal.grow_index(self.number, more, path)?;
            self.index_reservations.push(reservation);
        }
        Ok(())
    }

    /// Writes the dirty pages: admissions and evictions. Moves of existing rows to other records
    /// are not included.
    fn prepare_dirty_pages(
        &self,
        journal: &Journal,
        ids: &[u64],
        new_ids: &mut [NewId],
        dirty: &mut DirtyRows,
        number: u64,
    ) {
        let committed = self.committed_pages(journal);
        let mut pages = ChangedPages::new();
        let mut count = dirty.page_count;
        let mut dirty_pages = DirtyPages::new(&committed, &mut pages, &mut count);
        self.expire(&mut dirty_pages, &mut dirty.gone, ids, number);
        let mut rows = self.rows - dirty.gone.len() as u64;
        let mut evicts = self.spec.eviction != Eviction::Refuse;
        for NewId { at, state, decision } in new_ids {
            let tag = tag_of(ids[*at], self.salt);
            match *decision {
                AdmissionDecision::Rejected => continue,
                AdmissionDecision::Counted(pushes) => {
                    let new = *state == IdState::Absent;
                    if new && dirty.candidates >= self.limit {
                        dirty.candidates -=
                            u64::from(remove_rarest_candidate(&mut dirty_pages, tag));
                    }
                    let insertion =
                        insert_entry(&mut dirty_pages, tag, IndexEntry::Candidate(pushes));
                    dirty.candidates += u64::from(insertion == Insertion::Added);
                }
                AdmissionDecision::Row => {
                    let full = rows >= self.limit;
                    // After a failed eviction no further one is tried: this push adds no evictable
                    // row.
                    evicts = evicts && (!full || self.evict(&mut dirty_pages, dirty, ids, number));
                    if full && !evicts {
                        *decision = AdmissionDecision::Rejected;
                        continue;
                    }
                    rows -= u64::from(full);
                    // The record is assigned later, by `settle`.
                    match insert_entry(&mut dirty_pages, tag, IndexEntry::Row(UNKNOWN)) {
                        Insertion::NotInserted => {
                            *decision = AdmissionDecision::Rejected;
                            continue;
                        }
                        Insertion::ReplacedCandidate => dirty.candidates -= 1,
                        Insertion::Added => {}
                    }
                    rows += 1;
                    dirty.admitted += 1;
                }
            }
        }
        dirty_pages.grow(pages_for(rows + dirty.candidates));
        dirty.pages = pages;
        dirty.page_count = count;
    }

    /// Points the entry of a row from record `before` to record `to`: in the dirty page, or as a
    /// changed word of a page that is not dirty.
    fn point_entry(
        &self,
        committed: &CommittedPages<'_>,
        dirty: &mut DirtyRows,
        words: &mut Vec<(u32, usize, u64)>,
        id: u64,
        before: u32,
        to: u32,
    ) {
        let tag = tag_of(id, self.salt);
        let number = page_of(tag, dirty.page_count);
        let word = IndexEntry::Row(to).word(tag);
        let named = |entry| entry == IndexEntry::Row(before);
        let committed = committed.page(number);
        if let Some(page) = dirty.pages.get_mut(&number) {
            if let Some((place, _)) = page.find(committed, tag, named) {
                page.set(committed, place, word);
            }
        } else if let Some((place, _)) = find(committed, tag, named) {
            words.push((number, place, word));
        }
    }

    /// Stages the change in a transaction, except for [`Table::stage_head`], and makes it visible
    /// to reads. Values read before the commit must not leave the shard.
    pub(crate) fn publish(&mut self, journal: &mut Journal) {
        let Some(mut dirty) = self.dirty_rows.take() else { return };
        let mut changed = std::mem::take(&mut dirty.words);
        let rows = std::mem::take(&mut dirty.rows);
        let moved = rows.iter().filter(|row| row.to != row.from);
        let moved = || moved.clone().filter_map(|row| Some((row.id, row.from, row.to?)));
        let pages = self.committed_pages(journal);
        for (id, from, to) in moved() {
            let before = from.unwrap_or(UNKNOWN);
            self.point_entry(&pages, &mut dirty, &mut changed, id, before, to);
        }
        for (&number, page) in &dirty.pages {
            // Pages after the committed ones contain zeros.
            let differences = page.differences(pages.page(number));
            changed.extend(differences.map(|(place, word)| (number, place, word)));
        }
        debug_assert!(
            journal.free_words() >= changed.len(),
            "the intent has no capacity for the words of all tables"
        );
        for (page, place, word) in changed.drain(..) {
            journal.stage(self.address(page, place), u64::from_le(word));
        }
        for (_, from, to) in moved() {
            if dirty.step != self.step {
                // A checkpoint of a newer step has begun since, and does not contain this change.
                let record = self.records.write(to);
                let head = RowHead { step: self.step, ..head_of(record) };
                put_head(head, record, self.integrity);
            }
            self.records.set_live(to);
            from.into_iter().for_each(|from| self.records.free(from));
        }
        dirty.gone.iter().for_each(|&gone| self.records.free(gone));
        self.pages = dirty.page_count;
        self.rows += dirty.admitted;
        self.rows -= dirty.gone.len() as u64;
        self.candidates = dirty.candidates;
        self.counts.hits += rows.len() as u64 - dirty.misses;
        self.counts.misses += dirty.misses;
        self.counts.admitted += dirty.admitted;
        self.counts.turned_away += dirty.turned_away;
        self.counts.evicted += dirty.gone.len() as u64;
        dirty.rows = rows;
        dirty.words = changed;
        self.recycle(dirty);
    }

    /// Frees the records that the change replaced. Called after the commit.
    pub(crate) fn committed(&mut self) {
        self.records.committed();
    }

    /// Discards the change in progress.
    pub fn discard(&mut self) {
        if let Some(dirty) = self.dirty_rows.take() {
            self.records.give_back(dirty.taken());
            self.recycle(dirty);
        }
    }

    /// Keeps the buffers of a finished change for the next one, which is usually as large.
    fn recycle(&mut self, mut dirty: DirtyRows) {
        dirty.rows.clear();
        dirty.words.clear();
        dirty.pages.clear();
        self.pooled_dirty_rows = dirty;
    }
}

/// The number of a record that is not assigned yet.
const UNKNOWN: u32 = RECORDS_MAX;

/// The outcome of [`insert_entry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Insertion {
    ReplacedCandidate,
    Added,
    /// Its page is full.
    NotInserted,
}

/// Inserts an entry, replacing the candidate of the same tag if there is one.
fn insert_entry<P: Pages>(
    dirty_pages: &mut DirtyPages<'_, P>,
    tag: u32,
    entry: IndexEntry,
) -> Insertion {
    let candidate = |entry| matches!(entry, IndexEntry::Candidate(_));
    match dirty_pages.find(tag, candidate) {
        Some((page, place, _)) => {
            dirty_pages.replace(page, place, tag, entry);
            Insertion::ReplacedCandidate
        }
        None => match dirty_pages.insert(tag, entry) {
            Ok(()) => Insertion::Added,
            Err(PageFull) => Insertion::NotInserted,
        },
    }
}

/// Removes the candidate with the fewest pushes from the page of a tag. Returns whether there was
/// one.
fn remove_rarest_candidate<P: Pages>(dirty_pages: &mut DirtyPages<'_, P>, tag: u32) -> bool {
    let page = page_of(tag, dirty_pages.count());
    let words = dirty_pages.page(page).iter().enumerate();
    let candidates = words.filter_map(|(place, &word)| match IndexEntry::of(word) {
        IndexEntry::Candidate(pushes) => Some((pushes, place)),
        _ => None,
    });
    let rarest = candidates.min();
    if let Some((_, place)) = rarest {
        dirty_pages.remove(page, place);
    }
    rarest.is_some()
}
