//! What a push does to a table: drafted, written to spare records, and named by a commit.

use std::collections::BTreeMap;
use std::ops::Range;

use pushpull_common::table::Eviction;

use super::admission::Verdict;
use super::index::{
    Crowded, Draft, ENTRIES, Entry, PAGES_MAX, Pages, RECORDS_MAX, find, page_of, pages_for, tag_of,
};
use super::records::{Files, head_of, put_head};
use super::{Place, Table};
use crate::arena::Part;
use crate::checkpoint::RowHead;
use crate::commit::{Journal, index_bytes};
use crate::error::StorageError;
use crate::layout::Kind;
use crate::store::{Change, NoSpareBlock, SLOTS_MAX};

/// What is changed at a time stays in the fastest cache, slots and all.
const TILE_BYTES: usize = 4 << 10;

/// A change under way.
#[derive(Debug, Default)]
pub(super) struct Drafted {
    /// What becomes of each row of the push, in their order.
    rows: Vec<Moved>,
    /// Entries that name other records, in pages that do not change otherwise.
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
    hits: u64,
}

/// A row that moves from a record to another.
#[derive(Clone, Copy, Debug)]
struct Moved {
    id: u64,
    /// Where it is; nowhere if it is new.
    from: Option<u32>,
    /// Where it will be; nowhere if its id is not given a row.
    to: Option<u32>,
}

impl Drafted {
    /// The records that are written.
    pub(super) fn taken(&self) -> impl DoubleEndedIterator<Item = u32> {
        self.rows.iter().filter_map(|row| row.to)
    }

    /// At most so many words change.
    fn words(&self) -> usize {
        self.words.len() + self.pages.len() * ENTRIES
    }
}

impl Table {
    /// Prepares the change of the rows of these ids, which rise, by the push that makes `version` at
    /// a global step. What was drafted of another change is forgotten. An error says that there is
    /// no memory for it now, and nothing was done.
    pub(crate) fn begin(
        &mut self,
        journal: &mut Journal,
        ids: &[u64],
        (step, version): (u64, u64),
        assigned: bool,
    ) -> Result<(), NoSpareBlock> {
        self.discard();
        self.step = self.step.max(step);
        self.have_spare(ids.len())?;
        let before = std::mem::take(&mut self.reused);
        let mut drafted = Drafted {
            rows: before.rows,
            words: before.words,
            page_count: self.pages,
            candidates: self.candidates,
            ..Drafted::default()
        };
        let mut places = std::mem::take(&mut self.places);
        places.clear();
        self.look(journal, ids.iter().copied(), true, |_, id, place| {
            let verdict = self.judge(id, place, version, assigned);
            places.push((place, verdict));
        });
        let is_new = |&(place, verdict): &(Place, Verdict)| {
            !matches!(place, Place::Row { .. }) && verdict != Verdict::Out
        };
        if places.iter().any(is_new) || self.spec.expire_after_steps.is_some() {
            self.draft_pages(journal, ids, &mut places, &mut drafted, version);
        }
        for (&id, &(place, verdict)) in ids.iter().zip(&places) {
            let from = match place {
                Place::Row { record, .. } => Some(record),
                _ => None,
            };
            drafted.hits += u64::from(from.is_some());
            if verdict != Verdict::Row {
                drafted.turned_away += 1;
                drafted.rows.push(Moved { id, from, to: None });
                continue;
            }
            let to = self.records.take();
            drafted.rows.push(Moved { id, from, to });
            let Some(to) = to else {
                self.draft = Some(drafted);
                self.discard();
                return Err(NoSpareBlock);
            };
            self.name(&mut drafted, id, place, to);
        }
        self.places = places;
        let pages = drafted.page_count as usize;
        drafted.step = self.step;
        self.draft = Some(drafted);
        let room = self.have_pages(journal, pages).map_err(|_| NoSpareBlock);
        if room.is_err() {
            self.discard();
        }
        room
    }

    /// How many words the change under way puts into its transaction, at most.
    pub(crate) fn drafted_words(&self) -> usize {
        self.draft.as_ref().map_or(0, Drafted::words)
    }

    /// Makes sure that so many records can be written.
    fn have_spare(&mut self, rows: usize) -> Result<(), NoSpareBlock> {
        while self.records.spare() < rows {
            // While a checkpoint reads what was, there may be twice as many as otherwise.
            let most = (2 * self.limit).saturating_add(rows as u64);
            if self.records.count() >= most {
                return Err(NoSpareBlock);
            }
            self.records.grow().map_err(|_| NoSpareBlock)?;
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
    fn draft_pages(
        &self,
        journal: &Journal,
        ids: &[u64],
        places: &mut [(Place, Verdict)],
        drafted: &mut Drafted,
        version: u64,
    ) {
        let committed = self.committed_pages(journal);
        let (mut pages, mut count) = (BTreeMap::new(), drafted.page_count);
        let mut draft = Draft::new(&committed, &mut pages, &mut count);
        self.expire(&mut draft, &mut drafted.gone, ids, version);
        let mut rows = self.rows - drafted.gone.len() as u64;
        let mut evicts = self.spec.eviction != Eviction::Refuse;
        for (&id, (place, verdict)) in ids.iter().zip(places) {
            let tag = tag_of(id, self.salt);
            match (*place, *verdict) {
                (Place::Row { .. }, _) | (_, Verdict::Out) => continue,
                (_, Verdict::Counted(pushes)) => {
                    let new = *place == Place::Absent;
                    if new && drafted.candidates >= self.limit {
                        drafted.candidates -= u64::from(forget_a_candidate(&mut draft, tag));
                    }
                    let put = put(&mut draft, tag, Entry::Candidate(pushes));
                    drafted.candidates += u64::from(put == Put::Beside);
                }
                (_, Verdict::Row) => {
                    let full = rows >= self.limit;
                    // Who finds nobody that may go need not look again: none comes by this push.
                    evicts = evicts && (!full || self.evict(&mut draft, drafted, ids, version));
                    if full && !evicts {
                        *verdict = Verdict::Out;
                        continue;
                    }
                    rows -= u64::from(full);
                    // Which record it is in is known later.
                    match put(&mut draft, tag, Entry::Row(UNKNOWN)) {
                        Put::Nowhere => {
                            *verdict = Verdict::Out;
                            continue;
                        }
                        Put::OverACandidate => drafted.candidates -= 1,
                        Put::Beside => {}
                    }
                    rows += 1;
                    drafted.admitted += 1;
                }
            }
        }
        draft.grow(pages_for(rows + drafted.candidates));
        (drafted.pages, drafted.page_count) = (pages, count);
    }

    /// Has the entry of a row name another record.
    fn name(&self, drafted: &mut Drafted, id: u64, place: Place, to: u32) {
        let tag = tag_of(id, self.salt);
        let before = match place {
            Place::Row { record, page, place } => {
                if !drafted.pages.contains_key(&page) {
                    drafted.words.push((page, place, Entry::Row(to).word(tag)));
                    return;
                }
                Entry::Row(record)
            }
            _ => Entry::Row(UNKNOWN),
        };
        let page = page_of(tag, drafted.page_count);
        if let Some(page) = drafted.pages.get_mut(&page)
            && let Some((place, _)) = find(page, tag, |entry| entry == before)
        {
            page[place] = Entry::Row(to).word(tag);
        }
    }

    /// Changes some rows of those that were named at the beginning, by rows of the push that lie one
    /// behind the other.
    pub(crate) fn change_rows(&mut self, change: Change<'_>, places: Range<usize>, input: &[u8]) {
        let Some(drafted) = self.draft.take() else { return };
        let shape = self.records.shape;
        let each = (TILE_BYTES / shape.row_bytes).max(1);
        let rows = &drafted.rows[places];
        for (rows, input) in rows.chunks(each).zip(input.chunks(each * shape.row_bytes)) {
            self.change_tile(change, rows, input);
        }
        self.draft = Some(drafted);
    }

    fn change_tile(&mut self, change: Change<'_>, rows: &[Moved], input: &[u8]) {
        let shape = self.records.shape;
        let (row_bytes, streams) = (shape.row_bytes, 1 + shape.slots);
        let count = rows.iter().filter(|row| row.to.is_some()).count();
        if count == 0 {
            return;
        }
        let stream_bytes = (count * row_bytes).next_multiple_of(8);
        let mut tile = std::mem::take(&mut self.tile);
        // Behind the streams lies the input of the rows that are changed, if it is not all.
        let words = (streams + 1) * stream_bytes / 8;
        if tile.len() < words {
            tile.resize(words, 0);
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut tile[..words]);
        let (bytes, chosen) = bytes.split_at_mut(streams * stream_bytes);
        for record in rows.iter().filter_map(|row| row.to) {
            self.records.fetch(record, true);
        }
        let changed =
            || rows.iter().zip(input.chunks_exact(row_bytes)).filter(|(row, _)| row.to.is_some());
        for (place, (row, _)) in changed().enumerate() {
            for stream in 0..streams {
                let start = stream * stream_bytes + place * row_bytes;
                let out = &mut bytes[start..start + row_bytes];
                match (row.from, stream) {
                    (Some(from), _) => {
                        out.copy_from_slice(&self.records.read(from)[shape.stream(stream)]);
                    }
                    (None, 0) => self.initial.fill(shape.dtype, row.id, out),
                    (None, slot) => self.initial.fill_slot(shape.dtype, slot - 1, out),
                }
            }
        }
        let input = match count == rows.len() {
            true => &input[..count * row_bytes],
            false => {
                for ((_, input), out) in changed().zip(chosen.chunks_exact_mut(row_bytes)) {
                    out.copy_from_slice(input);
                }
                &chosen[..count * row_bytes]
            }
        };
        let (values, rest) = bytes.split_at_mut(stream_bytes);
        let mut slots: [&mut [u8]; SLOTS_MAX] = Default::default();
        let has_slots = change.slots();
        for (slot, bytes) in
            slots.iter_mut().zip(rest.chunks_exact_mut(stream_bytes)).take(has_slots)
        {
            *slot = &mut bytes[..count * row_bytes];
        }
        change.in_place(&mut values[..count * row_bytes], &mut slots[..has_slots], input);
        for (place, (row, _)) in changed().enumerate() {
            let pushes = row.from.map_or(0, |from| head_of(self.records.read(from)).pushes);
            let head = RowHead { id: row.id, step: self.step, pushes: pushes.saturating_add(1) };
            let Some(to) = row.to else { continue };
            let record = self.records.write(to);
            for stream in 0..streams {
                let start = stream * stream_bytes + place * row_bytes;
                record[shape.stream(stream)].copy_from_slice(&bytes[start..start + row_bytes]);
            }
            put_head(head, record, self.integrity);
        }
        self.tile = tile;
    }

    /// Puts the change into a transaction, but for [`Table::stage_head`], and lets it be read: what is read before the transaction is
    /// made must not leave the shard.
    pub(crate) fn publish(&mut self, journal: &mut Journal) {
        let Some(mut drafted) = self.draft.take() else { return };
        let pages = self.committed_pages(journal);
        let mut changed = std::mem::take(&mut drafted.words);
        for (&number, page) in &drafted.pages {
            // What lies behind the committed pages is zeros.
            let before = pages.page(number);
            let differ = page.iter().zip(before).enumerate().filter(|(_, (now, was))| now != was);
            changed.extend(differ.map(|(place, (&now, _))| (number, place, now)));
        }
        debug_assert!(journal.room() >= changed.len(), "room was made for all tables together");
        for (page, place, word) in changed.drain(..) {
            journal.stage(self.address(page, place), u64::from_le(word));
        }
        for row in &drafted.rows {
            if let Some(to) = row.to {
                if drafted.step != self.step {
                    // A checkpoint of a newer step was begun since: it does not have this change.
                    let record = self.records.write(to);
                    let head = RowHead { step: self.step, ..head_of(record) };
                    put_head(head, record, self.integrity);
                }
                self.records.set_live(to);
                row.from.into_iter().for_each(|from| self.records.free(from));
            }
        }
        drafted.gone.iter().for_each(|&gone| self.records.free(gone));
        self.pages = drafted.page_count;
        self.rows = self.rows + drafted.admitted - drafted.gone.len() as u64;
        self.candidates = drafted.candidates;
        self.counts.hits += drafted.hits;
        self.counts.misses += drafted.rows.len() as u64 - drafted.hits;
        self.counts.admitted += drafted.admitted;
        self.counts.turned_away += drafted.turned_away;
        self.counts.evicted += drafted.gone.len() as u64;
        drafted.words = changed;
        self.keep(drafted);
    }

    /// The transaction is made: what the change replaced is free.
    pub(crate) fn committed(&mut self) {
        self.records.committed();
    }

    /// Forgets the change under way.
    pub(crate) fn discard(&mut self) {
        if let Some(drafted) = self.draft.take() {
            self.records.give_back(drafted.taken());
            self.keep(drafted);
        }
    }

    /// Keeps the memory of a change that is over: the next one is as large as that.
    fn keep(&mut self, mut drafted: Drafted) {
        drafted.rows.clear();
        drafted.words.clear();
        drafted.pages.clear();
        self.reused = drafted;
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
fn put<P: Pages>(draft: &mut Draft<'_, P>, tag: u32, entry: Entry) -> Put {
    let page = page_of(tag, draft.count());
    let candidate = |entry| matches!(entry, Entry::Candidate(_));
    match find(draft.page(page), tag, candidate) {
        Some((place, _)) => {
            draft.replace(page, place, entry);
            Put::OverACandidate
        }
        None => match draft.insert(tag, entry) {
            Ok(()) => Put::Beside,
            Err(Crowded) => Put::Nowhere,
        },
    }
}

/// Forgets the candidate that fewest pushes had, of those in the page of a tag; whether there is one.
fn forget_a_candidate<P: Pages>(draft: &mut Draft<'_, P>, tag: u32) -> bool {
    let page = page_of(tag, draft.count());
    let words = draft.page(page).iter().enumerate();
    let candidates = words.filter_map(|(place, &word)| match Entry::of(word) {
        Entry::Candidate(pushes) => Some((pushes, place)),
        _ => None,
    });
    let rarest = candidates.min();
    if let Some((_, place)) = rarest {
        draft.remove(page, place);
    }
    rarest.is_some()
}
