//! Parked requests: a bounded queue of requests that wait, each with its deadline.

use std::collections::HashMap;
use std::time::Instant;

use pushpull_common::protocol::limits::PARKED_PER_CONNECTION_MAX;
use smallvec::SmallVec;

use crate::shard::request::parked_request::ParkedRequest;

/// The requests that wait, in order of arrival.
///
/// Invariant: the weights of a connection's requests sum up to at most
/// [`PARKED_PER_CONNECTION_MAX`], or it has one request.
#[derive(Debug, Default)]
pub(crate) struct ParkedRequests {
    entries: Vec<ParkedRequest>,
    per_connection: HashMap<u64, usize>,
}

/// Requests that no longer wait. Typically there is at most one.
pub(crate) type TakenRequests = SmallVec<[ParkedRequest; 2]>;

/// The connection has too many parked requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyParked;

impl ParkedRequests {
    /// Puts a request back that `take_first` has just taken, as the first of all.
    pub(crate) fn put_back(&mut self, entry: ParkedRequest) {
        *self.per_connection.entry(entry.request.connection).or_default() += entry.weight();
        self.entries.insert(0, entry);
    }

    pub(crate) fn park(&mut self, entry: ParkedRequest) -> Result<(), TooManyParked> {
        let weight = entry.weight();
        let count = self.per_connection.entry(entry.request.connection).or_default();
        if *count > 0 && *count + weight > PARKED_PER_CONNECTION_MAX {
            return Err(TooManyParked);
        }
        *count += weight;
        self.entries.push(entry);
        Ok(())
    }

    /// Takes the requests for which `ready` returns true, in order.
    pub(crate) fn take(&mut self, mut ready: impl FnMut(&ParkedRequest) -> bool) -> TakenRequests {
        let taken: TakenRequests = self.entries.extract_if(.., |entry| ready(entry)).collect();
        for entry in &taken {
            self.forget(entry);
        }
        taken
    }

    /// Takes the first request for which `ready` returns true.
    pub(crate) fn take_first(
        &mut self,
        ready: impl FnMut(&ParkedRequest) -> bool,
    ) -> Option<ParkedRequest> {
        let index = self.entries.iter().position(ready)?;
        let entry = self.entries.remove(index);
        self.forget(&entry);
        Some(entry)
    }

    /// Takes the requests whose deadline has passed.
    pub(crate) fn expire(&mut self, now: Instant) -> TakenRequests {
        self.take(|entry| entry.request.deadline.is_some_and(|deadline| deadline <= now))
    }

    /// Drops the requests of a connection that has ended.
    pub(crate) fn drop_connection(&mut self, connection: u64) {
        self.take(|entry| entry.request.connection == connection);
    }

    pub(crate) fn count(&self, which: impl Fn(&&ParkedRequest) -> bool) -> usize {
        self.entries.iter().filter(which).count()
    }

    /// Returns the request of a worker that has waited longest.
    pub(crate) fn oldest_of_clients(&self) -> Option<&ParkedRequest> {
        let of_clients = self.entries.iter().filter(|entry| entry.request.client.is_some());
        of_clients.min_by_key(|entry| entry.request.since)
    }

    /// Returns whether a connection has a parked request.
    pub(crate) fn waits(&self, connection: u64) -> bool {
        self.per_connection.contains_key(&connection)
    }

    /// Returns whether a request waits.
    pub(crate) fn is_any(&self) -> bool {
        !self.entries.is_empty()
    }

    pub(crate) fn any(&self, ready: impl FnMut(&ParkedRequest) -> bool) -> bool {
        self.entries.iter().any(ready)
    }

    fn forget(&mut self, entry: &ParkedRequest) {
        if let Some(count) = self.per_connection.get_mut(&entry.request.connection) {
            *count -= entry.weight();
            if *count == 0 {
                self.per_connection.remove(&entry.request.connection);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pushpull_common::protocol::Envelope;
    use pushpull_common::protocol::message::Role;

    use super::*;
    use crate::shard::request::PeerRequest;
    use crate::shard::request::parked_request::WaitReason;

    fn request(connection: u64, since: Instant) -> PeerRequest {
        let role = Role::Reader {};
        let client = None;
        let envelope = Envelope::default();
        PeerRequest { connection, role, client, kind: 0, envelope, since, deadline: None }
    }

    #[test]
    fn parked_requests_are_bounded_and_ordered_and_expire() {
        let now = Instant::now();
        let mut parked = ParkedRequests::default();
        for index in 0..PARKED_PER_CONNECTION_MAX as u64 {
            let request = PeerRequest {
                envelope: Envelope { sequence: index.into(), ..Envelope::default() },
                deadline: (index % 2 == 0).then(|| now + Duration::from_millis(index)),
                ..request(7, now)
            };
            parked.park(ParkedRequest { request, wait: WaitReason::Token }).unwrap();
        }
        let more = |connection| ParkedRequest {
            request: request(connection, now),
            wait: WaitReason::PushSlot,
        };
        assert_eq!(parked.park(more(7)), Err(TooManyParked));
        parked.park(more(8)).unwrap();
        let expired = parked.expire(now + Duration::from_millis(4));
        let order: Vec<u64> =
            expired.iter().map(|entry| entry.request.envelope.sequence.0).collect();
        assert_eq!(order, [0, 2, 4]);
        parked.park(more(7)).unwrap();
        assert!(parked.waits(7) && parked.waits(8));
        let first = parked.take_first(|e| matches!(e.wait, WaitReason::PushSlot)).unwrap();
        assert_eq!(first.request.connection, 8);
        assert!(parked.waits(7) && !parked.waits(8));
        parked.drop_connection(7);
        assert!(!parked.any(|_| true) && parked.per_connection.is_empty());
    }
}
