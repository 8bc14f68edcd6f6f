//! Tests of what several rooms make together.

#[cfg(feature = "tls")]
pub(crate) mod authority;
mod doors;
