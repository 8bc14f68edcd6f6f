//! Runs services and call sessions: threads, sockets and a clock.

pub(crate) mod client_core;
pub(crate) mod descriptor_watch;
pub(crate) mod door;
mod ended_execution;
pub(crate) mod function_pool;
mod outbox;
pub(crate) mod server_core;
pub(crate) mod timer;
