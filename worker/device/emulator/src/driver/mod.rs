//! The driver: devices, contexts, streams and events, and the C functions on top.

mod abi;
mod call_log;
mod code;
mod context;
mod device;
mod host_functions;
mod host_memory;
mod leaks;
mod modules;
mod order;
mod settings;
mod shared;
mod state;
mod stream;
mod work;

pub use leaks::Leaks;
pub(crate) use settings::Settings;
pub(crate) use shared::with_state;
