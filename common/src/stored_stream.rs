//! [`StoredStream`]: the arrays that a shard and a checkpoint store of a variable.

/// One of the arrays of equal layout that a shard stores: the values, or a slot by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoredStream {
    /// The values.
    Values,
    /// The slot with this index among those of the variable's optimizer.
    Slot(usize),
}

impl StoredStream {
    /// Returns 0 for the values, and from 1 on for slots.
    pub fn number(self) -> usize {
        match self {
            StoredStream::Values => 0,
            StoredStream::Slot(index) => 1 + index,
        }
    }
}
