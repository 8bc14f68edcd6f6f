//! The index of a table: where the row of an id is. Pure: pages in and out.
//!
//! The index is a linear hash (Litwin, 1980) over pages of [`ENTRIES`] words. A table of N pages
//! looks at the lower bits of an id's tag, as many as number N pages; one that numbers no page loses
//! its uppermost bit. A page is added by splitting one other, always the next in turn, so the index
//! grows by a page at a time and never has to be made anew. Within a page entries are probed
//! linearly from a home that the upper bits say; what is removed leaves no gap in that.
//!
//! A word of a page is 0, or an entry: the tag in its upper half, and in its lower half the number of
//! the row's record and one, or, with the uppermost bit set, how many pushes had an id that has no
//! row yet. Words are as they are in the file: little-endian.

use std::collections::BTreeMap;

use pushpull_common::table::scatter;

use crate::commit::CELL_WORDS;

/// The words of a page.
pub(super) const ENTRIES: usize = CELL_WORDS;

/// Entries for each page on the average. Pages that are about to be split have up to twice as many,
/// which leaves more than five standard deviations up to [`ENTRIES`].
const ENTRIES_A_PAGE: u64 = 192;

/// The most pages, as bits of a tag number them.
pub(super) const PAGES_MAX: u32 = 1 << PAGE_BITS;
const PAGE_BITS: u32 = 23;

/// The most records that entries can number.
pub(super) const RECORDS_MAX: u32 = (1 << 31) - 2;

const CANDIDATE: u32 = 1 << 31;

/// What stands for an id in the index: 32 bits of a hash of it. `salt` is the arena's, so that
/// nobody who chooses ids can choose pages.
pub(super) fn tag_of(id: u64, salt: u64) -> u32 {
    scatter(id ^ salt) as u32
}

/// The page of a tag among so many.
pub(super) fn page_of(tag: u32, pages: u32) -> u32 {
    let mask = (2_u32 << pages.ilog2()) - 1;
    let page = tag & mask;
    if page < pages { page } else { page & (mask >> 1) }
}

/// How many pages so many entries are worth.
pub(super) fn pages_for(entries: u64) -> u32 {
    let pages = entries.div_ceil(ENTRIES_A_PAGE).max(1);
    u32::try_from(pages).unwrap_or(PAGES_MAX).min(PAGES_MAX)
}

/// What a word of a page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Empty,
    /// A row, in this record.
    Row(u32),
    /// An id that has no row yet; so many pushes had it.
    Candidate(u32),
}

impl Entry {
    pub(super) fn of(word: u64) -> Entry {
        match u64::from_le(word) as u32 {
            0 => Entry::Empty,
            what if what & CANDIDATE != 0 => Entry::Candidate(what & !CANDIDATE),
            what => Entry::Row(what - 1),
        }
    }

    /// The word of a tag's entry.
    pub(super) fn word(self, tag: u32) -> u64 {
        let what = match self {
            Entry::Empty => return 0,
            Entry::Row(record) => record + 1,
            Entry::Candidate(pushes) => CANDIDATE | pushes,
        };
        (u64::from(tag) << 32 | u64::from(what)).to_le()
    }
}

/// The tag of an entry.
pub(super) fn tag_in(word: u64) -> u32 {
    (u64::from_le(word) >> 32) as u32
}

/// Where in its page an entry is looked for first.
pub(super) fn home_of(tag: u32) -> usize {
    ((tag >> PAGE_BITS) as usize * ENTRIES) >> (32 - PAGE_BITS)
}

/// The places of a page in the order in which a tag is looked for.
fn probe(tag: u32) -> impl Iterator<Item = usize> {
    let home = home_of(tag);
    (home..ENTRIES).chain(0..home)
}

/// The place of the first entry of this tag that is the one.
pub(super) fn find(
    page: &[u64],
    tag: u32,
    mut is_it: impl FnMut(Entry) -> bool,
) -> Option<(usize, Entry)> {
    for place in probe(tag) {
        let word = page[place];
        if word == 0 {
            return None;
        }
        if tag_in(word) == tag && is_it(Entry::of(word)) {
            return Some((place, Entry::of(word)));
        }
    }
    None
}

/// Puts an entry into a page; false if it is full.
fn insert(page: &mut [u64], word: u64) -> bool {
    let free = probe(tag_in(word)).find(|&place| page[place] == 0);
    if let Some(place) = free {
        page[place] = word;
    }
    free.is_some()
}

/// Takes an entry out of a page, and moves up what was put behind it for want of its place.
fn remove(page: &mut [u64], mut gap: usize) {
    page[gap] = 0;
    let mut place = (gap + 1) % ENTRIES;
    while page[place] != 0 && place != gap {
        // It may move to the gap unless its home lies behind that.
        let home = home_of(tag_in(page[place]));
        let from_home = |to: usize| (to + ENTRIES - home) % ENTRIES;
        if from_home(gap) < from_home(place) {
            page[gap] = std::mem::take(&mut page[place]);
            gap = place;
        }
        place = (place + 1) % ENTRIES;
    }
}

/// The pages of an index, as they are.
pub(super) trait Pages {
    /// A page.
    fn page(&self, page: u32) -> &[u64];
}

/// Why an entry cannot be put in: chance does not bring so many into one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Crowded;

/// An index that is about to change: pages as they will be, over those that are.
#[derive(Debug)]
pub(super) struct DirtyPages<'a, P> {
    pages: &'a P,
    changed: &'a mut BTreeMap<u32, Vec<u64>>,
    /// How many pages there will be.
    count: &'a mut u32,
}

impl<'a, P: Pages> DirtyPages<'a, P> {
    pub(super) fn new(
        pages: &'a P,
        changed: &'a mut BTreeMap<u32, Vec<u64>>,
        count: &'a mut u32,
    ) -> DirtyPages<'a, P> {
        DirtyPages { pages, changed, count }
    }

    pub(super) fn count(&self) -> u32 {
        *self.count
    }

    /// A page as it will be.
    pub(super) fn page(&self, page: u32) -> &[u64] {
        self.changed.get(&page).map_or_else(|| self.pages.page(page), Vec::as_slice)
    }

    fn page_mut(&mut self, page: u32) -> &mut [u64] {
        let pages = self.pages;
        self.changed.entry(page).or_insert_with(|| pages.page(page).to_vec())
    }

    /// Replaces an entry by one of the same tag.
    pub(super) fn replace(&mut self, page: u32, place: usize, entry: Entry) {
        let page = self.page_mut(page);
        page[place] = entry.word(tag_in(page[place]));
    }

    pub(super) fn remove(&mut self, page: u32, place: usize) {
        remove(self.page_mut(page), place);
    }

    /// Puts an entry in; if its page is full, pages are split until it is not.
    pub(super) fn insert(&mut self, tag: u32, entry: Entry) -> Result<(), Crowded> {
        // Each page is split once before any is again.
        let most = self.count().saturating_mul(2).min(PAGES_MAX);
        loop {
            let page = page_of(tag, self.count());
            if insert(self.page_mut(page), entry.word(tag)) {
                return Ok(());
            }
            if self.count() >= most {
                return Err(Crowded);
            }
            self.split();
        }
    }

    /// Has at least so many pages.
    pub(super) fn grow(&mut self, pages: u32) {
        while self.count() < pages {
            self.split();
        }
    }

    /// Adds a page: it takes what is its own out of the page that is next in turn.
    fn split(&mut self) {
        let (added, more) = (*self.count, *self.count + 1);
        let source = added - (1 << added.ilog2());
        let from = self.page(source);
        let (mut stay, mut go) = (vec![0; ENTRIES], vec![0; ENTRIES]);
        for &word in from.iter().filter(|&&word| word != 0) {
            let page = if page_of(tag_in(word), more) == added { &mut go } else { &mut stay };
            insert(page, word);
        }
        self.changed.insert(source, stay);
        self.changed.insert(added, go);
        *self.count = more;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    struct Kept(BTreeMap<u32, Vec<u64>>);

    impl Pages for Kept {
        fn page(&self, page: u32) -> &[u64] {
            self.0.get(&page).map_or(&[0; ENTRIES], |page| page)
        }
    }

    fn look(dirty_pages: &DirtyPages<'_, Kept>, tag: u32, record: u32) -> bool {
        let page = dirty_pages.page(page_of(tag, dirty_pages.count()));
        find(page, tag, |entry| entry == Entry::Row(record)).is_some()
    }

    #[test]
    fn pages_are_numbered_by_more_bits_as_they_come() {
        let of = |pages| (0..8).map(|tag| page_of(tag, pages)).collect::<Vec<_>>();
        assert_eq!(of(1), [0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(of(2), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(of(3), [0, 1, 2, 1, 0, 1, 2, 1]);
        assert_eq!(of(5), [0, 1, 2, 3, 4, 1, 2, 3]);
        assert_eq!((pages_for(0), pages_for(192), pages_for(193)), (1, 1, 2));
        assert_eq!(pages_for(u64::MAX), PAGES_MAX);
    }

    #[test]
    fn words_are_entries() {
        for entry in [Entry::Row(0), Entry::Row(RECORDS_MAX), Entry::Candidate(1 << 24)] {
            assert_eq!((Entry::of(entry.word(7)), tag_in(entry.word(7))), (entry, 7));
        }
        assert_eq!((Entry::of(0), Entry::Empty.word(9)), (Entry::Empty, 0));
        assert!((0..=u32::MAX).step_by(99_991).all(|tag| home_of(tag) < ENTRIES));
    }

    #[test]
    fn a_page_that_cannot_be_split_is_crowded() {
        let (kept, mut changed, mut count) = (Kept(BTreeMap::new()), BTreeMap::new(), 1);
        let mut dirty_pages = DirtyPages::new(&kept, &mut changed, &mut count);
        for record in 0..ENTRIES as u32 {
            dirty_pages.insert(5, Entry::Row(record)).unwrap();
        }
        assert_eq!(dirty_pages.insert(5, Entry::Row(999)), Err(Crowded));
        assert!(look(&dirty_pages, 5, 0) && look(&dirty_pages, 5, ENTRIES as u32 - 1));
        assert!(!look(&dirty_pages, 5, 999) && !look(&dirty_pages, 4, 0));
    }

    proptest! {
        /// Whatever is put in and taken out, what is in is found, and nothing else.
        #[test]
        fn what_is_in_is_found(
            steps in prop::collection::vec((any::<bool>(), 0u32..600, 0u32..8), 1..900),
            spread in prop::sample::select(vec![0u32, 3, 28]),
        ) {
            let (kept, mut changed, mut count) = (Kept(BTreeMap::new()), BTreeMap::new(), 1);
            let mut dirty_pages = DirtyPages::new(&kept, &mut changed, &mut count);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (comes, number, page) in steps {
                // Few homes or many, so that probes run into each other and round the end.
                let tag = (number.wrapping_mul(0x9e37_79b1) >> spread) << PAGE_BITS | page;
                match (comes, model.contains_key(&number)) {
                    (true, false) => {
                        dirty_pages.insert(tag, Entry::Row(number)).unwrap();
                        model.insert(number, tag);
                    }
                    (false, true) => {
                        let tag = model[&number];
                        let page = page_of(tag, dirty_pages.count());
                        let place = find(dirty_pages.page(page), tag, |e| e == Entry::Row(number));
                        dirty_pages.remove(page, place.unwrap().0);
                        model.remove(&number);
                    }
                    _ => {}
                }
                dirty_pages.grow(pages_for(2 * model.len() as u64));
            }
            for (&number, &tag) in &model {
                prop_assert!(look(&dirty_pages, tag, number), "{} of {:#x}", number, tag);
            }
            let pages = (0..dirty_pages.count()).flat_map(|page| dirty_pages.page(page).to_vec());
            prop_assert_eq!(pages.filter(|&word| word != 0).count(), model.len());
        }
    }
}
