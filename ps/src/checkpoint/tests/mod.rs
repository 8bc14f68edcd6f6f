//! What checkpoints promise: every bit comes back, nothing damaged is taken, and no crash costs an
//! earlier one.

mod corruption;
pub(crate) mod crashes;
mod directory;
mod forgery;
pub(crate) mod gate;
mod memory;
mod round_trip;
mod samples;
