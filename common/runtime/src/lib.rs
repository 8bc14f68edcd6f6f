//! What the runtimes of servers and workers share.
//!
//! [`Near`] is a Unix socket whose peer's reads wake nobody; [`Processors`] says whether there is a processor to spare.
//! An internal crate of pushpull: what it offers may change with any version.

mod near;
mod processors;

pub use near::Near;
pub use processors::Processors;
