//! A thread, sockets and a clock around the pure session.

mod caller;
mod connection;
mod driver;
mod lenders;
mod link;
mod links;
mod outbox;
mod patience;
mod post;
#[expect(unsafe_code, reason = "memory that another process changes is no slice")]
mod shared_memory;
mod thread;
mod trays;
mod turns;

pub(crate) use caller::Caller;
pub(crate) use driver::Driver;
pub(crate) use lenders::Direct;
pub(crate) use patience::AWAKE;
pub(crate) use post::Call;
#[cfg(feature = "simulation")]
pub(crate) use shared_memory::{Mapped, map, map_tray};
pub(crate) use thread::SessionThread;
#[cfg(feature = "simulation")]
pub(crate) use trays::Trays;
pub(crate) use turns::{Open, Turns};
