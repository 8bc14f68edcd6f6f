//! Tests of checkpoints: every bit is restored, damaged files are refused, and no crash loses an
//! earlier checkpoint.

mod corruption;
pub(crate) mod crashes;
mod directory;
mod forgery;
pub(crate) mod gate;
mod memory;
mod round_trip;
mod samples;
