//! The processor: its threads, what the machine gives to them, and the kernels on them.

pub(crate) mod activation;
pub(crate) mod cast;
pub(crate) mod codec;
pub(crate) mod elementwise;
pub(crate) mod embedding_bag;
pub(crate) mod gemm;
pub(crate) mod host;
pub(crate) mod loss;
pub(crate) mod pool;
