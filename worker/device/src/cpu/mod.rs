//! The processor: its threads, its share of the machine, and the kernels on it.

#[cfg(feature = "kernels")]
pub(crate) mod activation;
pub(crate) mod cast;
pub(crate) mod codec;
#[cfg(feature = "kernels")]
pub(crate) mod elementwise;
#[cfg(feature = "kernels")]
pub(crate) mod embedding_bag;
#[cfg(feature = "kernels")]
pub(crate) mod gemm;
pub(crate) mod host;
#[cfg(feature = "kernels")]
pub(crate) mod loss;
pub(crate) mod pool;
