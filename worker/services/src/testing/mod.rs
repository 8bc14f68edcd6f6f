//! Code for tests only.

#[cfg(any(test, feature = "simulation"))]
pub mod adversary;
pub(crate) mod planted;
#[cfg(feature = "simulation")]
pub mod simulation;
