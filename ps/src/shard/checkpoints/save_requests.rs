//! [`SaveRequests`]: the saves of all shards that the step owner has been asked for.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pushpull_checkpoint::CheckpointFault;

use crate::shard::file_work::saver_order::SaveRequester;

/// The save that is running, and those that wait for it, in order.
#[derive(Debug, Default)]
pub(in crate::shard) struct SaveRequests {
    /// Whether a save is running.
    is_running: bool,
    pub(super) waiting: VecDeque<SaveRequest>,
}

/// A request to save a checkpoint.
#[derive(Debug)]
pub(in crate::shard) struct SaveRequest {
    pub(in crate::shard) requester: SaveRequester,
    pub(in crate::shard) user: Vec<u8>,
    since: Instant,
}

/// The most save requests that wait for the running save.
const SAVE_REQUESTS_MAX: usize = 16;

/// How long a shard keeps a cut that is not requested, and how long a save request waits to begin.
pub(in crate::shard) const CUT_WAIT_MAX: Duration = Duration::from_secs(60);

/// Returns whether a cut or a request of this time has waited for too long.
pub(in crate::shard) fn has_expired(now: Instant, since: Instant) -> bool {
    now.saturating_duration_since(since) >= CUT_WAIT_MAX
}

impl SaveRequests {
    /// Queues a request. It begins when the previous save has ended and, in synchronous mode, every
    /// shard has applied the same steps. Fails if too many wait.
    pub(in crate::shard) fn add(
        &mut self,
        now: Instant,
        requester: SaveRequester,
        user: Vec<u8>,
    ) -> Result<(), CheckpointFault> {
        // A periodic save is repeated in its next period.
        if requester.is_periodic() && (self.is_running || !self.waiting.is_empty()) {
            return Ok(());
        }
        if self.waiting.len() == SAVE_REQUESTS_MAX {
            let error = format!("cannot save now: {SAVE_REQUESTS_MAX} saves wait already");
            return Err(CheckpointFault::Unavailable(error));
        }
        self.waiting.push_back(SaveRequest { requester, user, since: now });
        Ok(())
    }

    /// Returns whether a request waits and no save is running.
    pub(in crate::shard) fn are_due(&self) -> bool {
        !self.is_running && !self.waiting.is_empty()
    }

    /// Begins the next save.
    pub(in crate::shard) fn begin(&mut self) -> Option<SaveRequest> {
        let next = self.waiting.pop_front();
        self.is_running = next.is_some();
        next
    }

    /// The running save has ended. The next may begin.
    pub(in crate::shard) fn end(&mut self, now: Instant) {
        self.is_running = false;
        self.waiting.iter_mut().for_each(|request| request.since = now);
    }

    /// Returns whether a request, or something that has waited since `other`, has waited for too
    /// long. Nothing expires while a save is running.
    pub(in crate::shard) fn have_expired(&self, now: Instant, other: Option<Instant>) -> bool {
        let first = self.waiting.front().map(|request| request.since);
        let waits = other.into_iter().chain(first);
        !self.is_running && waits.into_iter().any(|since| has_expired(now, since))
    }

    /// Takes the requests that have waited for too long.
    pub(in crate::shard) fn take_expired(&mut self, now: Instant) -> Vec<SaveRequester> {
        let mut expired = Vec::new();
        while self.waiting.front().is_some_and(|request| has_expired(now, request.since)) {
            expired.extend(self.waiting.pop_front().map(|request| request.requester));
        }
        expired
    }

    /// Drops the requests of a connection that has ended.
    pub(in crate::shard) fn drop_of(&mut self, ended: u64) {
        self.waiting.retain(|request| {
            let SaveRequester::Connection { connection, .. } = request.requester else {
                return true;
            };
            connection != ended
        });
    }

    /// Takes some of the requests. A periodic save is repeated in its next period, and has nobody
    /// to be told.
    pub(in crate::shard) fn take(
        &mut self,
        which: impl Fn(&SaveRequester) -> bool,
    ) -> Vec<SaveRequester> {
        let mut taken = Vec::new();
        for request in std::mem::take(&mut self.waiting) {
            match which(&request.requester) {
                true if request.requester.is_periodic() => {}
                true => taken.push(request.requester),
                false => self.waiting.push_back(request),
            }
        }
        taken
    }
}
