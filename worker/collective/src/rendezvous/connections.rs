//! [`Connections`]: the peers that have said hello, and when each was last heard.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::Incarnation;

/// The open connections, by number.
#[derive(Debug, Default)]
pub(super) struct Connections {
    all: BTreeMap<u64, Peer>,
}

/// A peer that has said hello.
#[derive(Debug)]
pub(super) struct Peer {
    /// The process, which draws another incarnation at each start.
    pub(super) incarnation: Incarnation,
    /// The facts of the peer's hello.
    pub(super) identity: Identity,
    /// The time at which the last message of the peer arrived.
    pub(super) heard: Instant,
    /// The time of the last answer to a heartbeat.
    answered: Option<Instant>,
    /// The time of the last message to the peer that it has confirmed to have read. Until a lease
    /// after that it takes this rendezvous for alive, and is at no other.
    confirmed: Option<Instant>,
    /// The epoch of the last ring of a member that lives, and has not asked for the next one yet. Its
    /// rendezvous is lost.
    pub(super) computes_after: Option<u64>,
}

impl Peer {
    pub(super) fn new(now: Instant, incarnation: Incarnation, identity: Identity) -> Peer {
        Peer {
            incarnation,
            identity,
            heard: now,
            answered: None,
            confirmed: None,
            computes_after: None,
        }
    }

    /// Notes the answer to a heartbeat. A peer sends the next heartbeat once it has read the answer
    /// to the last.
    pub(super) fn answer(&mut self, now: Instant) {
        let last = self.answered.replace(now);
        self.confirmed = self.confirmed.max(last);
    }

    /// Notes that the peer has read what was sent to it at a time.
    pub(super) fn confirm(&mut self, sent: Instant) {
        self.confirmed = self.confirmed.max(Some(sent));
    }

    /// Returns the time until which the peer is at no other rendezvous.
    pub(super) fn bound_until(&self, lease: Duration) -> Option<Instant> {
        self.confirmed?.checked_add(lease)
    }
}

impl Connections {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, connection: u64) -> Option<&Peer> {
        self.all.get(&connection)
    }

    pub(super) fn get_mut(&mut self, connection: u64) -> Option<&mut Peer> {
        self.all.get_mut(&connection)
    }

    /// Returns whether a process has a connection.
    pub(super) fn has_process(&self, process: Incarnation) -> bool {
        self.all.values().any(|peer| peer.incarnation == process)
    }

    /// Returns whether members of a ring compute that have not asked for the next one.
    pub(super) fn compute_after(&self, epoch: u64) -> bool {
        self.all.values().any(|peer| peer.computes_after == Some(epoch))
    }

    pub(super) fn insert(&mut self, connection: u64, peer: Peer) {
        self.all.insert(connection, peer);
    }

    pub(super) fn remove(&mut self, connection: u64) -> Option<Peer> {
        self.all.remove(&connection)
    }

    /// Notes a message. Returns whether the connection is open.
    pub(super) fn hear(&mut self, connection: u64, now: Instant) -> bool {
        let peer = self.all.get_mut(&connection);
        peer.map(|peer| peer.heard = now).is_some()
    }

    /// Takes all peers as heard at a time, unless they were heard since.
    pub(super) fn excuse(&mut self, heard: Instant) {
        for peer in self.all.values_mut() {
            peer.heard = peer.heard.max(heard);
        }
    }

    /// Returns the connections that were silent for a lease.
    pub(super) fn silent(&self, now: Instant, lease: Duration) -> Vec<u64> {
        let is_silent = |peer: &Peer| now.saturating_duration_since(peer.heard) >= lease;
        self.all.iter().filter(|(_, peer)| is_silent(peer)).map(|(&number, _)| number).collect()
    }

    /// Returns when the next lease ends.
    pub(super) fn lease_ends(&self, lease: Duration) -> Option<Instant> {
        self.all.values().map(|peer| peer.heard).min()?.checked_add(lease)
    }
}
