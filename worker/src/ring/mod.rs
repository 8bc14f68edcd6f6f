//! Training on a ring: the rule updates the values on each rank, and no server is needed. Or servers
//! have the values, and only dense gradients go around the ring: [`DenseRing`].

mod bucket_plan;
mod bucket_progress;
mod bucket_reducer;
mod dense_ring;
mod gradient_codecs;
mod gradient_stream;
mod local_model;
mod model_checkpoint;
mod reductions;
mod ring_trainer;
mod ring_trainer_config;
mod ring_worker;
mod step_agreement;
#[cfg(test)]
mod stream_tests;
mod streamed_step;
#[cfg(test)]
mod tests;

pub use dense_ring::{DenseRing, StepEntry};
pub use reductions::Agreement;
pub use ring_trainer::RingTrainer;
pub use ring_trainer_config::RingTrainerConfig;
pub use ring_worker::{RingWish, RingWorker};
pub use streamed_step::StreamedStep;
