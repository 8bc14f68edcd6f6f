//! Which bytes go to which shard, and how: params and gradients, from memory to the parts of a
//! push.
//!
//! Each module uses only lower ones; `tests/sources/layers.rs` lists their order.

pub(crate) mod dense_sum;
pub(crate) mod duplicate_sums;
pub(crate) mod gradient_buffer;
pub(crate) mod gradient_bytes;
pub(crate) mod packed_variables;
pub(crate) mod params;
pub(crate) mod part_buffer;
pub(crate) mod parts;
#[cfg(feature = "devices")]
mod pinned_pages;
pub(crate) mod pinned_words;
pub(crate) mod row_ids;
pub(crate) mod row_requests;
pub(crate) mod rows;
pub(crate) mod scatter;
pub(crate) mod selection;
pub(crate) mod sharding_plan;
pub(crate) mod staged_parts;
