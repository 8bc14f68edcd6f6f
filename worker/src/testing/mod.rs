//! Code for tests only.

pub mod simulation;
