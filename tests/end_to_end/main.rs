//! Real servers and real workers over real sockets, in one process.

mod bad_input;
mod cluster;
mod exactness;
mod hostile;
mod lifecycle;
mod proxy;
mod reconnect;
mod verbs;
