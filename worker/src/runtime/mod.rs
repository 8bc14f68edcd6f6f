//! A thread, sockets and a clock around the pure session.

mod caller;
mod connection;
mod link;
mod outbox;
mod post;
mod thread;

pub(crate) use caller::Caller;
pub(crate) use post::Call;
pub(crate) use thread::SessionThread;
