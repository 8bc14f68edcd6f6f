//! The data pipeline: the order in which an epoch visits the samples.

mod permutation;

pub use permutation::Permutation;
