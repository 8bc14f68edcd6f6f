//! Code for tests only: the shard behind an endpoint without sockets, and the adversary.

#[cfg(any(test, fuzzing))]
pub mod adversary;
#[cfg(feature = "simulation")]
mod shard_endpoint;
#[cfg(feature = "simulation")]
mod shard_event;

#[cfg(feature = "simulation")]
pub use pushpull_net::auth::simulated_tokens::SimulatedTokens;
#[cfg(feature = "simulation")]
pub use shard_endpoint::{ClientHost, KilledFiles, ShardEndpoint, TICK, WorkState, with_features};
#[cfg(feature = "simulation")]
pub use shard_event::{PulledFrames, ShardEvent};
