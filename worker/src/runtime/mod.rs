//! Runs the pure session: a thread, sockets and a clock.

mod caller;
mod connection;
mod leadership;
mod mapped_shards;
mod outbox;
mod per_link;
mod push_buffers;
mod reply;
mod runner;
#[expect(unsafe_code, reason = "memory that another process changes cannot be a slice")]
mod shared_memory;
mod thread;

pub(crate) use caller::Caller;
pub(crate) use leadership::{Leadership, OpenOperation};
pub(crate) use mapped_shards::MappedPullOutcome;
#[cfg(feature = "simulation")]
pub(crate) use push_buffers::PushBuffers;
pub(crate) use reply::Call;
pub(crate) use runner::{CALLER_SPIN, SessionRunner};
#[cfg(feature = "simulation")]
pub(crate) use shared_memory::{MappedFile, map, map_push_buffer};
pub(crate) use thread::SessionThread;
