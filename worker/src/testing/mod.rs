//! Code for tests only.

#[cfg(any(test, feature = "simulation"))]
pub mod adversary;
#[cfg(any(test, feature = "simulation"))]
pub(crate) mod plans;
pub(crate) mod planted;
#[cfg(test)]
pub(crate) mod seeded_random;
#[cfg(feature = "simulation")]
pub mod simulation;
