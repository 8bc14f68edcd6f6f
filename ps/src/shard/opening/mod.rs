//! The opening of a shard: the order of the checks of its files, and its state from the words that an
//! earlier process left.

pub(crate) mod control_file;
mod recovery;
pub(crate) mod shard_setup;
