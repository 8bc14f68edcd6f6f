//! The processor: its threads, what the machine gives to them, and the kernels on them.

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
