//! Ring all-reduce: ranks that meet, reduce and gather around a ring, and name whom they lose.

#![forbid(unsafe_code)]

mod launch;

pub use launch::{Launch, LaunchError, Launcher};
mod element;
mod fold;
mod reduction;

pub use self::element::{ElementKind, RingElement};
pub use self::reduction::Reduction;
#[allow(dead_code, reason = "the runtime of rings will drive it")]
mod rendezvous;
