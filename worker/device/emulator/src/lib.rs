//! An emulated CUDA driver for tests.
//!
//! The shared library of this crate has the part of the driver API that pushpull's devices call. It
//! interprets PTX on the processor and checks every access, so that a machine without a GPU finds
//! faults that a GPU would hide.
//!
//! | module | what |
//! | --- | --- |
//! | `scalar` | arithmetic of PTX on single values |
//! | [`ptx`] | from text to decoded instructions |
//! | [`machine`] | runs a launch over memory with shadows |
//! | `driver` | devices, contexts, streams; the C functions |
//! | [`control`] | what a test sets and asks |
//!
//! A test preloads the library by its path ([`control::library_path`]) or puts it on the search path
//! as `libcuda.so.1`, which is its name for the dynamic linker. The environment sets what the
//! machine has: `PUSHPULL_EMULATOR_DEVICES`, `PUSHPULL_EMULATOR_DRIVER_VERSION` (such as 12000),
//! `PUSHPULL_EMULATOR_MEMORY` (bytes of a device) and `PUSHPULL_EMULATOR_FAIL` (`name:n:code`,
//! separated by commas).
//!
//! Streams are lazy: work is done only when a caller waits for it, polls it or has queued a host
//! function behind it. Code that reads the target of a copy too early reads the old bytes. A copy
//! to pageable memory is held back, too, so that memory must live until the stream is done.

pub mod control;
mod driver;
pub mod machine;
pub mod ptx;
mod scalar;

pub use driver::Leaks;
