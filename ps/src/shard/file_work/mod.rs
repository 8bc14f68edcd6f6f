//! Work on files that other threads do for a shard, because it may wait for a disk or another task.
//! The shard decides and pins. Results return to it as inputs.

pub(crate) mod flush;
pub(crate) mod restore_work;
pub(crate) mod saver_order;
pub(crate) mod shard_save;

/// The limit of every count. No machine runs long enough to reach it. It leaves bits for sums, and
/// for values packed beside a count.
pub(in crate::shard) const COUNT_LIMIT: u64 = 1 << 56;

/// The limit of counts from a checkpoint. Counts that continue from it stay below [`COUNT_LIMIT`],
/// so that the arena can be opened again.
pub(crate) const RESTORED_LIMIT: u64 = COUNT_LIMIT / 2;
