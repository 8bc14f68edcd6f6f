//! Lists that are used again and again, so that doing the same once more takes no memory anew.

use std::ops::{Deref, DerefMut};

/// A list that keeps its memory when it is emptied, for the next use: as much as its last uses have
/// needed. What a single one of them needed beyond that is given back after at most
/// [`USES`] more of twice as many.
#[derive(Clone, Debug)]
pub struct PooledVec<T> {
    items: Vec<T>,
    /// The most that a use has needed, of those that are counted.
    most: usize,
    uses: u32,
}

/// After so many uses it is looked at how much they have needed.
pub const USES: u32 = 64;

/// A list is let alone that has room for no more than so many times what was needed: lists that grow
/// have room for twice as much.
const ROOM: usize = 4;

/// Nor is one that is shorter.
const SHORT_BYTES: usize = 4 << 10;

impl<T> PooledVec<T> {
    /// Ends a use: nothing is left in the list.
    pub fn empty(&mut self) {
        let needed = self.items.len();
        self.items.clear();
        self.count(needed);
    }

    /// Begins a use of so many items, which are of whatever content.
    pub fn share(&mut self, items: usize)
    where
        T: Clone + Default,
    {
        self.items.resize(items, T::default());
        self.count(items);
    }

    fn count(&mut self, needed: usize) {
        self.most = self.most.max(needed);
        self.uses += 1;
        if self.uses >= USES {
            let short = SHORT_BYTES / size_of::<T>().max(1);
            if self.items.capacity() / ROOM > self.most.max(short) {
                self.items.shrink_to(self.most);
            }
            (self.most, self.uses) = (0, 0);
        }
    }
}

impl<T> Default for PooledVec<T> {
    fn default() -> PooledVec<T> {
        PooledVec { items: Vec::new(), most: 0, uses: 0 }
    }
}

impl<T> From<Vec<T>> for PooledVec<T> {
    fn from(items: Vec<T>) -> PooledVec<T> {
        PooledVec { items, ..PooledVec::default() }
    }
}

impl<T> Deref for PooledVec<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.items
    }
}

impl<T> DerefMut for PooledVec<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(list: &mut PooledVec<u64>, items: usize, times: u32) {
        for _ in 0..times {
            assert!(list.is_empty());
            list.resize(items, 7);
            list.empty();
        }
    }

    #[test]
    fn what_every_use_needs_is_kept_and_what_one_needed_is_not() {
        let mut list = PooledVec::default();
        uses(&mut list, 3_000, 10 * USES);
        let kept = list.capacity();
        assert!((3_000..=ROOM * 3_000).contains(&kept));
        let memory = list.as_ptr();
        uses(&mut list, 3_000, 10 * USES);
        assert_eq!((list.as_ptr(), list.capacity()), (memory, kept));

        uses(&mut list, 1_000_000, 1);
        assert!(list.capacity() >= 1_000_000);
        uses(&mut list, 3_000, 2 * USES);
        assert!((3_000..=ROOM * 3_000).contains(&list.capacity()));
        // It is worth keeping if it comes back now and then.
        for _ in 0..10 {
            uses(&mut list, 1_000_000, 1);
            uses(&mut list, 3, USES / 2);
            assert!(list.capacity() >= 1_000_000);
        }
    }

    #[test]
    fn what_is_lent_is_as_long_as_it_is_asked_for_and_keeps_its_memory_likewise() {
        let mut list = PooledVec::default();
        for items in [3_000, 1_000_000, 2_999, 0, 3_000] {
            list.share(items);
            assert_eq!(list.len(), items);
            list.fill(7_u64);
        }
        assert!(list.capacity() >= 1_000_000);
        (0..2 * USES).for_each(|_| list.share(3_000));
        assert!((3_000..=ROOM * 3_000).contains(&list.capacity()));
    }

    #[test]
    fn short_lists_are_let_alone() {
        let mut list = PooledVec::default();
        uses(&mut list, SHORT_BYTES / 8, 1);
        let kept = list.capacity();
        uses(&mut list, 0, 10 * USES);
        assert_eq!(list.capacity(), kept);
    }
}
