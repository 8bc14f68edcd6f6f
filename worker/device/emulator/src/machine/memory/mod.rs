//! Memories whose every byte has a shadow: mapped, written, and by whom.

mod access;
mod bitmap;
mod global;
mod race;
mod region;

pub(crate) use access::{Access, Accessor};
pub use global::GlobalMemory;
pub(crate) use race::RaceShadow;
pub(crate) use region::Region;

/// The bytes of memory that nothing has been written to. As a float they are NaN.
pub(crate) const POISON: u8 = 0xff;
