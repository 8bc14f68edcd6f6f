//! CUDA devices: the driver, their memory, and the kernels on them.
//!
//! The driver is opened when the first device is, and never by a program that opens none. Work of a
//! device is queued on one stream, in the order of the calls.

mod activation;
mod cast;
mod codec;
mod context;
mod cublas;
pub(crate) mod cuda_device;
pub(crate) mod cuda_memory;
pub(crate) mod driver;
mod elementwise;
mod embedding_bag;
pub(crate) mod gemm;
mod launch;
mod loss;
mod modules;
pub(crate) mod pinned_memory;
mod waiter;
