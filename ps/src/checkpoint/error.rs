//! Why a checkpoint could not be saved, trusted or restored.

use std::fmt;

use pushpull_common::ids::ShardId;
use pushpull_common::tensor::{DType, Shape};
use thiserror::Error;

use super::give_up::GivenUp;
use super::storage::StorageFault;

/// Why a checkpoint could not be saved, trusted or restored. Whatever it is, checkpoints that were
/// published before are untouched.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage failed, or a file is not there.
    #[error(transparent)]
    Storage(StorageFault),
    /// Somebody has given it up: the server stops, or nobody waits for it any more.
    #[error("cannot {operation} {path}: it was given up, because {reason}")]
    GivenUp {
        /// What was to be done next.
        operation: &'static str,
        /// With what.
        path: String,
        /// Why it is given up.
        reason: &'static str,
    },
    /// A file is not what was written. It has been damaged, cut, swapped, or was never ours.
    #[error("cannot trust {file}: at byte {offset} it has {found}, not {expected}")]
    Corrupt {
        /// The file, with its folder.
        file: String,
        /// Where the difference is; 0 when it is known of the file as a whole only.
        offset: u64,
        /// What must be there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// There are checkpoints, and none can be trusted. To start from nothing instead is for a
    /// person to decide, so it is an error and not an empty directory.
    #[error("cannot restore: {}", AllRefused(refused))]
    NoneGood {
        /// Each of them, newest first.
        refused: Vec<Refused>,
    },
    /// No checkpoint of this name, or none at all.
    #[error("cannot find the checkpoint {name:?}")]
    NotFound {
        /// The name asked for.
        name: String,
    },
    /// The checkpoint has no such variable.
    #[error("cannot restore {variable:?}: the checkpoint {checkpoint} has no such variable")]
    VariableMissing {
        /// The variable asked for.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
    },
    /// The variable is of another type.
    #[error("cannot restore {variable:?}: the checkpoint has it as {found}, not {expected}")]
    DTypeMismatch {
        /// The variable.
        variable: String,
        /// Its type in the checkpoint.
        found: DType,
        /// The type asked for.
        expected: DType,
    },
    /// The variable has another shape.
    #[error("cannot restore {variable:?}: the checkpoint has the shape {found}, not {expected}")]
    ShapeMismatch {
        /// The variable.
        variable: String,
        /// Its shape in the checkpoint.
        found: Shape,
        /// The shape asked for.
        expected: Shape,
    },
    /// A table that grows was none, or the other way round.
    #[error(
        "cannot restore {variable:?}: in the checkpoint it is {}a table that grows, and here {}",
        if *found { "" } else { "not " },
        if *found { "not" } else { "it is" }
    )]
    TableMismatch {
        /// The variable.
        variable: String,
        /// Whether it is one in the checkpoint.
        found: bool,
    },
    /// A table has room for fewer rows here than the checkpoint has of them.
    #[error(
        "cannot restore the table {variable:?}: there is room for {limit} rows on this shard only"
    )]
    TableFull {
        /// The variable.
        variable: String,
        /// How many rows there may be on the shard.
        limit: u64,
    },
    /// The variable was trained by another optimizer: its slots are of another meaning.
    #[error(
        "cannot restore {variable:?}: the checkpoint has it trained by {found}, not {expected}"
    )]
    OptimizerMismatch {
        /// The variable.
        variable: String,
        /// The kind of the optimizer that it was saved under.
        found: String,
        /// The kind of the one that is to train it.
        expected: String,
    },
    /// The checkpoint lacks a slot: it was saved when the optimizer kept others, or when the variable
    /// was not trained.
    #[error(
        "cannot restore {variable:?}: the checkpoint has the slots {found:?}, not {expected:?}"
    )]
    SlotMissing {
        /// The variable.
        variable: String,
        /// The slots it has in the checkpoint.
        found: Vec<String>,
        /// The slot asked for.
        expected: String,
    },
    /// The checkpoint is whole, but is not one that a shard may take.
    #[error("cannot restore {checkpoint}: its {what} is {found}, not {expected}")]
    Unfit {
        /// The checkpoint.
        checkpoint: String,
        /// What of it.
        what: &'static str,
        /// What a shard may take.
        expected: String,
        /// What the checkpoint has.
        found: String,
    },
    /// A shard's memory could not be read or filled.
    #[error("cannot copy the memory of a shard: {reason}")]
    Memory {
        /// Why not.
        reason: String,
    },
    /// Something has no place in the format.
    #[error("cannot save a checkpoint with {found} bytes of {what}: the limit is {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A shard that holds variables was left out of a checkpoint.
    #[error("cannot publish {checkpoint}: nothing was written for {shard}")]
    ShardMissing {
        /// The checkpoint.
        checkpoint: String,
        /// The shard.
        shard: ShardId,
    },
    /// A slot's name has other characters than letters, digits and `_`, or is that of another.
    #[error(
        "cannot save the slot {name:?}: slots have names of their own, of letters, digits and _"
    )]
    SlotName {
        /// The name.
        name: String,
    },
    /// Two tensors of an export have one name.
    #[error("cannot export: {name:?} would be the name of two tensors; leave the slots out")]
    ExportName {
        /// The name.
        name: String,
    },
}

impl From<StorageFault> for CheckpointError {
    fn from(fault: StorageFault) -> CheckpointError {
        match GivenUp::of(&fault).map(|given_up| given_up.reason) {
            None => CheckpointError::Storage(fault),
            Some(reason) => {
                let StorageFault { operation, path, .. } = fault;
                CheckpointError::GivenUp { operation, path, reason }
            }
        }
    }
}

/// A checkpoint that is there and cannot be trusted.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refused {
    /// Its name.
    pub checkpoint: String,
    /// Why not: the file, the place, and what was expected there.
    pub reason: CheckpointError,
}

struct AllRefused<'a>(&'a [Refused]);

impl fmt::Display for AllRefused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no checkpoint can be trusted")?;
        self.0
            .iter()
            .try_for_each(|refused| write!(f, "; {}: {}", refused.checkpoint, refused.reason))
    }
}

/// A file that has something else at a place than it must have.
pub(super) fn corrupt(
    file: &str,
    offset: u64,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> CheckpointError {
    let (expected, found) = (expected.to_string(), found.to_string());
    CheckpointError::Corrupt { file: file.to_owned(), offset, expected, found }
}
