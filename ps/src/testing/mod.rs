//! Code for tests only: the shard behind an endpoint without sockets, and the adversary.

#[cfg(any(test, fuzzing))]
pub mod adversary;
#[cfg(feature = "simulation")]
mod shard_endpoint;

#[cfg(feature = "simulation")]
pub use shard_endpoint::{
    ClientHost, KilledFiles, PulledFrames, ShardEndpoint, ShardEvent, TICK, WorkState,
};
