//! [`ParkedFetches`]: the fetches that wait for the outputs of calls.

use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId};
use pushpull_common::protocol::message::OutputRef;

use super::io::{ExecutionId, OutputUser};

/// A request for an output of a call that has not ended.
#[derive(Debug)]
pub(super) struct ParkedFetch {
    pub(super) requester: Requester,
    pub(super) of: OutputRef,
    /// To whom the output must belong.
    pub(super) user: OutputUser,
    pub(super) arrived: Instant,
    pub(super) deadline: Option<Instant>,
}

/// The caller that waits for an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Requester {
    /// A request of a connection.
    Connection(u64, RequestId),
    /// A function of this server: the fetch, and the execution that needs it.
    Local(u64, ExecutionId),
}

/// The fetches that wait, in the order in which they began to.
///
/// Invariant: a fetch waits here until it is taken to be answered, or its requester has given it up
/// or ended.
#[derive(Debug, Default)]
pub(super) struct ParkedFetches(Vec<ParkedFetch>);

impl ParkedFetches {
    pub(super) fn park(&mut self, fetch: ParkedFetch) {
        self.0.push(fetch);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the earliest deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.iter().filter_map(|fetch| fetch.deadline).min()
    }

    /// Returns the number of fetches of a connection.
    pub(super) fn count_of(&self, connection: u64) -> usize {
        self.0.iter().filter(|fetch| fetch.is_from(connection)).count()
    }

    /// Drops the fetches of a connection that has ended.
    pub(super) fn drop_connection(&mut self, connection: u64) {
        self.0.retain(|fetch| !fetch.is_from(connection));
    }

    /// Drops the fetches of an execution that has ended.
    pub(super) fn drop_execution(&mut self, execution: ExecutionId) {
        let is_of = |of: Requester| matches!(of, Requester::Local(_, by) if by == execution);
        self.0.retain(|fetch| !is_of(fetch.requester));
    }

    /// Drops a fetch whose client has stopped waiting.
    pub(super) fn cancel(&mut self, connection: u64, request: RequestId) {
        let cancelled = Requester::Connection(connection, request);
        self.0.retain(|fetch| fetch.requester != cancelled);
    }

    /// Takes the fetches of a call.
    pub(super) fn take_of_call(&mut self, client: Incarnation, call: u64) -> Vec<ParkedFetch> {
        self.take(|fetch| fetch.of.owner == client && fetch.of.call == call)
    }

    /// Takes the fetches of all calls of a client.
    pub(super) fn take_of_client(&mut self, client: Incarnation) -> Vec<ParkedFetch> {
        self.take(|fetch| fetch.of.owner == client)
    }

    /// Takes the fetches whose deadlines have passed.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<ParkedFetch> {
        self.take(|fetch| fetch.deadline.is_some_and(|at| at <= now))
    }

    /// Takes the fetches that have waited for a lease and whose clients are unknown.
    pub(super) fn take_lost(
        &mut self,
        now: Instant,
        lease: Duration,
        is_known: impl Fn(Incarnation) -> bool,
    ) -> Vec<ParkedFetch> {
        self.take(|fetch| {
            let waited = now.saturating_duration_since(fetch.arrived);
            waited >= lease && !is_known(fetch.of.owner)
        })
    }

    fn take(&mut self, of: impl Fn(&ParkedFetch) -> bool) -> Vec<ParkedFetch> {
        self.0.extract_if(.., |fetch| of(fetch)).collect()
    }
}

impl ParkedFetch {
    fn is_from(&self, connection: u64) -> bool {
        matches!(self.requester, Requester::Connection(from, _) if from == connection)
    }
}
