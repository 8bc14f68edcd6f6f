//! What a push does to a table: drafted, written to spare records or where the rows lie, and made good
//! by a commit.

use std::collections::BTreeMap;

use pushpull_common::table::Eviction;

use super::admission::Verdict;
use super::index::{
    Crowded, DirtyPages, ENTRIES, Entry, PAGES_MAX, Pages, RECORDS_MAX, find, page_of, pages_for,
    tag_of,
};
use super::records::{Files, HEAD_BYTES, head_of, put_head};
use super::{Committed, Place, Table};
use crate::arena::Part;
use crate::checkpoint::RowHead;
use crate::commit::{Journal, index_bytes};
use crate::error::StorageError;
use crate::layout::Kind;
use crate::store::Stalled;

/// A change under way.
#[derive(Debug, Default)]
pub(super) struct DirtyRows {
    /// What becomes of each row of the push, in their order.
    pub(super) rows: Vec<Moved>,
    /// Whether that is settled.
    pub(super) settled: bool,
    /// Memory for the words of pages that change.
    words: Vec<(u32, usize, u64)>,
    /// Pages that change otherwise.
    pages: BTreeMap<u32, Vec<u64>>,
    page_count: u32,
    /// Records of rows that are evicted.
    pub(super) gone: Vec<u32>,
    /// The global step that the rows which are written say.
    step: u64,
    /// How many candidates there will be.
    candidates: u64,
    admitted: u64,
    turned_away: u64,
    misses: u64,
}

/// A row that is changed: in another record, or where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    pub(super) id: u64,
    /// Where it is; nowhere if it is new.
    pub(super) from: Option<u32>,
    /// Where it will be, once that is settled; nowhere if its id is not given a row.
    pub(super) to: Option<u32>,
}

/// An id of a push that has no row yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct New {
    /// Which of the push.
    at: usize,
    place: Place,
    verdict: Verdict,
}

impl DirtyRows {
    /// The spare records that are written.
    pub(super) fn taken(&self) -> impl DoubleEndedIterator<Item = u32> {
        self.rows.iter().filter(|row| row.to != row.from).filter_map(|row| row.to)
    }

    /// At most so many words change.
    fn words(&self) -> usize {
        self.rows.len() + self.pages.len() * ENTRIES
    }
}

impl Table {
    /// Prepares the change of the rows of these ids, which rise, by the push that makes `version` at
    /// a global step. What was drafted of another change is forgotten. An error says why
    /// there is no memory for it now, and nothing was done.
    pub(crate) fn begin(
        &mut self,
        journal: &mut Journal,
        ids: &[u64],
        (step, version): (u64, u64),
        assigned: bool,
    ) -> Result<(), Stalled> {
        self.discard();
        self.step = self.step.max(step);
        self.have_free_records(ids.len())?;
        let before = std::mem::take(&mut self.pooled_vec);
        let mut dirty = DirtyRows {
            rows: before.rows,
            words: before.words,
            page_count: self.pages,
            candidates: self.candidates,
            ..DirtyRows::default()
        };
        let mut new = std::mem::take(&mut self.new);
        new.clear();
        self.look(journal, ids.iter().copied(), HEAD_BYTES, |at, id, place| {
            let from = match place {
                Place::Row { record } => Some(record),
                _ => {
                    let verdict = self.judge(id, place, version, assigned);
                    new.push(New { at, place, verdict });
                    None
                }
            };
            dirty.rows.push(Moved { id, from, to: from });
        });
        let comes = new.iter().any(|new| new.verdict != Verdict::Out);
        if comes || self.spec.expire_after_steps.is_some() {
            self.write_dirty_pages(journal, ids, &mut new, &mut dirty, version);
        }
        let out = new.iter().filter(|new| new.verdict != Verdict::Row).count();
        (dirty.misses, dirty.turned_away) = (new.len() as u64, out as u64);
        self.new = new;
        let pages = dirty.page_count as usize;
        dirty.step = self.step;
        self.dirty_pages = Some(dirty);
        let push_slot = self.have_pages(journal, pages);
        if push_slot.is_err() {
            self.discard();
        }
        Ok(push_slot?)
    }

    /// Whether it is known where the rows of the change under way will be, if there is one.
    pub(crate) fn is_settled(&self) -> bool {
        self.dirty_pages.as_ref().is_none_or(|dirty_pages| dirty_pages.settled)
    }

    /// What keeping the rows of the change under way would take, if they may be changed where they lie:
    /// nothing if they may not, as somebody reads them.
    pub(crate) fn undo_need(&mut self) -> Option<usize> {
        let Some(dirty_pages) = &self.dirty_pages else { return Some(0) };
        // Each as a tile of its own, however many of them are changed at a time.
        let need = dirty_pages.rows.len().saturating_mul(self.records.shape.kept_bytes());
        if self.records.are_pinned() { None } else { Some(need) }
    }

    /// Settles where the rows of the change under way will be: those that exist where they are, if
    /// `in_place`, and all others in spare records.
    pub(crate) fn settle(&mut self, in_place: bool) {
        let Some(dirty) = &mut self.dirty_pages else { return };
        let mut take = || self.records.take().expect("the beginning had so many made");
        if !in_place {
            let are_here = dirty.rows.iter_mut().filter(|row| row.from.is_some());
            are_here.for_each(|row| row.to = Some(take()));
        }
        for new in self.new.iter().filter(|new| new.verdict == Verdict::Row) {
            dirty.rows[new.at].to = Some(take());
        }
        dirty.settled = true;
    }

    /// How many words the change under way puts into its transaction, at most.
    pub(crate) fn dirty_words(&self) -> usize {
        self.dirty_pages.as_ref().map_or(0, DirtyRows::words)
    }

    /// Makes sure that so many records can be written.
    fn have_free_records(&mut self, rows: usize) -> Result<(), Stalled> {
        while self.records.free_count() < rows {
            // While a checkpoint reads what was, there may be twice as many as otherwise.
            let most = (2 * self.limit).saturating_add(rows as u64);
            if self.records.count() >= most {
                return Err(Stalled::NoFreeBlock);
            }
            self.records.grow()?;
        }
        Ok(())
    }

    /// Makes sure that the index has room for so many pages.
    pub(super) fn have_pages(
        &mut self,
        journal: &mut Journal,
        pages: usize,
    ) -> Result<(), StorageError> {
        let before = journal.index_pages(self.number);
        if pages > before {
            let Files { arena, generation, budget, .. } = self.records.files();
            let name = Part::Table(self.number).file_name(Kind::Index, *generation);
            let path = arena.place.path(&name);
            let more = (pages + (pages / 8).clamp(8, 4096)).min(PAGES_MAX as usize);
            let bytes = index_bytes(more) - index_bytes(before);
            let loan = budget.take(bytes)?;
            journal.grow_index(self.number, more, path)?;
            self.index_loans.push(loan);
        }
        Ok(())
    }

    /// Drafts all that changes pages otherwise than by naming other records: who comes and who goes.
    fn write_dirty_pages(
        &self,
        journal: &Journal,
        ids: &[u64],
        new: &mut [New],
        dirty: &mut DirtyRows,
        version: u64,
    ) {
        let committed = self.committed_pages(journal);
        let (mut pages, mut count) = (BTreeMap::new(), dirty.page_count);
        let mut dirty_pages = DirtyPages::new(&committed, &mut pages, &mut count);
        self.expire(&mut dirty_pages, &mut dirty.gone, ids, version);
        let mut rows = self.rows - dirty.gone.len() as u64;
        let mut evicts = self.spec.eviction != Eviction::Refuse;
        for New { at, place, verdict } in new {
            let tag = tag_of(ids[*at], self.salt);
            match *verdict {
                Verdict::Out => continue,
                Verdict::Counted(pushes) => {
                    let new = *place == Place::Absent;
                    if new && dirty.candidates >= self.limit {
                        dirty.candidates -= u64::from(forget_a_candidate(&mut dirty_pages, tag));
                    }
                    let put = put(&mut dirty_pages, tag, Entry::Candidate(pushes));
                    dirty.candidates += u64::from(put == Put::Beside);
                }
                Verdict::Row => {
                    let full = rows >= self.limit;
                    // Who finds nobody that may go need not look again: none comes by this push.
                    evicts = evicts && (!full || self.evict(&mut dirty_pages, dirty, ids, version));
                    if full && !evicts {
                        *verdict = Verdict::Out;
                        continue;
                    }
                    rows -= u64::from(full);
                    // Which record it is in is known later.
                    match put(&mut dirty_pages, tag, Entry::Row(UNKNOWN)) {
                        Put::Nowhere => {
                            *verdict = Verdict::Out;
                            continue;
                        }
                        Put::OverACandidate => dirty.candidates -= 1,
                        Put::Beside => {}
                    }
                    rows += 1;
                    dirty.admitted += 1;
                }
            }
        }
        dirty_pages.grow(pages_for(rows + dirty.candidates));
        (dirty.pages, dirty.page_count) = (pages, count);
    }

    /// Has the entry of a row, which named `before`, name another record: in the page as it will be, or
    /// as a word of one that does not change otherwise.
    fn name(
        &self,
        committed: &Committed<'_>,
        dirty: &mut DirtyRows,
        words: &mut Vec<(u32, usize, u64)>,
        (id, before, to): (u64, u32, u32),
    ) {
        let tag = tag_of(id, self.salt);
        let (number, word) = (page_of(tag, dirty.page_count), Entry::Row(to).word(tag));
        let named = |entry| entry == Entry::Row(before);
        if let Some(page) = dirty.pages.get_mut(&number) {
            if let Some((place, _)) = find(page, tag, named) {
                page[place] = word;
            }
        } else if let Some((place, _)) = find(committed.page(number), tag, named) {
            words.push((number, place, word));
        }
    }

    /// Puts the change into a transaction, but for [`Table::stage_head`], and lets it be read: what is read before the transaction is
    /// made must not leave the shard.
    pub(crate) fn publish(&mut self, journal: &mut Journal) {
        let Some(mut dirty) = self.dirty_pages.take() else { return };
        let mut changed = std::mem::take(&mut dirty.words);
        let rows = std::mem::take(&mut dirty.rows);
        let moved = rows.iter().filter(|row| row.to != row.from);
        let moved = || moved.clone().filter_map(|row| Some((row.id, row.from, row.to?)));
        let pages = self.committed_pages(journal);
        for (id, from, to) in moved() {
            let before = from.unwrap_or(UNKNOWN);
            self.name(&pages, &mut dirty, &mut changed, (id, before, to));
        }
        for (&number, page) in &dirty.pages {
            // What lies behind the committed pages is zeros.
            let before = pages.page(number);
            let differ = page.iter().zip(before).enumerate().filter(|(_, (now, was))| now != was);
            changed.extend(differ.map(|(place, (&now, _))| (number, place, now)));
        }
        debug_assert!(
            journal.push_slot() >= changed.len(),
            "room was made for all tables together"
        );
        for (page, place, word) in changed.drain(..) {
            journal.stage(self.address(page, place), u64::from_le(word));
        }
        for (_, from, to) in moved() {
            if dirty.step != self.step {
                // A checkpoint of a newer step was begun since: it does not have this change.
                let record = self.records.write(to);
                let head = RowHead { step: self.step, ..head_of(record) };
                put_head(head, record, self.integrity);
            }
            self.records.set_live(to);
            from.into_iter().for_each(|from| self.records.free(from));
        }
        dirty.gone.iter().for_each(|&gone| self.records.free(gone));
        self.pages = dirty.page_count;
        self.rows = self.rows + dirty.admitted - dirty.gone.len() as u64;
        self.candidates = dirty.candidates;
        self.counts.hits += rows.len() as u64 - dirty.misses;
        self.counts.misses += dirty.misses;
        self.counts.admitted += dirty.admitted;
        self.counts.turned_away += dirty.turned_away;
        self.counts.evicted += dirty.gone.len() as u64;
        (dirty.rows, dirty.words) = (rows, changed);
        self.keep(dirty);
    }

    /// The transaction is made: what the change replaced is free.
    pub(crate) fn committed(&mut self) {
        self.records.committed();
    }

    /// Forgets the change under way.
    pub(crate) fn discard(&mut self) {
        if let Some(dirty) = self.dirty_pages.take() {
            self.records.give_back(dirty.taken());
            self.keep(dirty);
        }
    }

    /// Keeps the memory of a change that is over: the next one is as large as that.
    fn keep(&mut self, mut dirty: DirtyRows) {
        dirty.rows.clear();
        dirty.words.clear();
        dirty.pages.clear();
        self.pooled_vec = dirty;
    }
}

/// A record whose number is not known yet.
const UNKNOWN: u32 = RECORDS_MAX;

/// Where an entry was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Put {
    OverACandidate,
    Beside,
    /// Its page is crowded.
    Nowhere,
}

/// Gives a tag this entry, in place of its candidate if it has one.
fn put<P: Pages>(dirty_pages: &mut DirtyPages<'_, P>, tag: u32, entry: Entry) -> Put {
    let page = page_of(tag, dirty_pages.count());
    let candidate = |entry| matches!(entry, Entry::Candidate(_));
    match find(dirty_pages.page(page), tag, candidate) {
        Some((place, _)) => {
            dirty_pages.replace(page, place, entry);
            Put::OverACandidate
        }
        None => match dirty_pages.insert(tag, entry) {
            Ok(()) => Put::Beside,
            Err(Crowded) => Put::Nowhere,
        },
    }
}

/// Forgets the candidate that fewest pushes had, of those in the page of a tag; whether there is one.
fn forget_a_candidate<P: Pages>(dirty_pages: &mut DirtyPages<'_, P>, tag: u32) -> bool {
    let page = page_of(tag, dirty_pages.count());
    let words = dirty_pages.page(page).iter().enumerate();
    let candidates = words.filter_map(|(place, &word)| match Entry::of(word) {
        Entry::Candidate(pushes) => Some((pushes, place)),
        _ => None,
    });
    let rarest = candidates.min();
    if let Some((_, place)) = rarest {
        dirty_pages.remove(page, place);
    }
    rarest.is_some()
}
