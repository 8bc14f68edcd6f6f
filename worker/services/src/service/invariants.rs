//! The invariants of a service, which tests check after every input.

#[cfg(feature = "simulation")]
use pushpull_common::ids::Incarnation;

use super::Service;
use super::call_entry::CallState;

impl Service {
    /// # Panics
    /// If an invariant is broken.
    pub(crate) fn check_invariants(&self) {
        for (client, state) in self.clients.iter() {
            let bytes: u64 = state.calls.values().map(|entry| entry.bytes).sum();
            assert_eq!(bytes, state.bytes, "the bytes of {client:?}");
            let charged = bytes + self.executions.held(client);
            assert!(charged <= self.config.bytes_max, "{client:?} has {charged} bytes");
            assert!(state.unacknowledged() <= self.config.calls_max, "the calls of {client:?}");
            let mut queued: Vec<u64> = state.queued.iter().copied().collect();
            queued.sort_unstable();
            let is_queued =
                |call: &u64| matches!(state.calls[call].state, CallState::Queued { .. });
            let expected: Vec<u64> = state.calls.keys().copied().filter(is_queued).collect();
            assert_eq!(queued, expected, "the queue of {client:?}");
            assert_eq!(self.run_queue.contains(client), !queued.is_empty(), "{client:?} waits");
            for (&call, entry) in &state.calls {
                assert!(!entry.acknowledged || entry.holds_outputs(), "call {call} holds nothing");
                if let CallState::Running { execution } = entry.state {
                    let of = self.executions.get(execution).map(|of| (of.client, of.call));
                    assert_eq!(of, Some((client, call)), "an execution");
                }
            }
            let of_connection = state.connection.and_then(|at| self.connections.get(&at));
            let is_own = of_connection.is_none_or(|connection| connection.client == client);
            assert!(
                is_own && state.connection.is_some() == of_connection.is_some(),
                "a connection"
            );
        }
        for &(_, client, call) in &self.deadlines {
            let entry = self.clients.get(client).and_then(|state| state.calls.get(&call));
            assert!(entry.is_some_and(|entry| !entry.has_ended()), "the deadline of call {call}");
        }
        self.executions.check_invariants();
        for execution in self.executions.awaited() {
            // Otherwise nobody waits for it, and its thread is taken for good if it does not return.
            let state = self.clients.get(execution.client);
            let entry = state.and_then(|state| state.calls.get(&execution.call));
            assert!(entry.is_some(), "an execution of nobody");
        }
        assert!(self.clients.len() <= self.config.clients_max, "the clients");
        let all = self.clients.bytes() + self.executions.held_by_all();
        assert!(all <= self.config.total_bytes_max, "all clients have {all} bytes");
    }

    /// Yields the clients that are remembered.
    #[cfg(feature = "simulation")]
    pub(crate) fn remembered(&self) -> impl Iterator<Item = Incarnation> {
        self.clients.iter().map(|(client, _)| client)
    }

    /// Returns the number of a client's remembered calls, with their outputs.
    #[cfg(feature = "simulation")]
    pub(crate) fn calls_of(&self, client: Incarnation) -> usize {
        self.clients.get(client).map_or(0, |state| state.calls.len())
    }

    /// Returns whether no client is remembered.
    pub(crate) fn remembers_nobody(&self) -> bool {
        self.clients.len() == 0 && self.fetches.is_empty() && self.deadlines.is_empty()
    }
}
