//! [`CoordinatorsHeard`]: for how long nothing was heard of the open coordinators.

use std::time::{Duration, Instant};

use pushpull_common::protocol::limits::COORDINATORS_MAX;

/// When something was last heard of the coordinator at each place, and over which connection it was
/// opened. While that is open, its coordinator lives.
///
/// Not durable: what an earlier process knew counts from the start of this one.
#[derive(Debug)]
pub(in crate::shard) struct CoordinatorsHeard {
    started: Option<Instant>,
    places: Vec<HeardPlace>,
}

#[derive(Clone, Copy, Debug, Default)]
struct HeardPlace {
    at: Option<Instant>,
    connection: Option<u64>,
}

impl Default for CoordinatorsHeard {
    fn default() -> CoordinatorsHeard {
        CoordinatorsHeard { started: None, places: vec![HeardPlace::default(); COORDINATORS_MAX] }
    }
}

impl CoordinatorsHeard {
    /// Takes it that coordinators live whose connections are open.
    pub(in crate::shard) fn refresh(&mut self, now: Instant, is_open: impl Fn(u64) -> bool) {
        self.started.get_or_insert(now);
        for place in self.places.iter_mut().filter(|place| place.connection.is_some()) {
            match place.connection.is_some_and(&is_open) {
                true => place.at = Some(now),
                false => place.connection = None,
            }
        }
    }

    /// Records that the coordinator at a place was opened over a connection.
    pub(in crate::shard) fn opened(&mut self, now: Instant, place: usize, connection: u64) {
        self.places[place] = HeardPlace { at: Some(now), connection: Some(connection) };
    }

    /// Records that something was heard of the coordinator at a place.
    pub(in crate::shard) fn heard(&mut self, now: Instant, place: usize) {
        self.places[place].at = Some(now);
    }

    /// Returns for how long nothing was heard of the coordinator at a place.
    pub(in crate::shard) fn idle(&self, now: Instant, place: usize) -> Duration {
        let since = self.places[place].at.or(self.started).unwrap_or(now);
        now.saturating_duration_since(since)
    }
}
