//! The index of a table: maps an id to its row. Pure functions of pages.
//!
//! The index is a linear hash table (Litwin, 1980) over pages of [`ENTRIES`] words. With N pages,
//! the page of an id is given by the low bits of its tag, as many as are needed to number N pages;
//! a number that does not exist loses its top bit. A page is added by splitting one other page, the
//! next in sequence, so the index grows one page at a time and is never rebuilt. Within a page,
//! linear probing starts at a home position given by the upper bits of the tag. A removal moves
//! later entries up and leaves no gap in a probe sequence.
//!
//! A word of a page is 0 or an entry. The upper half of an entry is the tag. The lower half is the
//! number of the row's record plus one, or, with the top bit set, the number of pushes that
//! contained an id without a row. Words are stored little-endian.

use std::collections::BTreeMap;

use pushpull_common::table::scatter;
use smallvec::SmallVec;

use crate::commit::CELL_WORDS;

/// The number of words in a page.
pub(super) const ENTRIES: usize = CELL_WORDS;

/// The average number of entries per page. Pages about to be split have up to twice as many, which
/// is more than five standard deviations below [`ENTRIES`].
const ENTRIES_PER_PAGE: u64 = 192;

/// The maximum number of pages, limited by the tag bits that number them.
pub(super) const PAGES_MAX: u32 = 1 << PAGE_BITS;
const PAGE_BITS: u32 = 23;

/// The maximum number of records that entries can name.
pub(super) const RECORDS_MAX: u32 = (1 << 31) - 2;

const CANDIDATE: u32 = 1 << 31;

/// Returns the tag of an id: 32 bits of a hash keyed with the arena's `salt`, so that clients
/// cannot choose ids that collide.
pub(super) fn tag_of(id: u64, salt: u64) -> u32 {
    scatter(id ^ salt) as u32
}

/// Returns the page of a tag in an index of `pages` pages.
pub(super) fn page_of(tag: u32, pages: u32) -> u32 {
    let mask = (2_u32 << pages.ilog2()) - 1;
    let page = tag & mask;
    if page < pages { page } else { page & (mask >> 1) }
}

/// Returns the number of pages for a number of entries.
pub(super) fn pages_for(entries: u64) -> u32 {
    let pages = entries.div_ceil(ENTRIES_PER_PAGE).max(1);
    u32::try_from(pages).unwrap_or(PAGES_MAX).min(PAGES_MAX)
}

/// Returns the page capacity of an index that has grown to `pages` pages: some more.
pub(super) fn grown_index(pages: usize) -> usize {
    (pages + (pages / 8).clamp(8, 4096)).min(PAGES_MAX as usize)
}

/// A decoded word of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexEntry {
    Empty,
    /// A row, stored in this record.
    Row(u32),
    /// An id without a row, and the number of pushes that contained it.
    Candidate(u32),
}

impl IndexEntry {
    pub(super) fn of(word: u64) -> IndexEntry {
        match u64::from_le(word) as u32 {
            0 => IndexEntry::Empty,
            what if what & CANDIDATE != 0 => IndexEntry::Candidate(what & !CANDIDATE),
            what => IndexEntry::Row(what - 1),
        }
    }

    /// Encodes the entry with its tag.
    pub(super) fn word(self, tag: u32) -> u64 {
        let what = match self {
            IndexEntry::Empty => return 0,
            IndexEntry::Row(record) => record + 1,
            IndexEntry::Candidate(pushes) => CANDIDATE | pushes,
        };
        (u64::from(tag) << 32 | u64::from(what)).to_le()
    }
}

/// Returns the tag of an encoded entry.
pub(super) fn tag_in(word: u64) -> u32 {
    (u64::from_le(word) >> 32) as u32
}

/// Returns the home position of a tag in its page.
pub(super) fn home_of(tag: u32) -> usize {
    ((tag >> PAGE_BITS) as usize * ENTRIES) >> (32 - PAGE_BITS)
}

/// Returns the positions of a page in the probe order of a tag.
fn probe(tag: u32) -> impl Iterator<Item = usize> {
    let home = home_of(tag);
    (home..ENTRIES).chain(0..home)
}

/// Finds the first entry of a tag that satisfies `is_it`, and its position.
pub(super) fn find(
    page: &[u64],
    tag: u32,
    is_it: impl FnMut(IndexEntry) -> bool,
) -> Option<(usize, IndexEntry)> {
    find_in(|place| page[place], tag, is_it)
}

/// Finds an entry as [`find`] does, in a page whose words `word` returns.
fn find_in(
    word: impl Fn(usize) -> u64,
    tag: u32,
    mut is_it: impl FnMut(IndexEntry) -> bool,
) -> Option<(usize, IndexEntry)> {
    for place in probe(tag) {
        let word = word(place);
        if word == 0 {
            return None;
        }
        if tag_in(word) == tag && is_it(IndexEntry::of(word)) {
            return Some((place, IndexEntry::of(word)));
        }
    }
    None
}

/// Inserts an entry into a page. Returns `false` if the page is full.
fn insert(page: &mut [u64], word: u64) -> bool {
    let free = probe(tag_in(word)).find(|&place| page[place] == 0);
    if let Some(place) = free {
        page[place] = word;
    }
    free.is_some()
}

/// Removes an entry from a page, and moves up the entries that were displaced by it.
fn remove(page: &mut [u64], mut gap: usize) {
    page[gap] = 0;
    let mut place = (gap + 1) % ENTRIES;
    while page[place] != 0 && place != gap {
        // The entry may move to the gap unless its home is after the gap.
        let home = home_of(tag_in(page[place]));
        let from_home = |to: usize| (to + ENTRIES - home) % ENTRIES;
        if from_home(gap) < from_home(place) {
            page[gap] = std::mem::take(&mut page[place]);
            gap = place;
        }
        place = (place + 1) % ENTRIES;
    }
}

/// Read access to the committed pages of an index.
pub(super) trait Pages {
    /// Returns a page.
    fn page(&self, page: u32) -> &[u64];
}

/// An insertion failed because the page is full and cannot be split. A random hash does not put
/// that many entries into one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageFull;

/// The most words of a page that are listed. A page with more changes is copied.
const LISTED_MAX: usize = 16;

/// A page of an index as a change leaves it.
///
/// The ids of a push are spread over the pages of a large index, and few of them share one. A copy
/// of a page for each took most of the time of a new row.
#[derive(Debug)]
pub(super) enum DirtyPage {
    /// The committed page, but for these words at their places, each place once.
    Listed(SmallVec<[(usize, u64); 2]>),
    /// All words of the page.
    Whole(Vec<u64>),
}

impl Default for DirtyPage {
    fn default() -> DirtyPage {
        DirtyPage::Listed(SmallVec::new())
    }
}

impl DirtyPage {
    /// Returns a word, given the committed page.
    fn word(&self, committed: &[u64], place: usize) -> u64 {
        match self {
            DirtyPage::Whole(words) => words[place],
            DirtyPage::Listed(words) => {
                let listed = words.iter().find(|(listed, _)| *listed == place);
                listed.map_or(committed[place], |(_, word)| *word)
            }
        }
    }

    /// Finds an entry as [`find`] does.
    pub(super) fn find(
        &self,
        committed: &[u64],
        tag: u32,
        is_it: impl FnMut(IndexEntry) -> bool,
    ) -> Option<(usize, IndexEntry)> {
        find_in(|place| self.word(committed, place), tag, is_it)
    }

    /// Changes a word.
    pub(super) fn set(&mut self, committed: &[u64], place: usize, word: u64) {
        match self {
            DirtyPage::Listed(words) if words.len() < LISTED_MAX => {
                match words.iter_mut().find(|(listed, _)| *listed == place) {
                    Some((_, listed)) => *listed = word,
                    None => words.push((place, word)),
                }
            }
            _ => self.whole(committed)[place] = word,
        }
    }

    /// Returns all words, copied from the committed page if they were listed.
    fn whole(&mut self, committed: &[u64]) -> &mut [u64] {
        if let DirtyPage::Listed(listed) = self {
            let mut words = committed.to_vec();
            listed.iter().for_each(|&(place, word)| words[place] = word);
            *self = DirtyPage::Whole(words);
        }
        match self {
            DirtyPage::Whole(words) => words,
            DirtyPage::Listed(_) => unreachable!("the words were copied"),
        }
    }

    /// Returns an upper bound on the number of words that differ from the committed page.
    pub(super) fn words_max(&self) -> usize {
        match self {
            DirtyPage::Listed(words) => words.len(),
            DirtyPage::Whole(_) => ENTRIES,
        }
    }

    /// Yields the words that differ from the committed page, each with its place.
    pub(super) fn differences(&self, committed: &[u64]) -> impl Iterator<Item = (usize, u64)> {
        let (listed, whole) = match self {
            DirtyPage::Listed(words) => (&words[..], &[][..]),
            DirtyPage::Whole(words) => (&[][..], &words[..]),
        };
        let differ = whole.iter().copied().enumerate().zip(committed);
        let differ = differ.filter(|((_, now), was)| now != *was).map(|(word, _)| word);
        listed.iter().copied().chain(differ)
    }
}

/// The changed pages of an index.
pub(super) type ChangedPages = BTreeMap<u32, DirtyPage>;

/// A change of an index in progress: dirty pages over the committed ones.
#[derive(Debug)]
pub(super) struct DirtyPages<'a, P> {
    pages: &'a P,
    changed: &'a mut ChangedPages,
    /// The number of pages after the change.
    count: &'a mut u32,
}

impl<'a, P: Pages> DirtyPages<'a, P> {
    pub(super) fn new(
        pages: &'a P,
        changed: &'a mut ChangedPages,
        count: &'a mut u32,
    ) -> DirtyPages<'a, P> {
        DirtyPages { pages, changed, count }
    }

    pub(super) fn count(&self) -> u32 {
        *self.count
    }

    /// Returns a page as it will be after the change.
    pub(super) fn page(&mut self, page: u32) -> &[u64] {
        let committed = self.pages.page(page);
        self.changed.get_mut(&page).map_or(committed, |page| page.whole(committed))
    }

    /// Finds the first entry of a tag that satisfies `is_it`: its page, its place and the entry.
    pub(super) fn find(
        &self,
        tag: u32,
        is_it: impl FnMut(IndexEntry) -> bool,
    ) -> Option<(u32, usize, IndexEntry)> {
        let page = page_of(tag, self.count());
        let committed = self.pages.page(page);
        let found = match self.changed.get(&page) {
            Some(changed) => changed.find(committed, tag, is_it),
            None => find(committed, tag, is_it),
        };
        found.map(|(place, entry)| (page, place, entry))
    }

    fn page_mut(&mut self, page: u32) -> &mut [u64] {
        self.changed.entry(page).or_default().whole(self.pages.page(page))
    }

    /// Replaces an entry of a tag.
    pub(super) fn replace(&mut self, page: u32, place: usize, tag: u32, entry: IndexEntry) {
        let committed = self.pages.page(page);
        self.changed.entry(page).or_default().set(committed, place, entry.word(tag));
    }

    pub(super) fn remove(&mut self, page: u32, place: usize) {
        remove(self.page_mut(page), place);
    }

    /// Inserts an entry. If its page is full, splits pages until it fits.
    ///
    /// # Errors
    /// [`PageFull`] if the page is still full after every page was split once.
    pub(super) fn insert(&mut self, tag: u32, entry: IndexEntry) -> Result<(), PageFull> {
        // Every page is split once before any page is split again.
        let most = self.count().saturating_mul(2).min(PAGES_MAX);
        loop {
            let page = page_of(tag, self.count());
            let committed = self.pages.page(page);
            let changed = self.changed.entry(page).or_default();
            if let Some(place) = probe(tag).find(|&place| changed.word(committed, place) == 0) {
                changed.set(committed, place, entry.word(tag));
                return Ok(());
            }
            if self.count() >= most {
                return Err(PageFull);
            }
            self.split();
        }
    }

    /// Grows the index to at least `pages` pages.
    pub(super) fn grow(&mut self, pages: u32) {
        while self.count() < pages {
            self.split();
        }
    }

    /// Adds a page, and moves its entries there from the next page to be split.
    fn split(&mut self) {
        let added = *self.count;
        let more = *self.count + 1;
        let source = added - (1 << added.ilog2());
        let from = self.page(source);
        let mut stay = vec![0; ENTRIES];
        let mut go = vec![0; ENTRIES];
        for &word in from.iter().filter(|&&word| word != 0) {
            let page = if page_of(tag_in(word), more) == added { &mut go } else { &mut stay };
            insert(page, word);
        }
        self.changed.insert(source, DirtyPage::Whole(stay));
        self.changed.insert(added, DirtyPage::Whole(go));
        *self.count = more;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    struct TestPages(BTreeMap<u32, Vec<u64>>);

    impl Pages for TestPages {
        fn page(&self, page: u32) -> &[u64] {
            self.0.get(&page).map_or(&[0; ENTRIES], |page| page)
        }
    }

    fn has_row(dirty_pages: &DirtyPages<'_, TestPages>, tag: u32, record: u32) -> bool {
        dirty_pages.find(tag, |entry| entry == IndexEntry::Row(record)).is_some()
    }

    #[test]
    fn page_numbers_use_more_bits_as_pages_are_added() {
        let of = |pages| (0..8).map(|tag| page_of(tag, pages)).collect::<Vec<_>>();
        assert_eq!(of(1), [0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(of(2), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(of(3), [0, 1, 2, 1, 0, 1, 2, 1]);
        assert_eq!(of(5), [0, 1, 2, 3, 4, 1, 2, 3]);
        assert_eq!((pages_for(0), pages_for(192), pages_for(193)), (1, 1, 2));
        assert_eq!(pages_for(u64::MAX), PAGES_MAX);
    }

    #[test]
    fn entries_survive_encoding() {
        for entry in
            [IndexEntry::Row(0), IndexEntry::Row(RECORDS_MAX), IndexEntry::Candidate(1 << 24)]
        {
            assert_eq!((IndexEntry::of(entry.word(7)), tag_in(entry.word(7))), (entry, 7));
        }
        assert_eq!((IndexEntry::of(0), IndexEntry::Empty.word(9)), (IndexEntry::Empty, 0));
        assert!((0..=u32::MAX).step_by(99_991).all(|tag| home_of(tag) < ENTRIES));
    }

    #[test]
    fn a_full_page_that_cannot_be_split_is_reported() {
        let test_pages = TestPages(BTreeMap::new());
        let mut changed = BTreeMap::new();
        let mut count = 1;
        let mut dirty_pages = DirtyPages::new(&test_pages, &mut changed, &mut count);
        for record in 0..ENTRIES as u32 {
            dirty_pages.insert(5, IndexEntry::Row(record)).unwrap();
        }
        assert_eq!(dirty_pages.insert(5, IndexEntry::Row(999)), Err(PageFull));
        assert!(has_row(&dirty_pages, 5, 0) && has_row(&dirty_pages, 5, ENTRIES as u32 - 1));
        assert!(!has_row(&dirty_pages, 5, 999) && !has_row(&dirty_pages, 4, 0));
    }

    proptest! {
        /// After any insertions and removals, exactly the inserted entries are found.
        #[test]
        fn inserted_entries_are_found(
            steps in prop::collection::vec((any::<bool>(), 0u32..600, 0u32..8), 1..900),
            spread in prop::sample::select(vec![0u32, 3, 28]),
        ) {
            let test_pages = TestPages(BTreeMap::new());
            let mut changed = BTreeMap::new();
            let mut count = 1;
            let mut dirty_pages = DirtyPages::new(&test_pages, &mut changed, &mut count);
            let mut model: HashMap<u32, u32> = HashMap::new();
            for (is_insert, number, page) in steps {
                // Few homes or many, so that probe sequences overlap and wrap around.
                let tag = (number.wrapping_mul(0x9e37_79b1) >> spread) << PAGE_BITS | page;
                match (is_insert, model.contains_key(&number)) {
                    (true, false) => {
                        dirty_pages.insert(tag, IndexEntry::Row(number)).unwrap();
                        model.insert(number, tag);
                    }
                    (false, true) => {
                        let tag = model[&number];
                        let row = dirty_pages.find(tag, |e| e == IndexEntry::Row(number));
                        let (page, place, _) = row.unwrap();
                        dirty_pages.remove(page, place);
                        model.remove(&number);
                    }
                    _ => {}
                }
                dirty_pages.grow(pages_for(2 * model.len() as u64));
            }
            for (&number, &tag) in &model {
                prop_assert!(has_row(&dirty_pages, tag, number), "{} of {:#x}", number, tag);
            }
            let empty = [0; ENTRIES];
            let words = changed.values().flat_map(|page| page.differences(&empty));
            prop_assert_eq!(words.filter(|&(_, word)| word != 0).count(), model.len());
        }
    }
}
