//! A thread, sockets and a clock around the pure session.

mod caller;
mod connection;
mod leadership;
mod mapped_shards;
mod outbox;
mod per_link;
mod push_buffers;
mod reply;
mod runner;
#[expect(unsafe_code, reason = "memory that another process changes is no slice")]
mod shared_memory;
mod thread;

pub(crate) use caller::Caller;
pub(crate) use leadership::{Leadership, OpenOperation};
pub(crate) use mapped_shards::Direct;
#[cfg(feature = "simulation")]
pub(crate) use push_buffers::PushBuffers;
pub(crate) use reply::Call;
pub(crate) use runner::{CALLER_SPIN, SessionRunner};
#[cfg(feature = "simulation")]
pub(crate) use shared_memory::{Mapped, map, map_push_buffer};
pub(crate) use thread::SessionThread;
