//! How gradients become steps.

pub(crate) mod admission;
#[cfg(test)]
pub(crate) mod exhaustive;
pub(crate) mod mode;
pub(crate) mod round;
pub(crate) mod step_owner;
