//! [`FormedRing`]: the members of a ring that has formed, as one of them knows it.

use std::time::Duration;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::message::RingLink;

/// A ring that has formed, as one of its members knows it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FormedRing {
    /// Identifies the rendezvous.
    pub(crate) rendezvous: u64,
    /// The epoch.
    pub(crate) epoch: u64,
    /// The rank of this member.
    pub(crate) rank: u32,
    /// All members, in order of ranks.
    pub(crate) members: Vec<RankPlace>,
    /// The lease.
    pub(crate) lease: Duration,
    /// The rank in whose process the rendezvous is.
    pub(crate) serving: Option<u32>,
}

/// A member of a ring and where it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RankPlace {
    /// The stable index.
    pub(crate) index: u32,
    /// The process. Links to it name it.
    pub(crate) process: Incarnation,
    /// The host.
    pub(crate) host: String,
    /// The addresses.
    pub(crate) addresses: Vec<String>,
}

impl FormedRing {
    /// Returns the number of members.
    pub(crate) fn size(&self) -> u32 {
        self.members.len() as u32
    }

    /// Returns the rank behind a rank.
    pub(crate) fn successor(&self) -> u32 {
        (self.rank + 1) % self.size().max(1)
    }

    /// Returns the rank before a rank.
    pub(crate) fn predecessor(&self) -> u32 {
        (self.rank + self.size().max(1) - 1) % self.size().max(1)
    }

    /// Returns the link that this rank opens to its successor.
    pub(crate) fn own_link(&self) -> RingLink {
        self.link_of(self.rank)
    }

    /// Returns the link that this rank takes from its predecessor.
    pub(crate) fn awaited_link(&self) -> RingLink {
        self.link_of(self.predecessor())
    }

    fn link_of(&self, rank: u32) -> RingLink {
        let to = self.place((rank + 1) % self.size().max(1));
        let to = to.map_or(Incarnation(0), |place| place.process);
        RingLink { rendezvous: self.rendezvous, epoch: self.epoch, rank, to }
    }

    /// Returns the place of a rank.
    pub(crate) fn place(&self, rank: u32) -> Option<&RankPlace> {
        self.members.get(rank as usize)
    }
}
