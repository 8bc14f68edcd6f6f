//! A call that is scheduled and has not ended.

use std::time::Instant;

use super::io::{ResourceId, WorkerId};

/// A call that is scheduled and has not ended.
#[derive(Debug)]
pub(super) struct ScheduledCall<E> {
    /// The only worker that may run it.
    pub(super) pinned: Option<WorkerId>,
    /// What it needs of its worker.
    pub(super) resources: Vec<ResourceId>,
    pub(super) status: CallStatus<E>,
    /// When it has first failed in a way that another attempt may mend.
    pub(super) failing_since: Option<Instant>,
    /// How often it has failed so.
    pub(super) failures: u32,
    /// The number of times that it was too slow.
    pub(super) timeouts: u32,
}

/// How far a call is.
#[derive(Debug)]
pub(super) enum CallStatus<E> {
    /// It waits for a worker.
    Queued,
    /// A worker runs it.
    Running {
        #[cfg_attr(not(test), expect(dead_code, reason = "tests check it"))]
        worker: WorkerId,
    },
    /// It waits before it is tried again.
    BackingOff {
        #[expect(dead_code, reason = "shows why the call waits in debug output")]
        last: E,
    },
}

impl<E> ScheduledCall<E> {
    pub(super) fn new(pinned: Option<WorkerId>, resources: Vec<ResourceId>) -> ScheduledCall<E> {
        let status = CallStatus::Queued;
        let failing_since = None;
        let failures = 0;
        let timeouts = 0;
        ScheduledCall { pinned, resources, status, failing_since, failures, timeouts }
    }
}
