//! Bounded staleness: a limit on how far replicas may run ahead of each other in asynchronous mode.
//!
//! This is the rule of stale synchronous parallel training (Ho et al. 2013, "More Effective
//! Distributed ML via a Stale Synchronous Parallel Parameter Server"). A replica that is `bound`
//! gradients ahead of the slowest begins no other until the slowest has caught up.

use std::collections::BTreeMap;

use crate::client_key::ClientKey;

/// The progress of one replica; durable across restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReplicaProgress {
    /// The number of gradients: those that were applied and those dropped as too stale.
    pub(crate) made: u64,
    /// Whether other replicas wait for it: it has requested a token and is not gone.
    pub(crate) counts: bool,
}

/// Decides which replicas may begin another gradient.
///
/// Invariant: a counted replica has made and begun at most `bound` gradients more than the slowest
/// counted replica has made. The exception is a push that was whole when its replica left and came
/// back.
#[derive(Debug)]
pub(crate) struct BoundedStaleness {
    bound: u64,
    replicas: BTreeMap<ClientKey, ReplicaProgress>,
}

impl BoundedStaleness {
    pub(crate) fn new(bound: u64) -> BoundedStaleness {
        BoundedStaleness { bound, replicas: BTreeMap::new() }
    }

    pub(crate) fn of(&self, replica: ClientKey) -> ReplicaProgress {
        self.replicas.get(&replica).copied().unwrap_or_default()
    }

    pub(crate) fn restore(&mut self, replica: ClientKey, progress: ReplicaProgress) {
        if progress != ReplicaProgress::default() {
            self.replicas.insert(replica, progress);
        }
    }

    /// Returns the number of gradients that the slowest counted replica has made.
    pub(crate) fn slowest(&self) -> Option<u64> {
        self.replicas
            .values()
            .filter(|progress| progress.counts)
            .map(|progress| progress.made)
            .min()
    }

    /// Returns the counted replicas that have made no more than the slowest.
    pub(crate) fn the_slowest(&self) -> impl Iterator<Item = ClientKey> {
        let slowest = self.slowest();
        let are =
            move |progress: &ReplicaProgress| progress.counts && Some(progress.made) == slowest;
        self.replicas.iter().filter(move |(_, progress)| are(progress)).map(|(&replica, _)| replica)
    }

    /// Counts a replica that requests a token: from now on, others wait for it. Returns false if it
    /// was counted already.
    ///
    /// The progress of a new or returning replica is clamped. It is at least that of the slowest
    /// other, or all would stop until it had caught up. It is at most `bound` more than that, or
    /// the replica would wait for those that joined in its absence.
    pub(crate) fn enter(&mut self, replica: ClientKey) -> bool {
        let slowest = self.slowest();
        let progress = self.replicas.entry(replica).or_default();
        if progress.counts {
            return false;
        }
        let among = |slowest: u64| progress.made.clamp(slowest, slowest.saturating_add(self.bound));
        let made = slowest.map_or(progress.made, among);
        *progress = ReplicaProgress { made, counts: true };
        true
    }

    /// Returns whether a replica that is computing `making` gradients may begin another.
    pub(crate) fn may_begin(&self, replica: ClientKey, making: usize) -> bool {
        let slowest = self.slowest().unwrap_or(0);
        self.of(replica).made + (making as u64) < slowest.saturating_add(self.bound)
    }

    /// Records that a replica has made a gradient.
    pub(crate) fn made_one(&mut self, replica: ClientKey) {
        self.replicas.entry(replica).or_default().made += 1;
    }

    /// Stops counting a replica that has left or is lost.
    pub(crate) fn leave(&mut self, replica: ClientKey) {
        if let Some(progress) = self.replicas.get_mut(&replica) {
            progress.counts = false;
        }
    }

    /// Forgets all replicas, because other values have been restored. Returns them.
    pub(crate) fn reset(&mut self) -> impl Iterator<Item = ClientKey> + use<> {
        std::mem::take(&mut self.replicas).into_keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientKey = ClientKey(0);
    const B: ClientKey = ClientKey(1);
    const C: ClientKey = ClientKey(2);

    fn bounded_staleness(bound: u64, made: &[(ClientKey, u64)]) -> BoundedStaleness {
        let mut bounded_staleness = BoundedStaleness::new(bound);
        made.iter().for_each(|&(replica, made)| {
            bounded_staleness.restore(replica, ReplicaProgress { made, counts: true })
        });
        bounded_staleness
    }

    #[test]
    fn a_replica_at_the_bound_begins_no_gradient() {
        for (bound, a, making, b, may) in [
            (1, 0, 0, 0, true),
            (1, 0, 1, 0, false),
            (1, 1, 0, 0, false),
            (1, 1, 0, 1, true),
            (3, 2, 0, 0, true),
            (3, 2, 1, 0, false),
            (3, 3, 0, 0, false),
            (3, 3, 0, 1, true),
            (3, 0, 2, 9, true),
            (3, 0, 3, 9, false),
            (u64::MAX, 9, 9, 0, true),
        ] {
            let bounded_staleness = bounded_staleness(bound, &[(A, a), (B, b)]);
            assert_eq!(
                bounded_staleness.may_begin(A, making),
                may,
                "{bound}: {a} and {making}, {b}"
            );
        }
    }

    #[test]
    fn an_absent_replica_is_not_waited_for() {
        let mut bounded_staleness = bounded_staleness(2, &[(A, 7), (B, 5)]);
        assert!(!bounded_staleness.may_begin(A, 0));
        assert_eq!(bounded_staleness.the_slowest().collect::<Vec<_>>(), [B]);
        bounded_staleness.leave(B);
        assert!(bounded_staleness.may_begin(A, 0));
        assert_eq!(bounded_staleness.the_slowest().collect::<Vec<_>>(), [A]);
    }

    #[test]
    fn a_joining_replica_starts_between_the_slowest_and_the_bound() {
        let mut bounded_staleness = bounded_staleness(2, &[(A, 7), (B, 5)]);
        assert!(bounded_staleness.enter(C));
        assert!(!bounded_staleness.enter(C));
        assert_eq!(bounded_staleness.of(C), ReplicaProgress { made: 5, counts: true });
        for (made, enters_with) in [(1, 5), (5, 5), (6, 6), (7, 7), (1000, 7)] {
            bounded_staleness.restore(A, ReplicaProgress { made, counts: false });
            assert!(bounded_staleness.enter(A));
            assert_eq!(
                bounded_staleness.of(A),
                ReplicaProgress { made: enters_with, counts: true },
                "{made}"
            );
        }
        assert_eq!(bounded_staleness.reset().collect::<Vec<_>>(), [A, B, C]);
        assert_eq!(
            (bounded_staleness.slowest(), bounded_staleness.of(A)),
            (None, ReplicaProgress::default())
        );
    }
}
