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
//! | [`turn`] | the emulator for one test at a time |
//!
//! A test loads the library by its path ([`control::Library`]), and the dynamic linker knows it as
//! `libcuda.so.1` then. On a machine with a GPU, where `libcuda.so` may be found first, put it into
//! a folder of `LD_LIBRARY_PATH` under both names instead ([`control::link_as_driver`]). The
//! environment sets what the machine has: `PUSHPULL_EMULATOR_DEVICES`,
//! `PUSHPULL_EMULATOR_DRIVER_VERSION` (such as 12000), `PUSHPULL_EMULATOR_MEMORY` (bytes of a
//! device) and `PUSHPULL_EMULATOR_FAIL` (`name:n:code`, separated by commas).
//!
//! Streams are lazy: work is done only when a caller waits for it, polls it or has queued a host
//! function behind it. Code that reads the target of a copy too early reads the old bytes. A copy
//! to pageable memory is held back, too, so that memory must live until the stream is done.
//!
//! A fault of a kernel or a copy makes the error 700 sticky, as on a GPU. Other misuse is only
//! noted in [`control::Control::faults`]: work of two streams that uses the same bytes without an
//! event or a wait between it, frees of memory that a stream may still use, calls by host
//! functions, modules that are unloaded too early. A test should end with no faults and no leaks.

pub mod control;
mod driver;
pub mod machine;
pub mod ptx;
mod scalar;
pub mod turn;

pub use driver::Leaks;
