//! CUDA devices on the emulated driver, which interprets the kernels and checks every access.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod codecs;
mod drivers;
mod emulator;
mod failures;
mod kernels;
mod memory;
mod nccl;
mod networks;
mod planted;
#[path = "../../src/kernels/testing.rs"]
#[allow(dead_code, reason = "the tests of the kernels use more of it")]
mod testing;
