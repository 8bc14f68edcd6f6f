//! How gradients become steps.

pub(crate) mod step_owner;
