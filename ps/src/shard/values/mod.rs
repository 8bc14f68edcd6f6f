//! The values of a shard: [`variables::Variables`], and [`applier::Applier`], which changes them.
//!
//! From the bottom up: `variables` with `fused_ranges`, `untrained_variables` and `last_pulls`;
//! `update_target`, `scan`, `mean`, `dense_input`, `staleness`, `rows`; `update`, the loop of every
//! change; the jobs; `applier`.

pub(crate) mod applier;
mod dense_input;
pub(super) mod fused_ranges;
pub(super) mod grad_norm;
pub(super) mod initialization;
pub(super) mod last_pulls;
mod mean;
pub(super) mod push_checks;
pub(super) mod push_job;
mod rows;
pub(super) mod scan;
pub(super) mod staleness;
pub(super) mod step_job;
pub(super) mod untrained_variables;
mod update;
mod update_target;
pub(super) mod variables;

use pushpull_store::store::Store;

/// The bytes of values that one slice of work changes. Large enough that slicing costs nothing;
/// small enough that a concurrent small request waits about 100 us.
pub(super) const SLICE_BYTES: u64 = 1 << 20;

/// The bytes of a gradient that are computed at a time. They stay in the fastest cache until they
/// are applied. A multiple of every element size.
const TILE_BYTES: u64 = 16 << 10;

/// Returns the budget of a slice of the current change, in bytes. A change in place is not sliced.
fn budget_of(store: &Store) -> u64 {
    if store.is_in_place() { u64::MAX } else { SLICE_BYTES }
}
