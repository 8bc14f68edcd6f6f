//! The clients of a service: their calls, and the memory that these take.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::access::Principal;
use pushpull_common::ids::Incarnation;

use super::call_entry::{CallEntry, CallState};

/// The clients that a service remembers, by their incarnations.
#[derive(Debug, Default)]
pub(super) struct Clients {
    all: HashMap<Incarnation, ClientState>,
}

/// The state of one client of a service.
///
/// Invariants: `bytes` is the sum of the bytes of `calls`. An acknowledged call holds outputs.
/// `queued` has the calls in the state `Queued`, in the order of their arrival.
#[derive(Debug)]
pub(super) struct ClientState {
    /// The number of the connection that the client uses.
    pub(super) connection: Option<u64>,
    /// The time at which the last message of the client arrived.
    pub(super) heard: Instant,
    /// The watermark of the client: it has the answers of all calls up to this number.
    pub(super) settled: u64,
    /// The calls of the client, by number.
    pub(super) calls: BTreeMap<u64, CallEntry>,
    /// The calls of the client that wait for a thread.
    pub(super) queued: VecDeque<u64>,
    /// The bytes that are charged to the client.
    pub(super) bytes: u64,
    /// The principal that the client has proved to be; `None` if it was not asked.
    pub(super) principal: Option<Arc<Principal>>,
}

impl Clients {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, client: Incarnation) -> Option<&ClientState> {
        self.all.get(&client)
    }

    pub(super) fn get_mut(&mut self, client: Incarnation) -> Option<&mut ClientState> {
        self.all.get_mut(&client)
    }

    /// Returns a client, which is added if it is new.
    pub(super) fn remember(&mut self, client: Incarnation, now: Instant) -> &mut ClientState {
        self.all.entry(client).or_insert_with(|| ClientState {
            connection: None,
            heard: now,
            settled: 0,
            calls: BTreeMap::new(),
            queued: VecDeque::new(),
            bytes: 0,
            principal: None,
        })
    }

    pub(super) fn forget(&mut self, client: Incarnation) -> Option<ClientState> {
        self.all.remove(&client)
    }

    /// Returns the clients that were silent for a lease.
    pub(super) fn silent(&self, now: Instant, lease: Duration) -> Vec<Incarnation> {
        let is_silent = |client: &ClientState| now.saturating_duration_since(client.heard) >= lease;
        self.all.iter().filter(|(_, state)| is_silent(state)).map(|(&client, _)| client).collect()
    }

    /// Returns the client without calls that was silent the longest.
    pub(super) fn idle(&self) -> Option<Incarnation> {
        let idle = self.all.iter().filter(|(_, state)| state.calls.is_empty());
        idle.min_by_key(|(_, state)| state.heard).map(|(&client, _)| client)
    }

    /// Returns the bytes that are charged to all clients.
    pub(super) fn bytes(&self) -> u64 {
        self.all.values().map(|state| state.bytes).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Incarnation, &ClientState)> {
        self.all.iter().map(|(&client, state)| (client, state))
    }
}

impl ClientState {
    /// Raises the watermark of the client: it needs no answers of calls up to this number. Returns
    /// the calls between the old watermark and the new one.
    pub(super) fn settle(&mut self, settled: u64) -> Vec<u64> {
        if settled <= self.settled {
            return Vec::new();
        }
        let passed = self.calls.range(self.settled + 1..=settled).map(|(&call, _)| call).collect();
        self.settled = settled;
        passed
    }

    /// Records that the client has the answer of an ended call. The call is dropped, unless it
    /// holds outputs.
    pub(super) fn acknowledge(&mut self, call: u64) {
        let Some(entry) = self.calls.get_mut(&call).filter(|entry| entry.has_ended()) else {
            return;
        };
        entry.acknowledged = true;
        if !entry.holds_outputs() {
            self.remove(call);
        }
    }

    /// Removes a call with what it holds.
    pub(super) fn remove(&mut self, call: u64) -> Option<CallEntry> {
        let entry = self.calls.remove(&call)?;
        self.bytes -= entry.bytes;
        if matches!(entry.state, CallState::Queued { .. }) {
            self.queued.retain(|&queued| queued != call);
        }
        Some(entry)
    }

    /// Replaces the charge of a call by this many bytes.
    pub(super) fn charge(&mut self, call: u64, bytes: u64) {
        if let Some(entry) = self.calls.get_mut(&call) {
            self.bytes = self.bytes - entry.bytes + bytes;
            entry.bytes = bytes;
        }
    }

    /// Returns the number of calls whose answers the client does not have yet.
    pub(super) fn unacknowledged(&self) -> usize {
        self.calls.values().filter(|entry| !entry.acknowledged).count()
    }
}
