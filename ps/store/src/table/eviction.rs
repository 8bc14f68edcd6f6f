//! The eviction policy: removes expired rows, and the least used of a sample of rows.

use pushpull_common::table::{Eviction, scatter};

use super::Table;
use super::change::DirtyRows;
use super::index::{DirtyPages, ENTRIES, IndexEntry, Pages};
use super::records::head_of;

/// The rows sampled for one eviction.
const SAMPLE_ROWS: usize = 16;

/// The pages sampled for one eviction, if they contain a candidate.
const SAMPLE_PAGES: usize = 4;

/// The number of pushes in which a whole table is swept once for expired rows.
const PUSHES_PER_SWEEP: u32 = 1024;

impl Table {
    /// Evicts the expired rows of a few pages, the next ones with each gradient: this is the one
    /// with the given number. Rows with `ids`, which belong to the push being applied, stay.
    pub(super) fn expire<P: Pages>(
        &self,
        dirty_pages: &mut DirtyPages<'_, P>,
        gone: &mut Vec<u32>,
        ids: &[u64],
        number: u64,
    ) {
        let Some(steps) = self.spec.expire_after_steps else { return };
        let each = u64::from(dirty_pages.count().div_ceil(PUSHES_PER_SWEEP));
        let count = u64::from(dirty_pages.count());
        // Reduced before the multiplication: a count of gradients can reach 2^56.
        let first = number % count * each % count;
        for page in first..first + each {
            let page = (page % count) as u32;
            let rows = dirty_pages.page(page).iter().map(|&word| IndexEntry::of(word));
            let expired = |&record: &u32| {
                let head = head_of(self.records.read(record));
                // A row whose expiry step would overflow never expires.
                let expires = head.step.checked_add(steps);
                expires.is_some_and(|last| last < self.step) && ids.binary_search(&head.id).is_err()
            };
            let rows = rows.filter_map(|entry| match entry {
                IndexEntry::Row(record) => Some(record),
                _ => None,
            });
            let expired: Vec<u32> = rows.filter(expired).collect();
            for record in expired {
                let names_record = |word: &u64| IndexEntry::of(*word) == IndexEntry::Row(record);
                if let Some(place) = dirty_pages.page(page).iter().position(names_record) {
                    dirty_pages.remove(page, place);
                    gone.push(record);
                }
            }
        }
    }

    /// Evicts the least used row of a sample, which is drawn from the number of the gradient.
    /// Returns `false` if no row can be evicted. Rows with `ids`, which belong to the push being
    /// applied, stay, and so do the rows that it added.
    pub(super) fn evict<P: Pages>(
        &self,
        dirty_pages: &mut DirtyPages<'_, P>,
        dirty: &mut DirtyRows,
        ids: &[u64],
        number: u64,
    ) -> bool {
        // A different sample each time, but the same one if the push is applied again.
        let at = scatter(number ^ (dirty.gone.len() as u64).rotate_left(40));
        let start = (at >> 32) as usize % ENTRIES;
        let first = at as u32 % dirty_pages.count();
        let mut least = None;
        let mut sampled = 0;
        for (pages, number) in (first..dirty_pages.count()).chain(0..first).enumerate() {
            // A few pages are enough if they contain a candidate. Without one, the search
            // continues.
            if sampled >= SAMPLE_ROWS || (pages >= SAMPLE_PAGES && least.is_some()) {
                break;
            }
            let page = dirty_pages.page(number);
            let places = (start..ENTRIES).chain(0..start);
            let rows = places.filter_map(|place| {
                let IndexEntry::Row(record) = IndexEntry::of(page[place]) else { return None };
                // A row added by this push is not live yet.
                let head = self.records.is_live(record).then(|| self.records.read(record));
                let head = head_of(head?);
                let usage = match self.spec.eviction {
                    Eviction::LeastFrequent => (u64::from(head.pushes), head.step),
                    _ => (head.step, head.pushes.into()),
                };
                let is_evictable = ids.binary_search(&head.id).is_err();
                is_evictable.then_some((usage, number, place, record))
            });
            for row in rows.take(SAMPLE_ROWS - sampled) {
                sampled += 1;
                least = Some(least.map_or(row, |least| row.min(least)));
            }
        }
        let Some((_, page, place, record)) = least else { return false };
        dirty_pages.remove(page, place);
        dirty.gone.push(record);
        true
    }
}
