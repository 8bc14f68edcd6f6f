//! Placement: assigns variables, or row ranges of them, to shards.
//!
//! Servers and workers use [`Placement::plan`]. Both compute it from the same variables,
//! [`ShardMap`] and [`PlacementStrategy`], and get the same result. [`DeviceSetter`] is
//! TensorFlow's interface to the same decision, one operation at a time.

mod cut_rule;
mod device_setter;
mod error;
mod picker;
mod plan;
mod shard_map;
mod strategy;
mod table;
mod task_loads;

pub use device_setter::DeviceSetter;
pub use error::PlacementError;
pub use plan::{PlacedPartition, Placement};
pub use shard_map::ShardMap;
pub use strategy::{CustomStrategy, PlacementStrategy};
pub use task_loads::TaskLoads;
