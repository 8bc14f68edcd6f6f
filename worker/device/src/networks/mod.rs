//! Networks of the kernels: losses with derivatives that are written by hand.
//!
//! They hold no parameters, only reused buffers, so the caller may keep the parameters anywhere.

pub(crate) mod logistic;
pub(crate) mod mlp;
