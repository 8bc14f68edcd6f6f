//! Training on a CUDA device: an emulated one, which checks every access.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod codecs;
mod programs;
mod training;
