//! Tests of checkpoints: every bit is restored, damaged files are refused, and no crash loses an
//! earlier checkpoint.

mod corruption;
mod crashes;
mod directory;
mod forgery;
mod frozen;
mod memory;
mod round_trip;
mod samples;
