//! Training on a ring: the rule updates the values on each rank, and no server is needed.

mod local_model;
mod model_checkpoint;
mod ring_trainer;

#[cfg(test)]
mod tests;

pub use ring_trainer::{RingTrainer, RingTrainerConfig};
