//! Test files and the trace of stores, for the tests of this crate and of its users.

#[doc(hidden)]
pub mod measure;
#[cfg(any(test, feature = "testing"))]
pub mod store_trace;
#[cfg(any(test, feature = "simulation"))]
pub mod test_files;
