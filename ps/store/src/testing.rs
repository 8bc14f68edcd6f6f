//! Test files and the trace of stores, for the tests of this crate and of its users.

pub mod full_disk;
pub mod store_trace;
pub mod test_files;
