//! [`ScheduledCall`]: a call that is scheduled and has not ended.

use std::time::Instant;

use super::io::{ResourceId, WorkerId};

/// A call that is scheduled and has not ended.
#[derive(Debug)]
pub(super) struct ScheduledCall<E> {
    /// The only worker that may run it.
    pub(super) pinned: Option<WorkerId>,
    /// The resources that the call needs on its worker.
    pub(super) resources: Vec<ResourceId>,
    pub(super) status: CallStatus<E>,
    /// The time of the first failure that another attempt may not meet.
    pub(super) failing_since: Option<Instant>,
    /// The number of failures since then, from which the back-off follows.
    pub(super) failures: u32,
    /// The number of attempts that have passed their timeouts.
    pub(super) timeouts: u32,
}

/// The status of a scheduled call.
#[derive(Debug)]
pub(super) enum CallStatus<E> {
    /// The call waits for a worker.
    Queued,
    /// One worker runs the call.
    Running {
        #[cfg_attr(not(test), expect(dead_code, reason = "tests check it"))]
        worker: WorkerId,
    },
    /// The call waits before its next attempt.
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
