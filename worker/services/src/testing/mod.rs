//! Code for tests only.

#[cfg(any(test, feature = "simulation"))]
pub mod adversary;
#[cfg(feature = "simulation")]
pub mod simulation;
