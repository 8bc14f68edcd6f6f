//! Memory of work that is done, for work to come: a shard that does the same again and again takes none
//! anew.

use pushpull_common::pooled_vec::PooledVec;

use crate::inbox::Extents;

/// How many of a kind are kept: as many as a worker has under way at once.
const KEPT_MAX: usize = 8;

/// How much longer than what is needed one may be, if it is not short.
const LONGER_MAX: usize = 4;
const SHORT_BYTES: usize = 4 << 10;

/// What has been left; none is longer than a part of a push, or than the list of partitions.
#[derive(Debug, Default)]
pub(super) struct BufferPool {
    /// The numbers of rows that were asked for.
    pub(super) numbers: PooledBuffers,
    /// What came encoded, and is decoded into its room.
    pub(super) encoded: PooledBuffers,
    /// Rows that were sent.
    pub(super) answers: PooledBuffers,
    /// What a push has changed of what is not sparse.
    pub(super) dense: Extents,
    /// Ids that pushes have of a table that is nearly full.
    pub(super) ids: PooledVec<u64>,
}

/// Some of a kind, emptied.
#[derive(Debug, Default)]
pub(super) struct PooledBuffers(Vec<PooledVec<u8>>);

impl PooledBuffers {
    /// One that is empty, for so many bytes: the longest that is not much longer. What waits, or is queued, is
    /// counted by what it says and not by what it could say.
    pub(super) fn take(&mut self, bytes: usize) -> PooledVec<u8> {
        let most = bytes.saturating_mul(LONGER_MAX).max(SHORT_BYTES);
        let fits = self.0.iter().enumerate().filter(|(_, kept)| kept.capacity() <= most);
        let longest = fits.max_by_key(|(_, kept)| kept.capacity()).map(|(at, _)| at);
        longest.map(|at| self.0.swap_remove(at)).unwrap_or_default()
    }

    /// Keeps the memory of one.
    pub(super) fn keep(&mut self, mut used: PooledVec<u8>) {
        if self.0.len() < KEPT_MAX {
            used.empty();
            self.0.push(used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_what_was_long_does_not_wait_with_what_is_short() {
        let mut kept = PooledBuffers::default();
        for bytes in [1 << 20, 64 << 10, 100] {
            let mut used = PooledVec::default();
            used.share(bytes);
            kept.keep(used);
        }
        let mut taken = |bytes| kept.take(bytes).capacity();
        assert_eq!(taken(1), 100);
        assert_eq!(taken(1), 0, "what is left is too long");
        assert_eq!(taken(20 << 10), 64 << 10);
        assert_eq!(taken(1 << 20), 1 << 20);
        assert_eq!(taken(1 << 20), 0);
    }
}
