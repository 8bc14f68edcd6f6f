//! [`WaitingLinks`]: the links of predecessors that no ring has taken yet.

use pushpull_common::protocol::message::RingLink;

use crate::planted::{PlantedRingBugs, RingBug};

/// The most links that wait for their ring. Ranks of one ring connect when they hear of it, which
/// may be before their successor does. Only members of rings of this process get here: see
/// [`RingLink::to`].
const EARLY_LINKS_MAX: usize = 16;

/// The links that wait for their ring, oldest first: at most [`EARLY_LINKS_MAX`].
///
/// - **In.** Links that have arrived, each with the ring and the rank that it names.
/// - **Out.** The link of the predecessor in a ring that has formed.
/// - **Never.** No ring takes a link that names another epoch or rendezvous.
#[derive(Debug)]
pub(crate) struct WaitingLinks<T> {
    links: Vec<(RingLink, T)>,
    planted: PlantedRingBugs,
}

impl<T> Default for WaitingLinks<T> {
    fn default() -> WaitingLinks<T> {
        WaitingLinks { links: Vec::new(), planted: PlantedRingBugs::default() }
    }
}

impl<T> WaitingLinks<T> {
    /// Creates an empty list with this bug.
    #[cfg(test)]
    pub(crate) fn with_planted(planted: PlantedRingBugs) -> WaitingLinks<T> {
        WaitingLinks { links: Vec::new(), planted }
    }

    /// Takes the link of a rank of a ring, if it is here, and drops those of rings before.
    pub(crate) fn take(&mut self, wanted: &RingLink) -> Option<(RingLink, T)> {
        if self.planted.has(RingBug::EpochNotChecked) {
            let at = self.links.iter().position(|(link, _)| link.rank == wanted.rank)?;
            return Some(self.links.remove(at));
        }
        self.links
            .retain(|(link, _)| link.rendezvous != wanted.rendezvous || link.epoch >= wanted.epoch);
        let at = self.links.iter().position(|(link, _)| link == wanted)?;
        Some(self.links.remove(at))
    }

    /// Adds a link. Drops an earlier one of the same rank and ring: that connection is over.
    pub(crate) fn add(&mut self, link: RingLink, connection: T) {
        self.links.retain(|(waiting, _)| *waiting != link);
        if self.links.len() == EARLY_LINKS_MAX {
            self.links.remove(0);
        }
        self.links.push((link, connection));
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::Incarnation;

    use super::*;

    fn link(rendezvous: u64, epoch: u64, rank: u32) -> RingLink {
        RingLink { rendezvous, epoch, rank, to: Incarnation(1) }
    }

    #[test]
    fn a_ring_takes_the_link_of_its_own_epoch() {
        let mut links = WaitingLinks::default();
        links.add(link(1, 3, 0), "older");
        links.add(link(1, 4, 1), "of another rank");
        links.add(link(2, 4, 0), "of another rendezvous");
        links.add(link(1, 5, 0), "newer");
        assert_eq!(links.take(&link(1, 4, 0)), None);
        links.add(link(1, 4, 0), "first");
        links.add(link(1, 4, 0), "again");
        assert_eq!(links.take(&link(1, 4, 0)), Some((link(1, 4, 0), "again")));
        assert_eq!(links.take(&link(1, 4, 0)), None);
        assert_eq!(links.take(&link(1, 5, 0)), Some((link(1, 5, 0), "newer")));
        assert_eq!(links.take(&link(1, 3, 0)), None, "links of rings before are dropped");
    }

    #[test]
    fn the_oldest_link_makes_room() {
        let mut links = WaitingLinks::default();
        for epoch in 1..=EARLY_LINKS_MAX as u64 + 1 {
            links.add(link(1, epoch, 0), epoch);
        }
        assert_eq!(links.take(&link(1, 1, 0)), None);
        assert_eq!(links.take(&link(1, 2, 0)).map(|(_, epoch)| epoch), Some(2));
    }
}
