//! [`WaitingList`]: the members that wait for the next ring.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::limits::RING_SIZE_MAX;
use pushpull_common::protocol::message::RingJoin;

/// The members that have asked for the next ring, by connection.
///
/// Invariant: no two have one id.
#[derive(Debug, Default)]
pub(super) struct WaitingList {
    all: BTreeMap<u64, Candidate>,
    last_arrival: Option<Instant>,
}

/// A member that waits.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// The process.
    pub(super) incarnation: Incarnation,
    /// Its request, which names id, index, addresses and last ring.
    pub(super) join: RingJoin,
}

/// The ring of another rendezvous, as its members that wait here have described it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FormerRing {
    /// The epoch of the ring.
    pub(super) epoch: u64,
    /// The number of its members.
    pub(super) size: u32,
    /// How many of them wait here.
    pub(super) came: u32,
    /// Those that wait here and have named their index.
    pub(super) indices: BTreeSet<u32>,
    /// Those whose processes are gone.
    pub(super) gone: BTreeSet<u32>,
}

impl WaitingList {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn contains(&self, connection: u64) -> bool {
        self.all.contains_key(&connection)
    }

    pub(super) fn get(&self, connection: u64) -> Option<&Candidate> {
        self.all.get(&connection)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Candidate)> {
        self.all.iter().map(|(&connection, candidate)| (connection, candidate))
    }

    /// Adds a member, or replaces its request.
    pub(super) fn insert(&mut self, now: Instant, connection: u64, candidate: Candidate) {
        if self.all.insert(connection, candidate).is_none() {
            self.last_arrival = Some(now);
        }
    }

    pub(super) fn remove(&mut self, connection: u64) -> Option<Candidate> {
        self.all.remove(&connection)
    }

    /// Removes all members.
    pub(super) fn take_all(&mut self) -> Vec<(u64, Candidate)> {
        std::mem::take(&mut self.all).into_iter().collect()
    }

    /// Returns the time of the last arrival.
    pub(super) fn last_arrival(&self) -> Option<Instant> {
        self.last_arrival
    }

    /// Returns the newest ring that a member was in before.
    pub(super) fn former_ring(&self) -> Option<FormerRing> {
        let epoch = self.all.values().map(|of| of.join.epoch).max().filter(|epoch| *epoch > 0)?;
        let of_ring = || self.all.values().map(|of| &of.join).filter(|join| join.epoch == epoch);
        let size = of_ring().map(|join| join.size).max()?;
        let indices: BTreeSet<u32> = of_ring().filter_map(|join| join.index).collect();
        let gone = of_ring().flat_map(|join| join.gone.items().iter().copied());
        let gone = gone.filter(|index| (*index as usize) < RING_SIZE_MAX);
        // A member that is here is not gone, whatever another has seen.
        let gone = gone.filter(|index| !indices.contains(index)).collect();
        let came = of_ring().count() as u32;
        Some(FormerRing { epoch, size, came, indices, gone })
    }
}

impl FormerRing {
    /// Returns whether every member is here or gone.
    pub(super) fn is_complete(&self) -> bool {
        self.came.saturating_add(self.gone.len() as u32) >= self.size
    }

    /// Returns whether more than half of the members are here, so that no other part of the ring
    /// can have as many.
    pub(super) fn has_majority(&self) -> bool {
        self.came > self.size / 2
    }

    /// Returns the indices that are neither here nor gone; none if the indices of the ring had
    /// gaps, since their numbers are unknown then.
    pub(super) fn missing(&self) -> Vec<u32> {
        let is_known = |index: &u32| self.indices.contains(index) || self.gone.contains(index);
        let highest = self.indices.last().max(self.gone.last()).copied();
        match highest {
            Some(highest) if highest >= self.size => Vec::new(),
            _ => (0..self.size).filter(|index| !is_known(index)).collect(),
        }
    }
}
