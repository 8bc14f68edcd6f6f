//! Memory of operations that have ended, for those to come: a session that does the same again and
//! again takes none anew.

use super::Counts;
use super::pulls::Ask;
use super::pushes::{Push, Share};

/// How many of a kind are kept: more than are in use at once, usually.
const SPARES_MAX: usize = 8;

/// What ended operations have left.
#[derive(Debug, Default)]
pub(super) struct SessionBuffers {
    pub(super) asks: Kept<Vec<Ask>>,
    pub(super) counts: Kept<Counts>,
    pub(super) shares: Kept<Share>,
    pub(super) lists: Kept<Vec<Share>>,
    /// Room for a count for each link.
    pub(super) under_way: Vec<usize>,
}

impl SessionBuffers {
    /// Takes a push apart that has ended.
    pub(super) fn keep_push(&mut self, push: Push) {
        let Push { read, mut shares, .. } = push;
        shares.drain(..).for_each(|share| self.shares.keep(share));
        self.lists.keep(shares);
        self.counts.keep(read.gradients);
    }
}

/// Something that can be used again once it is emptied.
pub(super) trait Emptied: Default {
    /// The same memory, with nothing in it.
    fn emptied(self) -> Self;
}

impl<T> Emptied for Vec<T> {
    fn emptied(mut self) -> Vec<T> {
        self.clear();
        self
    }
}

/// Some of a kind, emptied.
#[derive(Debug)]
pub(super) struct Kept<T>(Vec<T>);

impl<T> Default for Kept<T> {
    fn default() -> Kept<T> {
        Kept(Vec::new())
    }
}

impl<T: Emptied> Kept<T> {
    /// One that is empty.
    pub(super) fn take(&mut self) -> T {
        self.0.pop().unwrap_or_default()
    }

    /// Keeps the memory of one; what lies in it is dropped now.
    pub(super) fn keep(&mut self, used: T) {
        let emptied = used.emptied();
        if self.0.len() < SPARES_MAX {
            self.0.push(emptied);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_again_is_empty_and_no_more_is_kept_than_is_of_use() {
        let mut kept = Kept::default();
        assert_eq!(kept.take(), Vec::<u64>::new());
        (0..SPARES_MAX + 3).for_each(|_| kept.keep(vec![7; 100]));
        for _ in 0..SPARES_MAX {
            let taken = kept.take();
            assert!(taken.is_empty() && taken.capacity() >= 100);
        }
        assert_eq!(kept.take().capacity(), 0);
        let mut counts = Kept::default();
        counts.keep(Counts::from([(pushpull_common::ids::ShardId { task: 0, shard: 0 }, 3)]));
        assert!(counts.take().is_empty());
        let mut shares = Kept::default();
        shares.keep(Share { link: 3, whole: true, sent: 2, ..Share::default() });
        let share = shares.take();
        assert!((share.link, share.sent, share.whole) == (0, 0, false) && share.parts.is_empty());
    }
}
