//! Runs the tests of the example's modules: the data, the network, the picture.
//!
//! An example that is its own test target is not built to be run, and `tests/processes.rs` runs
//! it; so its modules are tested from here.

#![allow(dead_code, reason = "the example uses what these tests do not")]

#[path = "../examples/digits/data/mod.rs"]
mod data;
#[path = "../examples/digits/model/mod.rs"]
mod model;
#[path = "../examples/digits/picture.rs"]
mod picture;
#[path = "../examples/digits/progress.rs"]
mod progress;
#[path = "../examples/digits/random.rs"]
mod random;
