//! The kernels, as methods of [`crate::Device`].

pub(crate) mod activation;
pub(crate) mod elementwise;
pub(crate) mod embedding_bag;
pub(crate) mod gemm;
mod loss;
#[cfg(test)]
pub(crate) mod testing;
