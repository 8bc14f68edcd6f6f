//! Outcomes of operations, which only this crate can make, without the operations.

use pushpull_common::ids::{EffectNumber, ShardId};

use crate::coordinators::RecordedDigests;
use crate::outcome::{RestoredCheckpoint, SavedCheckpoint};

/// A checkpoint that a chief has restored.
pub fn restored_checkpoint(name: &str, step: u64, epoch: u32) -> RestoredCheckpoint {
    RestoredCheckpoint { name: name.to_owned(), step, epoch, passed_over: Vec::new() }
}

/// A checkpoint that servers have saved.
pub fn saved_checkpoint(name: &str, step: u64) -> SavedCheckpoint {
    SavedCheckpoint { name: name.to_owned(), step }
}

/// The digests that a shard has recorded: that of effect 1, and that of the newest effect.
pub fn recorded_digests(shard: ShardId, first: Option<u64>, newest: (u64, u64)) -> RecordedDigests {
    let (number, digest) = newest;
    let first = first.map(|digest| (shard, digest));
    RecordedDigests { first, shard, number: EffectNumber(number), digest }
}
