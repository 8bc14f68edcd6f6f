//! Around the training loop: the data that it consumes.

pub mod data;
