//! Ring all-reduce: ranks that meet, reduce and gather around a ring, and name whom they lose.

#![forbid(unsafe_code)]

mod launch;

pub use launch::{Launch, LaunchError, Launcher};
