//! A worker of a coordinator.

use std::collections::BTreeMap;
use std::time::Instant;

use super::call_queue::CallQueue;
use super::io::{Attempt, ResourceId};

/// A worker of a coordinator.
#[derive(Debug, Default)]
pub(super) struct WorkerState {
    /// Whether it is there.
    pub(super) is_up: bool,
    /// The attempts that it runs, by the numbers of their calls.
    pub(super) running: BTreeMap<u64, Attempt>,
    /// The calls that only it may run.
    pub(super) pinned: CallQueue,
    /// The resources that it has, or that are being made.
    pub(super) resources: BTreeMap<ResourceId, ResourceStatus>,
}

/// How far a resource of a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResourceStatus {
    /// It is being made, after this many failures that another call may mend.
    Making {
        failures: u32,
    },
    /// It is made again after a pause.
    BackingOff {
        until: Instant,
        failures: u32,
    },
    Made,
    /// It cannot be made: the worker runs no call that needs it.
    Failed,
}

/// Returns whether a worker with these resources has all that a call needs.
pub(super) fn has(made: &BTreeMap<ResourceId, ResourceStatus>, needed: &[ResourceId]) -> bool {
    needed.iter().all(|resource| made.get(resource) == Some(&ResourceStatus::Made))
}

/// Returns a resource that a call needs and that a worker cannot have until it restarts.
pub(super) fn failed(
    made: &BTreeMap<ResourceId, ResourceStatus>,
    needed: &[ResourceId],
) -> Option<ResourceId> {
    needed.iter().copied().find(|resource| made.get(resource) == Some(&ResourceStatus::Failed))
}
