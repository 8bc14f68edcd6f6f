//! Names of checkpoints, and their order.

use std::fmt;
use std::str::FromStr;

use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use serde::{Deserialize, Serialize};

/// The name of a checkpoint: `ckpt-<epoch>-<step>`, or `ckpt-<epoch>-<step>.<revision>` if that
/// step was saved before, or its save begun.
///
/// The greater name is the newer checkpoint: a restore starts a higher epoch, and within an epoch
/// steps never go back. Clocks may go back, so the order does not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointName {
    /// The restore epoch: the number of times that the cluster had been restored.
    pub restore_epoch: u32,
    /// The global step.
    pub global_step: u64,
    /// Counts the saves of this step. A save never uses the name of an earlier one, so a delayed
    /// write or a leftover folder cannot harm another save.
    pub(crate) revision: u32,
}

impl CheckpointName {
    pub(crate) fn new(epoch: RestoreEpoch, step: GlobalStep, revision: u32) -> Self {
        CheckpointName { restore_epoch: epoch.0, global_step: step.0, revision }
    }

    /// Returns the folder that the files are written to before the checkpoint is published.
    pub fn temporary(&self) -> String {
        format!("{self}{TEMPORARY}")
    }

    /// Returns the checkpoint whose temporary folder this is.
    pub(crate) fn of_temporary(folder: &str) -> Option<CheckpointName> {
        folder.strip_suffix(TEMPORARY)?.parse().ok()
    }

    /// Returns whether both are saves of the same step.
    pub(crate) fn is_same_step(&self, other: &CheckpointName) -> bool {
        (self.restore_epoch, self.global_step) == (other.restore_epoch, other.global_step)
    }
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ckpt-{}-{}", self.restore_epoch, self.global_step)?;
        if self.revision > 0 { write!(f, ".{}", self.revision) } else { Ok(()) }
    }
}

/// The error for text that is not the name of a checkpoint.
#[derive(Debug)]
pub struct NotAName;

impl FromStr for CheckpointName {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Self, NotAName> {
        let parse = || {
            let (epoch, step) = text.strip_prefix("ckpt-")?.split_once('-')?;
            let (step, revision) = step.split_once('.').unwrap_or((step, "0"));
            let restore_epoch = epoch.parse().ok()?;
            let global_step = step.parse().ok()?;
            let name =
                CheckpointName { restore_epoch, global_step, revision: revision.parse().ok()? };
            // A checkpoint has exactly one name: no leading zeros, no sign.
            (name.to_string() == text).then_some(name)
        };
        parse().ok_or(NotAName)
    }
}

const TEMPORARY: &str = ".tmp";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_canonical_and_ordered() {
        let names =
            ["ckpt-0-0", "ckpt-0-9", "ckpt-0-10", "ckpt-0-10.1", "ckpt-0-10.12", "ckpt-1-2"];
        let parsed: Vec<CheckpointName> = names.iter().map(|name| name.parse().unwrap()).collect();
        assert!(parsed.is_sorted());
        assert!(parsed.iter().zip(names).all(|(parsed, name)| parsed.to_string() == name));
        assert!(parsed.iter().all(|n| CheckpointName::of_temporary(&n.temporary()) == Some(*n)));
        let bad = "ckpt-1 ckpt-1- ckpt-01-2 ckpt-1-+2 ckpt-1-2.0 ckpt-1-2.01 ckpt-1-2.tmp ckpt--1-2 \
                   ckpt-1-2.1.1 CKPT-1-2 ckpt-4294967296-1 ckpt-1-18446744073709551616 LATEST";
        for name in bad.split(' ') {
            assert!(name.parse::<CheckpointName>().is_err(), "{name}");
        }
    }
}
