//! Memory of work that is done, for work to come: a shard that does the same again and again takes none
//! anew.

use pushpull_common::reused::Reused;

use crate::inbox::Extents;

/// How many of a kind are kept: as many as a worker has under way at once.
const KEPT_MAX: usize = 8;

/// What has been left; none is longer than a part of a push, or than the list of partitions.
#[derive(Debug, Default)]
pub(super) struct Spares {
    /// The numbers of rows that were asked for.
    pub(super) numbers: Kept,
    /// Rows that were sent.
    pub(super) answers: Kept,
    /// What a push has changed of what is not sparse.
    pub(super) dense: Extents,
    /// Ids that pushes have of a table that is nearly full.
    pub(super) ids: Reused<u64>,
}

/// Some of a kind, emptied.
#[derive(Debug, Default)]
pub(super) struct Kept(Vec<Reused<u8>>);

impl Kept {
    /// One that is empty.
    pub(super) fn take(&mut self) -> Reused<u8> {
        self.0.pop().unwrap_or_default()
    }

    /// Keeps the memory of one.
    pub(super) fn keep(&mut self, mut used: Reused<u8>) {
        if self.0.len() < KEPT_MAX {
            used.empty();
            self.0.push(used);
        }
    }
}
