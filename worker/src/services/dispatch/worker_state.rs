//! A worker of a coordinator.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use super::io::{Attempt, ResourceId};

/// A worker of a coordinator.
#[derive(Debug, Default)]
pub(super) struct WorkerState {
    /// Whether it is there.
    pub(super) is_up: bool,
    /// The attempts that it runs, by the numbers of their calls.
    pub(super) running: BTreeMap<u64, Attempt>,
    /// The calls that only it may run, in order.
    pub(super) pinned: VecDeque<u64>,
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

impl WorkerState {
    /// Returns whether it has all of these.
    pub(super) fn has(&self, resources: &[ResourceId]) -> bool {
        let made = |resource| self.resources.get(resource) == Some(&ResourceStatus::Made);
        resources.iter().all(made)
    }
}
