//! Sockets, threads and clocks around the pure shards.
//!
//! One thread accepts connections and reads each peer's hello. The shard's own thread then takes
//! the socket over, so that it reads, decides, applies and answers a request without a hand-off.

mod accept;
mod connection;
mod descriptor_watch;
mod file_jobs;
mod handle;
mod listener;
mod memory_limit;
mod owner_link;
mod panics;
mod peer;
mod peer_polling;
mod publisher;
mod saver;
mod server;
mod shard_thread;

pub use handle::PsHandle;
pub use listener::PsListener;
pub use server::Ps;
pub(crate) use server::boot;
