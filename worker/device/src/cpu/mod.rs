//! The processor as a device.

pub(crate) mod host;
pub(crate) mod pool;
