//! The state of one worker in a dispatch.

use std::collections::BTreeMap;
use std::time::Instant;

use super::call_queue::CallQueue;
use super::io::{Attempt, ResourceId};

/// The state of one worker of a coordinator.
#[derive(Debug, Default)]
pub(super) struct WorkerState {
    /// Whether the worker is present.
    pub(super) is_up: bool,
    /// The attempts that the worker runs, by call numbers.
    pub(super) running: BTreeMap<u64, Attempt>,
    /// The queue of the calls that are pinned to this worker.
    pub(super) pinned: CallQueue,
    /// The resources that the worker has, or that are being made.
    pub(super) resources: BTreeMap<ResourceId, ResourceStatus>,
}

/// The status of a resource on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResourceStatus {
    /// The resource is being made, after this many failures that another call may not meet.
    Making {
        failures: u32,
    },
    /// The resource is made again after a pause.
    BackingOff {
        until: Instant,
        failures: u32,
    },
    Made,
    /// The resource cannot be made: the worker runs no call that needs it.
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
