//! The call windows of coordinators in a manifest.

use pushpull_common::call_window::CallWindow;
use pushpull_common::ids::{CallEpoch, CallNumber, CallSource};
use pushpull_common::protocol::limits::{CALL_SOURCES_MAX, COORDINATOR_NAME_BYTES_MAX};
use serde::{Deserialize, Serialize};

use crate::call_sources::{CallSourceEntry, EPOCH_LIMIT, SettledDigests};

/// The calls of one coordinator that have counted in the values of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CallsEntry {
    /// The coordinator's name.
    name: String,
    source: u64,
    epoch: u64,
    /// Every call up to this number has counted.
    settled: u64,
    /// The calls behind it that have: bit i is for the number `settled + 1 + i`.
    window: u64,
    /// The digest of call 1; 0 if it is unknown.
    #[serde(default)]
    first_digest: u64,
    /// The newest call up to `settled` with a known digest, and that.
    #[serde(default)]
    digest_of: u64,
    #[serde(default)]
    digest: u64,
}

impl From<&CallSourceEntry> for CallsEntry {
    fn from(entry: &CallSourceEntry) -> CallsEntry {
        let CallSourceEntry { name, source, epoch, window, digests } = entry;
        CallsEntry {
            name: name.clone(),
            source: source.0,
            epoch: epoch.0,
            settled: window.settled().0,
            window: window.bits(),
            first_digest: digests.first,
            digest_of: digests.settled.0.0,
            digest: digests.settled.1,
        }
    }
}

impl CallsEntry {
    /// Returns the calls; `None` if no shard can have them.
    pub(crate) fn entry(&self) -> Option<CallSourceEntry> {
        let &CallsEntry { ref name, source, epoch, settled, window, .. } = self;
        let settled_digest = (CallNumber(self.digest_of), self.digest);
        let digests = SettledDigests {
            first: self.first_digest,
            settled: settled_digest,
            ahead: settled_digest,
        };
        let entry = CallSourceEntry {
            name: name.clone(),
            source: CallSource(source),
            epoch: CallEpoch(epoch),
            window: CallWindow::of(CallNumber(settled), window)?,
            digests,
        };
        let is_valid = entry.has_valid_name() && (1..=epoch).contains(&source);
        // The step owner continues above this epoch, and must have some left.
        (is_valid && epoch < EPOCH_LIMIT / 2).then_some(entry)
    }
}

/// Checks the calls of a shard. An error is what a manifest must have, and what it has.
pub(super) fn check(calls: &[CallsEntry]) -> Result<(), (String, String)> {
    if calls.len() > CALL_SOURCES_MAX {
        return Err((format!("at most {CALL_SOURCES_MAX} coordinators"), calls.len().to_string()));
    }
    for (index, entry) in calls.iter().enumerate() {
        let mut before = calls[..index].iter();
        let twice = before.any(|other| other.name == entry.name || other.source == entry.source);
        if twice || entry.entry().is_none() {
            let expected = format!(
                "calls of coordinators with unique names of 1 to {COORDINATOR_NAME_BYTES_MAX} bytes"
            );
            return Err((expected, format!("{entry:?}")));
        }
    }
    Ok(())
}

/// Returns the calls that have counted on every shard of a checkpoint: the others are executed
/// again.
pub(super) fn of_every_shard<'a>(
    mut shards: impl Iterator<Item = &'a [CallsEntry]>,
) -> Vec<CallsEntry> {
    let of = |calls: &[CallsEntry]| calls.iter().filter_map(CallsEntry::entry).collect();
    let mut every: Vec<CallSourceEntry> = shards.next().map(of).unwrap_or_default();
    for calls in shards {
        let others: Vec<CallSourceEntry> = of(calls);
        every.retain_mut(|entry| {
            let other = others.iter().find(|other| other.source == entry.source);
            let Some(other) = other.filter(|other| other.name == entry.name) else { return false };
            entry.epoch = entry.epoch.max(other.epoch);
            entry.window = entry.window.intersection(other.window);
            entry.digests = entry.digests.intersection(other.digests, entry.window);
            true
        });
    }
    every.iter().map(CallsEntry::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, source: u64, settled: u64, window: u64) -> CallsEntry {
        let name = name.to_owned();
        let epoch = source + 1;
        let first_digest = 5;
        let digest_of = settled;
        let digest = settled.wrapping_add(100);
        CallsEntry { name, source, epoch, settled, window, first_digest, digest_of, digest }
    }

    #[test]
    fn impossible_calls_are_refused() {
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
            CallsEntry { epoch: 2, ..entry("three", 3, 0, 0) },
        ] {
            let calls = [valid.as_slice(), std::slice::from_ref(&wrong)].concat();
            assert!(check(&calls).is_err(), "{wrong:?}");
        }
        let many = |count| -> Vec<CallsEntry> {
            (1..=count as u64).map(|source| entry(&source.to_string(), source, 0, 0)).collect()
        };
        assert_eq!(check(&many(CALL_SOURCES_MAX)), Ok(()));
        assert!(check(&many(CALL_SOURCES_MAX + 1)).is_err());
    }

    #[test]
    fn a_call_counts_if_it_does_on_every_shard() {
        let first = [entry("one", 1, 7, 0b10), entry("two", 2, 3, 0)];
        let second = [entry("one", 1, 5, 0b1110), entry("three", 3, 3, 0)];
        let every = of_every_shard([first.as_slice(), &second].into_iter());
        // 6 has not on the second, and 9 has on both.
        assert_eq!(every, [entry("one", 1, 5, 0b1010)]);
        assert_eq!(of_every_shard([first.as_slice()].into_iter()), first);
        assert!(of_every_shard(std::iter::empty()).is_empty());
    }
}
