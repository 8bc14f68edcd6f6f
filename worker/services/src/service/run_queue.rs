//! [`RunQueue`]: the round robin of clients with queued calls.

use std::collections::VecDeque;

use pushpull_common::ids::Incarnation;

/// The clients with queued calls, in the order of their turns.
///
/// Each turn runs one call of one client. So a client with a thousand calls delays a client with a
/// single call by one execution.
#[derive(Debug, Default)]
pub(super) struct RunQueue {
    clients: VecDeque<Incarnation>,
}

impl RunQueue {
    /// Adds a client that has a queued call.
    pub(super) fn add(&mut self, client: Incarnation) {
        if !self.clients.contains(&client) {
            self.clients.push_back(client);
        }
    }

    /// Removes a client, which has no queued call left.
    pub(super) fn remove(&mut self, client: Incarnation) {
        self.clients.retain(|&other| other != client);
    }

    /// Returns whether a client has a queued call.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn contains(&self, client: Incarnation) -> bool {
        self.clients.contains(&client)
    }

    /// Returns the first client in the order of turns whose next call may run. Its turn is over: it
    /// moves to the end, until it is removed.
    pub(super) fn next(&mut self, may_run: impl Fn(Incarnation) -> bool) -> Option<Incarnation> {
        let index = self.clients.iter().position(|&client| may_run(client))?;
        let client = self.clients.remove(index)?;
        self.clients.push_back(client);
        Some(client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_take_turns() {
        let [a, b, c] = [1, 2, 3].map(Incarnation);
        let mut queue = RunQueue::default();
        for client in [a, b, a, c] {
            queue.add(client);
        }
        let mut turns = |may_run: fn(Incarnation) -> bool| queue.next(may_run).map(|c| c.0);
        assert_eq!(
            [turns(|_| true), turns(|_| true), turns(|_| true)],
            [Some(1), Some(2), Some(3)]
        );
        assert_eq!(turns(|client| client.0 == 2), Some(2));
        assert_eq!(turns(|_| true), Some(1), "the others keep their places");
        assert_eq!(turns(|_| false), None);
        queue.remove(c);
        assert_eq!([queue.next(|_| true), queue.next(|_| true)], [Some(b), Some(a)]);
    }
}
