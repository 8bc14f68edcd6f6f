//! Which rows make room: those that are expired, and those that were used least.

use pushpull_common::table::{Eviction, scatter};

use super::Table;
use super::change::DirtyRows;
use super::index::{DirtyPages, ENTRIES, Entry, Pages};
use super::records::head_of;

/// So many rows are looked at for the one that is evicted.
const LOOKED_AT: usize = 16;

/// In so many pages, if one is found there.
const PAGES_LOOKED_AT: usize = 4;

/// A table is looked through for expired rows once in so many pushes.
const PUSHES_A_ROUND: u32 = 1024;

impl Table {
    /// Evicts expired rows, of a few pages in turn; `ids` are of the push under way and stay.
    pub(super) fn expire<P: Pages>(
        &self,
        dirty_pages: &mut DirtyPages<'_, P>,
        gone: &mut Vec<u32>,
        ids: &[u64],
        version: u64,
    ) {
        let Some(steps) = self.spec.expire_after_steps else { return };
        let each = u64::from(dirty_pages.count().div_ceil(PUSHES_A_ROUND));
        let count = u64::from(dirty_pages.count());
        // Reduced before it is multiplied: a version goes up to 2^56.
        let first = version % count * each % count;
        for page in first..first + each {
            let page = (page % count) as u32;
            let rows = dirty_pages.page(page).iter().map(|&word| Entry::of(word));
            let expired = |&record: &u32| {
                let head = head_of(self.records.read(record));
                // What no step comes after does not expire.
                let expires = head.step.checked_add(steps);
                expires.is_some_and(|last| last < self.step) && ids.binary_search(&head.id).is_err()
            };
            let rows = rows.filter_map(|entry| match entry {
                Entry::Row(record) => Some(record),
                _ => None,
            });
            let expired: Vec<u32> = rows.filter(expired).collect();
            for record in expired {
                let its = |word: &u64| Entry::of(*word) == Entry::Row(record);
                if let Some(place) = dirty_pages.page(page).iter().position(its) {
                    dirty_pages.remove(page, place);
                    gone.push(record);
                }
            }
        }
    }

    /// Evicts one row, the least used of some; false if there is none that may go. `ids` are of the
    /// push under way and stay, and so do the rows it was given.
    pub(super) fn evict<P: Pages>(
        &self,
        dirty_pages: &mut DirtyPages<'_, P>,
        dirty: &mut DirtyRows,
        ids: &[u64],
        version: u64,
    ) -> bool {
        // Some other rows each time, but the same ones if this is done again.
        let at = scatter(version ^ (dirty.gone.len() as u64).rotate_left(40));
        let (start, first) = ((at >> 32) as usize % ENTRIES, at as u32 % dirty_pages.count());
        let mut least = None;
        let mut looked_at = 0;
        for (pages, number) in (first..dirty_pages.count()).chain(0..first).enumerate() {
            // Some will do, once there is one: a table of rows that all stay is not looked through.
            if looked_at >= LOOKED_AT || (pages >= PAGES_LOOKED_AT && least.is_some()) {
                break;
            }
            let page = dirty_pages.page(number);
            let places = (start..ENTRIES).chain(0..start);
            let rows = places.filter_map(|place| {
                let Entry::Row(record) = Entry::of(page[place]) else { return None };
                // What was put in by this push is not live yet.
                let head = self.records.is_live(record).then(|| self.records.read(record));
                let head = head_of(head?);
                let use_of_it = match self.spec.eviction {
                    Eviction::LeastFrequent => (u64::from(head.pushes), head.step),
                    _ => (head.step, head.pushes.into()),
                };
                let may_go = ids.binary_search(&head.id).is_err();
                may_go.then_some((use_of_it, number, place, record))
            });
            for row in rows.take(LOOKED_AT - looked_at) {
                looked_at += 1;
                least = Some(least.map_or(row, |least| row.min(least)));
            }
        }
        let Some((_, page, place, record)) = least else { return false };
        dirty_pages.remove(page, place);
        dirty.gone.push(record);
        true
    }
}
