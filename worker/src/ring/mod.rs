//! Training on a ring: the rule updates the values on each rank, and no server is needed.

mod local_model;
mod model_checkpoint;
mod ring_trainer;
mod ring_trainer_config;
mod ring_worker;
#[cfg(test)]
mod tests;

pub use ring_trainer::RingTrainer;
pub use ring_trainer_config::RingTrainerConfig;
pub use ring_worker::{RingWish, RingWorker};
