//! The effect windows of coordinators in a manifest.

use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber};
use pushpull_common::protocol::limits::{COORDINATOR_NAME_BYTES_MAX, COORDINATORS_MAX};
use serde::{Deserialize, Serialize};

use crate::coordinators::{CoordinatorEntry, EPOCH_LIMIT, SettledDigests};

/// The effects of one coordinator that have counted in the values of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedCoordinator {
    /// The coordinator's name.
    name: String,
    #[serde(rename = "source")]
    coordinator: u64,
    epoch: u64,
    /// Every effect up to this number has counted.
    settled: u64,
    /// The effects behind it that have: bit i is for the number `settled + 1 + i`.
    window: u64,
    /// The digest of effect 1; 0 if it is unknown.
    #[serde(default)]
    first_digest: u64,
    /// The newest effect up to `settled` with a known digest, and that.
    #[serde(default)]
    digest_of: u64,
    #[serde(default)]
    digest: u64,
}

impl From<&CoordinatorEntry> for SavedCoordinator {
    fn from(entry: &CoordinatorEntry) -> SavedCoordinator {
        let CoordinatorEntry { name, coordinator, epoch, window, digests } = entry;
        SavedCoordinator {
            name: name.clone(),
            coordinator: coordinator.0,
            epoch: epoch.0,
            settled: window.settled().0,
            window: window.bits(),
            first_digest: digests.first,
            digest_of: digests.settled.0.0,
            digest: digests.settled.1,
        }
    }
}

impl SavedCoordinator {
    /// Returns the entry of a shard; `None` if no shard can have it.
    pub(crate) fn entry(&self) -> Option<CoordinatorEntry> {
        let &SavedCoordinator { ref name, coordinator, epoch, settled, window, .. } = self;
        let settled_digest = (EffectNumber(self.digest_of), self.digest);
        let digests = SettledDigests {
            first: self.first_digest,
            settled: settled_digest,
            ahead: settled_digest,
        };
        let entry = CoordinatorEntry {
            name: name.clone(),
            coordinator: CoordinatorId(coordinator),
            epoch: CoordinatorEpoch(epoch),
            window: EffectWindow::of(EffectNumber(settled), window)?,
            digests,
        };
        let is_valid = entry.has_valid_name() && (1..=epoch).contains(&coordinator);
        // The step owner continues above this epoch, and must have some left.
        (is_valid && epoch < EPOCH_LIMIT / 2).then_some(entry)
    }
}

/// Checks the coordinators of a shard. An error is what a manifest must have, and what it has.
pub(super) fn check(coordinators: &[SavedCoordinator]) -> Result<(), (String, String)> {
    if coordinators.len() > COORDINATORS_MAX {
        return Err((
            format!("at most {COORDINATORS_MAX} coordinators"),
            coordinators.len().to_string(),
        ));
    }
    for (index, entry) in coordinators.iter().enumerate() {
        let mut before = coordinators[..index].iter();
        let twice =
            before.any(|other| other.name == entry.name || other.coordinator == entry.coordinator);
        if twice || entry.entry().is_none() {
            let expected = format!(
                "coordinators with unique names of 1 to {COORDINATOR_NAME_BYTES_MAX} bytes"
            );
            return Err((expected, format!("{entry:?}")));
        }
    }
    Ok(())
}

/// Returns the effects that have counted on every shard of a checkpoint: the others are pushed
/// again.
pub(super) fn of_every_shard<'a>(
    mut shards: impl Iterator<Item = &'a [SavedCoordinator]>,
) -> Vec<SavedCoordinator> {
    let of = |coordinators: &[SavedCoordinator]| {
        coordinators.iter().filter_map(SavedCoordinator::entry).collect()
    };
    let mut every: Vec<CoordinatorEntry> = shards.next().map(of).unwrap_or_default();
    for coordinators in shards {
        let others: Vec<CoordinatorEntry> = of(coordinators);
        every.retain_mut(|entry| {
            let other = others.iter().find(|other| other.coordinator == entry.coordinator);
            let Some(other) = other.filter(|other| other.name == entry.name) else { return false };
            entry.epoch = entry.epoch.max(other.epoch);
            entry.window = entry.window.intersection(other.window);
            entry.digests = entry.digests.intersection(other.digests, entry.window);
            true
        });
    }
    every.iter().map(SavedCoordinator::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, coordinator: u64, settled: u64, window: u64) -> SavedCoordinator {
        let name = name.to_owned();
        let epoch = coordinator + 1;
        let first_digest = 5;
        let digest_of = settled;
        let digest = settled.wrapping_add(100);
        SavedCoordinator {
            name,
            coordinator,
            epoch,
            settled,
            window,
            first_digest,
            digest_of,
            digest,
        }
    }

    #[test]
    fn impossible_coordinators_are_refused() {
        let valid = [entry("one", 1, 7, 6), entry("two", 2, 0, 0)];
        assert_eq!(check(&valid), Ok(()));
        let long = "x".repeat(COORDINATOR_NAME_BYTES_MAX + 1);
        for wrong in [
            entry("one", 3, 0, 0),
            entry("three", 2, 0, 0),
            entry("", 3, 0, 0),
            entry(&long, 3, 0, 0),
            entry("three", 0, 0, 0),
            entry("three", EPOCH_LIMIT / 2, 0, 0),
            entry("three", 3, u64::MAX, 0),
            SavedCoordinator { epoch: 2, ..entry("three", 3, 0, 0) },
        ] {
            let coordinators = [valid.as_slice(), std::slice::from_ref(&wrong)].concat();
            assert!(check(&coordinators).is_err(), "{wrong:?}");
        }
        let many = |count| -> Vec<SavedCoordinator> {
            (1..=count as u64)
                .map(|coordinator| entry(&coordinator.to_string(), coordinator, 0, 0))
                .collect()
        };
        assert_eq!(check(&many(COORDINATORS_MAX)), Ok(()));
        assert!(check(&many(COORDINATORS_MAX + 1)).is_err());
    }

    #[test]
    fn an_effect_counts_if_it_does_on_every_shard() {
        let first = [entry("one", 1, 7, 0b10), entry("two", 2, 3, 0)];
        let second = [entry("one", 1, 5, 0b1110), entry("three", 3, 3, 0)];
        let every = of_every_shard([first.as_slice(), &second].into_iter());
        // 6 has not on the second, and 9 has on both.
        assert_eq!(every, [entry("one", 1, 5, 0b1010)]);
        assert_eq!(of_every_shard([first.as_slice()].into_iter()), first);
        assert!(of_every_shard(std::iter::empty()).is_empty());
    }
}
