//! Code for tests only.

pub mod adversary;
#[cfg(test)]
pub(crate) mod seeded_random;
#[cfg(feature = "simulation")]
pub mod simulation;
