//! Retention: which checkpoints are kept and which are deleted.

use std::collections::BTreeSet;

use crate::error::CheckpointError;
use crate::name::CheckpointName;
use crate::publish::PublishedCheckpoint;
use crate::restore::scan;
use crate::storage::CheckpointStorage;

/// The number of checkpoints to keep, and for how long. The newest is always kept.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retention {
    /// The number of newest checkpoints to keep; 0 keeps all. Default 5. Each occupies its whole
    /// size.
    pub max_to_keep: usize,
    /// Of the other checkpoints, the first in each period of this many hours is kept permanently,
    /// except in the first period. Periods count from the first save in the directory. 0 keeps
    /// none. Default 10,000 hours.
    pub keep_every_hours: u32,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { max_to_keep: 5, keep_every_hours: 10_000 }
    }
}

/// Deletes the checkpoints that are superseded by the published one. Returns the deleted ones.
///
/// Checkpoints with an untrusted manifest are neither counted nor deleted: a person must examine
/// them.
pub fn retain(
    storage: &dyn CheckpointStorage,
    published: &PublishedCheckpoint,
    retention: &Retention,
) -> Result<Vec<CheckpointName>, CheckpointError> {
    let (mut saved, _) = scan(storage, |manifest| KeptCheckpoint {
        name: manifest.checkpoint,
        saved_unix_ms: manifest.saved_unix_ms,
        first_saved_unix_ms: manifest.first_saved_unix_ms,
    })?;
    // Newer checkpoints are not superseded, regardless of their origin.
    saved.retain(|saved| saved.name <= published.name());
    saved.sort_by_key(|saved| saved.name);
    let old = superseded(&saved, retention);
    for name in &old {
        // After this rename it is not a checkpoint, and the next save removes what a crash leaves.
        // The rename is synced first: if it were lost after some files, a damaged checkpoint would
        // remain.
        storage.rename_folder(&name.to_string(), &name.temporary())?;
        storage.sync(None)?;
        storage.remove_folder(&name.temporary())?;
    }
    Ok(old)
}

/// A checkpoint and the time of its save.
#[derive(Clone, Debug)]
struct KeptCheckpoint {
    name: CheckpointName,
    saved_unix_ms: u64,
    first_saved_unix_ms: u64,
}

/// Returns the checkpoints to delete. `saved` is sorted, oldest first.
fn superseded(saved: &[KeptCheckpoint], retention: &Retention) -> Vec<CheckpointName> {
    let revised = |index: usize| {
        saved[index + 1..].iter().any(|newer| newer.name.is_same_step(&saved[index].name))
    };
    let (revised, last): (Vec<usize>, Vec<usize>) = (0..saved.len()).partition(|&i| revised(i));
    let evicted = match retention.max_to_keep {
        0 => 0,
        keep => last.len().saturating_sub(keep),
    };
    let period_ms = u64::from(retention.keep_every_hours) * 3_600_000;
    let first = saved.iter().map(|saved| saved.first_saved_unix_ms).min().unwrap_or_default();
    let period = |index: usize| {
        saved[index].saved_unix_ms.saturating_sub(first).checked_div(period_ms).unwrap_or(0)
    };
    let mut kept_periods = BTreeSet::from([0]);
    let old = last[..evicted].iter().filter(|&&index| !kept_periods.insert(period(index)));
    let old: BTreeSet<usize> = old.copied().chain(revised).collect();
    old.into_iter().map(|index| saved[index].name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses `step`, `step@hour` or `step.revision`; the first save was at hour 0.
    fn parse(text: &str) -> KeptCheckpoint {
        let (step, hour) = text.split_once('@').unwrap_or((text, "0"));
        let name = format!("ckpt-0-{step}").parse().unwrap();
        let saved_unix_ms = 1_000 + hour.parse::<u64>().unwrap() * 3_600_000;
        KeptCheckpoint { name, saved_unix_ms, first_saved_unix_ms: 1_000 }
    }

    #[test]
    fn retention_keeps_the_newest_and_the_first_of_each_period() {
        let table = "
            saves                              | keep | hours | left
            0 3 6 9 10                         | 5    | 10000 | 0 3 6 9 10
            0 3 6 9 12 15 18 20                | 5    | 10000 | 9 12 15 18 20
            0 10 20 10.1                       | 2    | 10000 | 10.1 20
            0 10 20 20.1 20.2                  | 2    | 10000 | 10 20.2
            0 10 20                            | 0    | 10000 | 0 10 20
            0 10 10.1                          | 0    | 10000 | 0 10.1
            7                                  | 1    | 0     | 7
            1@0 2@1 3@2 4@3 5@4 6@5            | 1    | 2     | 3@2 5@4 6@5
            1@0 2@1 3@2 4@3 5@4 6@5            | 2    | 3     | 4@3 5@4 6@5
            1@0 2@9 3@9 4@9                    | 1    | 3     | 2@9 4@9
            1@0 2@1 3@2                        | 1    | 0     | 3@2
            1@0 2@30000 3@30000 4@30001        | 1    | 10000 | 2@30000 4@30001
        ";
        for line in table.trim().lines().skip(1) {
            let columns: Vec<&str> = line.split('|').map(str::trim).collect();
            let retention = Retention {
                max_to_keep: columns[1].parse().unwrap(),
                keep_every_hours: columns[2].parse().unwrap(),
            };
            // Retention is applied after each save, as a server does; the result must not depend on
            // that.
            let mut left: Vec<KeptCheckpoint> = Vec::new();
            for save in columns[0].split(' ') {
                left.push(parse(save));
                left.sort_by_key(|saved| saved.name);
                let old = superseded(&left, &retention);
                left.retain(|saved| !old.contains(&saved.name));
            }
            let left: Vec<CheckpointName> = left.iter().map(|saved| saved.name).collect();
            let mut expected: Vec<_> = columns[3].split(' ').map(|s| parse(s).name).collect();
            expected.sort();
            assert_eq!(left, expected, "{line}");
        }
    }
}
