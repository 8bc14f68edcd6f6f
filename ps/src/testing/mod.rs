//! Code for tests only: an adversary of one shard.

#[cfg(any(test, fuzzing))]
pub mod adversary;
