//! Code for tests only.

pub mod adversary;
#[cfg(feature = "simulation")]
pub mod simulation;
