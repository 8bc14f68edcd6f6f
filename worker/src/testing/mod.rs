//! Code for tests only.

#[cfg(feature = "simulation")]
mod outcomes;
#[cfg(any(test, feature = "simulation"))]
pub(crate) mod plans;
#[cfg(any(test, feature = "simulation"))]
pub(crate) mod seeded_random;
#[cfg(feature = "simulation")]
pub mod simulation;
