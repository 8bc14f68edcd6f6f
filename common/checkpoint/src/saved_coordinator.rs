//! The effect windows of coordinators in a manifest.

use pushpull_common::effect_window::{COORDINATOR_EPOCH_LIMIT, EffectWindow};
use pushpull_common::ids::EffectNumber;
use pushpull_common::protocol::limits::{COORDINATOR_NAME_BYTES_MAX, COORDINATORS_MAX};
use serde::{Deserialize, Serialize};

/// The effects of one coordinator that have counted in the values of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedCoordinator {
    /// The coordinator's name.
    pub name: String,
    /// The coordinator's id.
    #[serde(rename = "source")]
    pub coordinator: u64,
    /// Its newest epoch.
    pub epoch: u64,
    /// Every effect up to this number has counted.
    pub settled: u64,
    /// The effects behind it that have: bit i is for the number `settled + 1 + i`.
    pub window: u64,
    /// The digest of effect 1; 0 if it is unknown.
    #[serde(default)]
    pub first_digest: u64,
    /// The newest effect up to `settled` with a known digest.
    #[serde(default)]
    pub digest_of: u64,
    /// The digest of that effect.
    #[serde(default)]
    pub digest: u64,
}

impl SavedCoordinator {
    /// Returns the window of the effects that have counted; `None` if no shard can have this
    /// coordinator.
    pub fn effects(&self) -> Option<EffectWindow> {
        let has_valid_name = (1..=COORDINATOR_NAME_BYTES_MAX).contains(&self.name.len());
        let has_valid_id = (1..=self.epoch).contains(&self.coordinator);
        // The step owner continues above this epoch, and must have some left.
        let leaves_epochs = self.epoch < COORDINATOR_EPOCH_LIMIT / 2;
        let window = EffectWindow::of(EffectNumber(self.settled), self.window);
        window.filter(|_| has_valid_name && has_valid_id && leaves_epochs)
    }

    /// Returns the effects that have counted on two shards.
    fn intersection(&self, other: &SavedCoordinator) -> Option<SavedCoordinator> {
        let window = self.effects()?.intersection(other.effects()?);
        let settled = window.settled().0;
        let digests = [(self.digest_of, self.digest), (other.digest_of, other.digest)];
        let newest = digests.into_iter().filter(|(of, _)| *of <= settled).max();
        let (digest_of, digest) = newest.unwrap_or_default();
        Some(SavedCoordinator {
            name: self.name.clone(),
            coordinator: self.coordinator,
            epoch: self.epoch.max(other.epoch),
            settled,
            window: window.bits(),
            first_digest: if settled >= 1 { self.first_digest } else { 0 },
            digest_of,
            digest,
        })
    }
}

/// Checks the coordinators of a shard. An error is what a manifest must have, and what it has.
pub(crate) fn check(coordinators: &[SavedCoordinator]) -> Result<(), (String, String)> {
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
        if twice || entry.effects().is_none() {
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
pub(crate) fn of_every_shard<'a>(
    mut shards: impl Iterator<Item = &'a [SavedCoordinator]>,
) -> Vec<SavedCoordinator> {
    let mut every = shards.next().unwrap_or_default().to_vec();
    for others in shards {
        let common = every.iter().filter_map(|entry| {
            let other = others.iter().find(|other| other.coordinator == entry.coordinator)?;
            entry.intersection(other).filter(|_| other.name == entry.name)
        });
        every = common.collect();
    }
    every
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
            entry("three", COORDINATOR_EPOCH_LIMIT / 2, 0, 0),
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
