//! What drives the machines: a thread with the control connection, the listener and, in one of the
//! processes, the rendezvous.

mod control;
mod control_task;
mod door;
mod link_setup;
mod meeting;
mod peer;
mod rank_listener;
mod reach;
mod server;
mod wake;

pub(crate) use control::{Control, ControlConfig, NewRing};
pub(crate) use meeting::Meeting;
pub(crate) use wake::WakeFlag;
