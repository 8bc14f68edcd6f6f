//! Ring all-reduce: ranks that meet, reduce and gather around a ring, and name whom they lose.
//!
//! [`Launch`] is the place of a process in its job. A [`Ring`] joins the processes of the job;
//! [`blocking::Ring`] is its twin for threads. The private `schedule` has the passes of an
//! operation, `rendezvous` decides who is in a ring, and `member` is a rank's side of that: pure
//! machines, which `runtime` and `links` drive.

#![forbid(unsafe_code)]

mod block_on;
pub mod blocking;
mod config;
mod element;
mod encoded;
mod error;
mod fold;
mod formed_ring;
mod gathered;
mod links;
mod member;
mod metrics;
mod planted;
mod reduction;
mod rendezvous;
mod ring;
mod running;
mod runtime;
mod schedule;
mod stall;
#[cfg(any(test, feature = "simulation"))]
mod testing;
mod transfer;
mod transport;
mod waiter;
mod waiting_links;

pub use config::RingConfig;
pub use element::{ElementKind, RingElement};
pub use error::RingError;
pub use metrics::RingMetrics;
pub use pushpull_common::launch::{Launch, LaunchError, Launcher};
pub use reduction::Reduction;
pub use ring::{EncodedTensor, Ring, Tensor};
pub use stall::RingStall;
pub use transport::Transport;

#[cfg(any(test, feature = "simulation"))]
#[doc(hidden)]
pub use testing::adversary;
