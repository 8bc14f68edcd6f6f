//! Runs the pure session: a thread, sockets and a clock.

mod caller;
mod command_queue;
mod connection;
mod leadership;
mod mapped_memory;
mod runner;
#[expect(unsafe_code, reason = "memory that another process changes cannot be a slice")]
mod shared_memory;
mod thread;

#[cfg(test)]
pub(crate) use caller::SubmittedOperations;
pub(crate) use caller::{Caller, OperationFuture};
pub use leadership::{Leadership, OpenOperation};
pub(crate) use mapped_memory::MappedPullOutcome;
#[cfg(feature = "simulation")]
pub(crate) use mapped_memory::PushBuffers;
pub use runner::{CALLER_SPIN, SessionRunner};
#[cfg(feature = "simulation")]
pub(crate) use shared_memory::{MappedFile, map, map_push_buffer};
pub(crate) use thread::SessionThread;
