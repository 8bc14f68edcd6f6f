//! The invariants of a rendezvous, which tests check after every input.

use std::collections::BTreeSet;

use pushpull_common::protocol::limits::RING_SIZE_MAX;

use super::Rendezvous;
use super::admission::CONNECTIONS_MAX;

impl Rendezvous {
    /// # Panics
    /// If an invariant is broken.
    pub(crate) fn check_invariants(&self) {
        assert!(self.connections.len() <= CONNECTIONS_MAX, "{} peers", self.connections.len());
        assert!(self.members() <= RING_SIZE_MAX, "{} members", self.members());
        assert!(self.fences.len() <= RING_SIZE_MAX, "{} fences", self.fences.len());
        assert!(self.newcomers.is_empty(), "{:?} have not heard", self.newcomers);
        assert_eq!(self.waits.is_some(), self.waiting.len() > 0, "the wait");
        self.places.check_invariants();
        self.lineage.check_invariants();
        let mut ids = BTreeSet::new();
        let mut indices = BTreeSet::new();
        for (connection, candidate) in self.waiting.iter() {
            let id = candidate.join.id.as_str();
            let peer = self.connections.get(connection);
            assert_eq!(peer.map(|peer| peer.incarnation), Some(candidate.incarnation), "{id}");
            assert!(!self.fences.contains(id, candidate.incarnation), "{id} is fenced");
            assert!(ids.insert(id), "two members are {id}");
            if let Some(index) = self.places.own(candidate.claim()) {
                assert!(indices.insert(index), "two members have index {index}");
            }
        }
        let Some(ring) = &self.ring else { return };
        assert!(ring.epoch() <= self.newest_epoch, "the epoch");
        let seats = ring.seats();
        assert!(seats.is_sorted_by(|a, b| a.index < b.index), "the order of ranks");
        let of_ring: BTreeSet<&str> = seats.iter().map(|seat| seat.id.as_str()).collect();
        assert_eq!(of_ring.len(), seats.len(), "two ranks have one id");
        let live: Vec<u64> = ring.live().map(|(connection, _)| connection).collect();
        assert_eq!(live.iter().collect::<BTreeSet<_>>().len(), live.len(), "one connection");
        assert!(live.iter().all(|&at| self.connections.get(at).is_some()), "a closed connection");
        if ring.is_running() {
            assert_eq!(live.len(), seats.len(), "a ring runs without a member");
            assert!(!live.iter().any(|&at| self.waiting.contains(at)), "a member waits");
        }
        for (connection, seat) in ring.live().filter(|(at, _)| !self.waiting.contains(*at)) {
            assert!(ids.insert(seat.id.as_str()), "two members are {}", seat.id);
            assert!(indices.insert(seat.index), "two members have index {}", seat.index);
            let peer = self.connections.get(connection).expect("it is connected");
            assert!(!self.fences.contains(&seat.id, peer.incarnation), "{} is fenced", seat.id);
        }
    }
}
