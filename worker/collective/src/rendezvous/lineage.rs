//! [`Lineage`]: the rings that the next one replaces, and the quorum that it needs of each.

use std::collections::BTreeSet;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::message::RankAddresses;

use super::waiting_list::{FormerRing, WaitingList};

/// The last ring, and those before it that it has not replaced for certain.
///
/// A ring has replaced the rings before once all its members have entered it: then each of them asks
/// for another ring only as a member of this one. Until then a member may not have heard of it, and
/// may go on at another rendezvous as a member of a ring before. So the next ring needs a quorum of
/// each ring here. Two quorums of a ring share a member, who is at one rendezvous alone.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    /// The rings, oldest first: at most [`RINGS_MAX`].
    rings: Vec<Electorate>,
}

/// The members of a ring. A quorum of them must be in the next one.
#[derive(Debug)]
pub(super) struct Electorate {
    epoch: u64,
    size: u32,
    /// Whether this rendezvous formed the ring. Then it goes on with half of the members: any other
    /// rendezvous needs more than half.
    is_own: bool,
    /// The members that this rendezvous knows.
    voters: Vec<Voter>,
    /// The members of a former ring that were gone when the others came.
    gone: u32,
}

/// A member of a ring.
#[derive(Clone, Debug)]
pub(super) struct Voter {
    pub(super) id: String,
    pub(super) incarnation: Incarnation,
    pub(super) addresses: RankAddresses,
    has_entered: bool,
    /// Whether it has left, or its process has ended, while it was at no other rendezvous.
    has_ended: bool,
}

impl Voter {
    /// Creates a member that has not entered its ring.
    pub(super) fn new(id: &str, incarnation: Incarnation, addresses: RankAddresses) -> Voter {
        let id = id.to_owned();
        Voter { id, incarnation, addresses, has_entered: false, has_ended: false }
    }
}

impl Lineage {
    /// Adds the ring that members had at another rendezvous before they came here.
    pub(super) fn adopt(&mut self, former: &FormerRing, waiting: &WaitingList) {
        let of_ring = waiting.iter().filter(|(_, of)| of.join.epoch == former.epoch);
        let voters: Vec<Voter> = of_ring
            .map(|(_, of)| {
                let addresses = of.join.addresses.clone();
                Voter::new(of.join.id.as_str(), of.incarnation, addresses)
            })
            .collect();
        let gone = former.gone.len() as u32;
        let FormerRing { epoch, size, .. } = *former;
        self.rings.push(Electorate { epoch, size, is_own: false, voters, gone });
    }

    /// Adds a ring that forms here.
    pub(super) fn form(&mut self, epoch: u64, voters: Vec<Voter>) {
        if self.rings.len() >= RINGS_MAX {
            self.rings.remove(0);
        }
        let size = voters.len() as u32;
        self.rings.push(Electorate { epoch, size, is_own: true, voters, gone: 0 });
    }

    /// Notes that a member has entered a ring, and forgets the rings that this has replaced.
    pub(super) fn enter(&mut self, epoch: u64, id: &str, incarnation: Incarnation) {
        let Some(at) = self.rings.iter().position(|ring| ring.epoch == epoch && ring.is_own) else {
            return;
        };
        let Some(ring) = self.rings.get_mut(at) else { return };
        for voter in ring.voters.iter_mut().filter(|of| of.is(id, incarnation)) {
            voter.has_entered = true;
        }
        if ring.voters.iter().all(|voter| voter.has_entered) {
            self.rings.drain(..at);
        }
    }

    /// Notes that a process has left or ended while it was at no other rendezvous.
    pub(super) fn end(&mut self, incarnation: Incarnation) {
        let voters = self.rings.iter_mut().flat_map(|ring| &mut ring.voters);
        voters.filter(|of| of.incarnation == incarnation).for_each(|of| of.has_ended = true);
    }

    /// Returns a process that was in one of the rings.
    pub(super) fn voter(&self, incarnation: Incarnation) -> Option<&Voter> {
        let mut voters = self.rings.iter().flat_map(|ring| &ring.voters);
        voters.find(|of| of.incarnation == incarnation)
    }

    /// Returns the newest ring of which those that wait are no quorum.
    pub(super) fn shortage(&self, waiting: &WaitingList) -> Option<&Electorate> {
        self.rings.iter().rev().find(|ring| !ring.has_quorum(waiting))
    }

    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn check_invariants(&self) {
        assert!(self.rings.len() <= RINGS_MAX, "{} rings", self.rings.len());
        let is_sorted = self.rings.is_sorted_by(|a, b| a.epoch < b.epoch);
        assert!(is_sorted, "the order of rings");
    }
}

impl Electorate {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Returns whether enough members are here or at no rendezvous. Of a former ring it suffices that
    /// all others are gone.
    fn has_quorum(&self, waiting: &WaitingList) -> bool {
        let counted = self.counted(waiting);
        match self.is_own {
            true => 2 * counted >= self.size,
            false => 2 * counted > self.size || counted + self.gone >= self.size,
        }
    }

    /// Returns the number of members that are here or at no rendezvous. Another process with the id
    /// of a member is none of them: it does not know where that went on.
    pub(super) fn counted(&self, waiting: &WaitingList) -> u32 {
        let present: BTreeSet<(&str, Incarnation)> =
            waiting.iter().map(|(_, of)| (of.join.id.as_str(), of.incarnation)).collect();
        let is_here = |of: &Voter| present.contains(&(of.id.as_str(), of.incarnation));
        let known = self.voters.iter().filter(|of| of.has_ended || is_here(of)).count();
        if self.is_own {
            return known as u32;
        }
        // Others may have come after the first ring here had formed.
        let is_known = |id: &str, process| self.voters.iter().any(|of| of.is(id, process));
        let came = waiting.iter().filter(|(_, of)| of.join.epoch == self.epoch);
        let later = came.filter(|(_, of)| !is_known(of.join.id.as_str(), of.incarnation));
        (known + later.count()) as u32
    }
}

impl Voter {
    fn is(&self, id: &str, incarnation: Incarnation) -> bool {
        self.incarnation == incarnation && self.id == id
    }
}

/// The most rings. It takes as many formations in a row, of each of which a member has not heard.
const RINGS_MAX: usize = 8;
