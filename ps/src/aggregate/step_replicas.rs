//! The replicas that a synchronous step counts on: those that are live, and those still expected.

use std::collections::{BTreeMap, BTreeSet};

use crate::client_key::ClientKey;

/// The live and the expected replicas.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepReplicas {
    /// The number of expected replicas (`total_num_replicas`).
    total: u32,
    /// The live replicas and their ranks.
    live: BTreeMap<ClientKey, u32>,
    /// The replicas that have ever joined; kept only while others are expected.
    seen: BTreeSet<ClientKey>,
    expecting: bool,
}

impl StepReplicas {
    /// Expects `total` replicas, of which none is live.
    pub(crate) fn new(total: u32) -> StepReplicas {
        StepReplicas { total, live: BTreeMap::new(), seen: BTreeSet::new(), expecting: true }
    }

    /// Restores the live replicas with their ranks, and all replicas that had joined.
    pub(crate) fn restore(
        &mut self,
        live: BTreeMap<ClientKey, u32>,
        seen: BTreeSet<ClientKey>,
        expecting: bool,
    ) {
        self.live = live;
        self.seen = seen;
        self.expecting = expecting;
    }

    pub(crate) fn join(&mut self, replica: ClientKey, rank: u32) {
        self.live.insert(replica, rank);
        if self.expecting {
            self.seen.insert(replica);
        }
    }

    pub(crate) fn lose(&mut self, replica: ClientKey) {
        self.live.remove(&replica);
    }

    /// Stops expecting the replicas that have not joined yet.
    pub(crate) fn expect_nobody(&mut self) {
        self.expecting = false;
        self.seen.clear();
    }

    pub(crate) fn is_live(&self, replica: ClientKey) -> bool {
        self.live.contains_key(&replica)
    }

    /// Returns the rank of a live replica.
    pub(crate) fn rank(&self, replica: ClientKey) -> Option<u32> {
        self.live.get(&replica).copied()
    }

    /// Returns the number of expected replicas that have not joined yet.
    pub(crate) fn expected(&self) -> u32 {
        let seen = u32::try_from(self.seen.len()).unwrap_or(u32::MAX);
        if self.expecting { self.total.saturating_sub(seen) } else { 0 }
    }

    /// Returns the number of live and expected replicas.
    pub(crate) fn count(&self) -> u32 {
        (self.live.len() as u32).saturating_add(self.expected())
    }

    /// Yields the live replicas.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn live(&self) -> impl Iterator<Item = ClientKey> {
        self.live.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_replica_that_had_joined_is_not_expected() {
        let a = ClientKey(0);
        let b = ClientKey(1);
        let mut replicas = StepReplicas::new(3);
        assert_eq!((replicas.expected(), replicas.count()), (3, 3));
        replicas.join(a, 0);
        replicas.join(b, 7);
        assert_eq!((replicas.expected(), replicas.count()), (1, 3));
        assert_eq!((replicas.rank(b), replicas.rank(ClientKey(2))), (Some(7), None));
        replicas.lose(a);
        assert!(!replicas.is_live(a) && replicas.is_live(b));
        assert_eq!((replicas.expected(), replicas.count()), (1, 2));
        replicas.expect_nobody();
        assert_eq!((replicas.expected(), replicas.count()), (0, 1));
        replicas.join(a, 0);
        assert_eq!((replicas.expected(), replicas.count()), (0, 2));
    }
}
