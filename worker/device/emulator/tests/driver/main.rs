//! Calls the shared library as a program does that opens the driver.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod calls;
mod harness;
mod memory;
mod modules;
mod streams;
