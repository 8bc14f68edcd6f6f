//! Training on a ring: the rule updates the values on each rank, and no server is needed. Or servers
//! have the values, and only dense gradients go around the ring: [`DenseRing`].

mod dense_ring;
mod gradient_codecs;
mod local_model;
mod model_checkpoint;
mod ring_trainer;
mod ring_trainer_config;
mod ring_worker;
mod step_agreement;
#[cfg(test)]
mod tests;

pub use dense_ring::{DenseRing, StepEntry};
pub use ring_trainer::RingTrainer;
pub use ring_trainer_config::RingTrainerConfig;
pub use ring_worker::{RingWish, RingWorker};
