//! The shared vocabulary of pushpull: what a cluster is, what a variable is, where it lives, and
//! what the two sides say to each other.
//!
//! Everything here is pure. There is no socket, thread, clock, random source or unsafe code in
//! this crate, so that the runtime, the tests and the fuzzers all drive exactly the same code.

#![forbid(unsafe_code)]

pub mod catalogue;
pub mod cluster;
pub mod codec;
pub mod device;
pub mod finite;
pub mod identity;
pub mod ids;
pub mod initializer;
pub mod names;
pub mod partition;
pub mod placement;
pub mod protocol;
pub mod rows;
pub mod shared_values;
pub mod table;
pub mod tensor;
pub mod variable;
pub mod wait_history;
