//! An emulated CUDA driver for tests.
//!
//! The shared library of this crate has the part of the driver API that pushpull's devices call. It
//! interprets PTX on the processor and checks every access, so that a machine without a GPU finds
//! faults that a GPU would hide.

pub mod machine;
pub mod ptx;
mod scalar;
