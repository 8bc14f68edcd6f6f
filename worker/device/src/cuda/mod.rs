//! CUDA devices: the driver, their memory, and the kernels on them.
//!
//! The first device opens the driver; a program without devices never does. Work of a device is
//! queued on one stream, in the order of the calls.

#[cfg(feature = "kernels")]
mod activation;
mod cast;
mod codec;
mod context;
#[cfg(feature = "kernels")]
mod cublas;
pub(crate) mod cuda_device;
pub(crate) mod cuda_memory;
pub(crate) mod driver;
#[cfg(feature = "kernels")]
mod elementwise;
#[cfg(feature = "kernels")]
mod embedding_bag;
#[cfg(feature = "kernels")]
pub(crate) mod gemm;
mod launch;
#[cfg(feature = "kernels")]
mod loss;
mod modules;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
pub(crate) mod pinned_memory;
mod waiter;
