//! The machine: runs a launch of a kernel over device memory, and checks every access. Pure.

mod block;
mod execute;
mod fault;
mod launch;
mod memory;
mod thread;
mod warp;

pub use fault::{DeviceFault, DeviceFaultKind, FaultLocation};
pub use launch::{LIMITS, Launch, LaunchError, Limits, run};
pub use memory::GlobalMemory;
