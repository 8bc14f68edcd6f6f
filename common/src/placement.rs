//! Placement: which shard holds which variable, or which rows of it.
//!
//! [`Placement::plan`] is what the servers and the workers use: both compute it from the same
//! variables, [`ShardMap`] and [`PlacementStrategy`], and arrive at the same answer. [`DeviceSetter`] is
//! the classic way to ask the same question, one operation at a time.

mod device_setter;
mod error;
mod picker;
mod plan;
mod shard_map;
mod strategy;
mod table;

pub use device_setter::DeviceSetter;
pub use error::PlacementError;
pub use plan::{PlacedPartition, Placement};
pub use shard_map::ShardMap;
pub use strategy::{CustomStrategy, PlacementStrategy};
