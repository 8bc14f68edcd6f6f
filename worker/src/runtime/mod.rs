//! A thread, sockets and a clock around the pure session.

mod connection;
mod link;
mod outbox;
mod post;
mod thread;

pub(crate) use thread::SessionThread;
