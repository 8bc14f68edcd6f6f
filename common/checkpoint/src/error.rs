//! Errors of saving, verifying and restoring checkpoints.

use std::fmt;

use pushpull_common::error::Chain;
use pushpull_common::file_kind::{FIRST_BYTES, FileKind};
use pushpull_common::ids::ShardId;
use pushpull_common::tensor::{DType, Shape};
use thiserror::Error;

use crate::abandon::Abandoned;
use crate::storage::StorageFault;

/// The reason why a checkpoint could not be saved, trusted or restored. Checkpoints that were
/// published before are never affected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage failed, or a file does not exist.
    #[error(transparent)]
    Storage(StorageFault),
    /// The work was abandoned: the server stops, or its requester is gone.
    #[error("cannot {operation} {path}: abandoned because {reason}")]
    GivenUp {
        /// The operation that was due next.
        operation: &'static str,
        /// The path of that operation.
        path: String,
        /// The reason.
        reason: &'static str,
    },
    /// A running server did not save a checkpoint. Earlier checkpoints are unaffected.
    #[error("cannot save a checkpoint: {reason}")]
    NotSaved {
        /// The reason.
        reason: String,
    },
    /// The server runs in another process, which has forked this one.
    #[error("cannot save a checkpoint in a child of fork: the server runs in process {parent}")]
    Forked {
        /// The process of the server.
        parent: u32,
    },
    /// A file is not what was written: it was damaged, truncated, swapped, or is foreign.
    #[error("cannot trust {file}: at byte {offset} it has {found}, not {expected}")]
    Corrupt {
        /// The file, with its folder.
        file: String,
        /// The offset of the difference; 0 if only the file as a whole is known to differ.
        offset: u64,
        /// The expected contents.
        expected: String,
        /// The contents found.
        found: String,
    },
    /// The first bytes of a file are those of another format: it stands in for the file.
    #[error("cannot trust {file}: it is {found}")]
    OtherFile {
        /// The file, with its folder.
        file: String,
        /// What it is, as the rest of a sentence.
        found: String,
    },
    /// The checkpoint was saved in another format, by an older or a newer server. It is intact.
    #[error(
        "cannot restore {checkpoint}: it has format {found}, and this version reads format {format}; \
         a server of the version that saved it can restore it"
    )]
    OtherFormat {
        /// The checkpoint.
        checkpoint: String,
        /// The format of its manifest.
        found: u32,
        /// The format of this version.
        format: u32,
    },
    /// There are checkpoints, and none can be trusted. This is an error, because only a person may
    /// decide to start from nothing instead.
    #[error("cannot restore: {}", AllRefused(refused))]
    NoneGood {
        /// Every checkpoint, newest first.
        refused: Vec<Refused>,
    },
    /// There is no checkpoint of this name.
    #[error("cannot find the checkpoint {name:?}")]
    NotFound {
        /// The requested name.
        name: String,
    },
    /// There is no checkpoint.
    #[error("cannot find a checkpoint: there is none")]
    NoCheckpoint,
    /// The checkpoint has no such variable.
    #[error("cannot restore {variable:?}: the checkpoint {checkpoint} has no such variable")]
    VariableMissing {
        /// The requested variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
    },
    /// The variable has another type.
    #[error(
        "cannot restore {variable:?}: the checkpoint {checkpoint} has it as {found}, not {expected}"
    )]
    DTypeMismatch {
        /// The variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
        /// Its type in the checkpoint.
        found: DType,
        /// The requested type.
        expected: DType,
    },
    /// The variable has another shape.
    #[error(
        "cannot restore {variable:?}: the checkpoint {checkpoint} has the shape {found}, not {expected}"
    )]
    ShapeMismatch {
        /// The variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
        /// Its shape in the checkpoint.
        found: Shape,
        /// The requested shape.
        expected: Shape,
    },
    /// The variable is a growing table only in the checkpoint, or only in the cluster.
    #[error(
        "cannot restore {variable:?}: in the checkpoint {checkpoint} it is {}a growing table, and here \
         it is {}",
        if *found { "" } else { "not " },
        if *found { "not" } else { "one" }
    )]
    TableMismatch {
        /// The variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
        /// Whether it is a growing table in the checkpoint.
        found: bool,
    },
    /// The checkpoint has more rows of a table than this shard can hold.
    #[error(
        "cannot restore the table {variable:?} of {checkpoint}: this shard holds at most {limit} of \
         its rows"
    )]
    TableFull {
        /// The variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
        /// The maximum number of rows on the shard.
        limit: u64,
    },
    /// The variable was trained by another optimizer, so its slots have another meaning.
    #[error(
        "cannot restore {variable:?}: the checkpoint {checkpoint} has it trained by {found}, not \
         {expected}"
    )]
    OptimizerMismatch {
        /// The variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
        /// The kind of the optimizer that it was saved with.
        found: String,
        /// The kind of the optimizer that is to train it.
        expected: String,
    },
    /// The checkpoint lacks a slot: when it was saved, the optimizer kept others, or the variable
    /// was not trained.
    #[error(
        "cannot restore {variable:?}: the checkpoint {checkpoint} has the slots {found:?}, not \
         {expected:?}"
    )]
    SlotMissing {
        /// The variable.
        variable: String,
        /// The checkpoint.
        checkpoint: String,
        /// Its slots in the checkpoint.
        found: Vec<String>,
        /// The requested slot.
        expected: String,
    },
    /// The checkpoint is complete, but a shard cannot accept one of its values.
    #[error("cannot restore {checkpoint}: its {what} is {found}, not {expected}")]
    Unfit {
        /// The checkpoint.
        checkpoint: String,
        /// The name of the value.
        what: &'static str,
        /// The values that a shard accepts.
        expected: String,
        /// The value in the checkpoint.
        found: String,
    },
    /// The memory of a shard could not be read or filled.
    #[error("cannot copy the memory of a shard: {reason}")]
    Memory {
        /// The reason.
        reason: String,
    },
    /// Something exceeds a limit of the format.
    #[error("cannot save a checkpoint with {found} {what}: the limit is {limit}")]
    TooLarge {
        /// The unit and the object, such as "bytes of user data".
        what: &'static str,
        /// The number found.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A shard that holds variables has no file in the checkpoint.
    #[error("cannot publish {checkpoint}: nothing was written for {shard}")]
    ShardMissing {
        /// The checkpoint.
        checkpoint: String,
        /// The shard.
        shard: ShardId,
    },
    /// A slot's name is not unique, or has characters other than letters, digits and `_`.
    #[error("cannot save the slot {name:?}: slot names must be unique, of letters, digits and _")]
    SlotName {
        /// The name.
        name: String,
    },
    /// Two tensors of an export would have the same name.
    #[error("cannot export: {name:?} would be the name of two tensors; leave the slots out")]
    ExportName {
        /// The name.
        name: String,
    },
}

impl From<StorageFault> for CheckpointError {
    fn from(fault: StorageFault) -> CheckpointError {
        match Abandoned::of(&fault).map(|abandoned| abandoned.reason) {
            None => CheckpointError::Storage(fault),
            Some(reason) => {
                let StorageFault { operation, path, .. } = fault;
                CheckpointError::GivenUp { operation, path, reason }
            }
        }
    }
}

/// A checkpoint that exists and cannot be trusted.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refused {
    /// Its name.
    pub checkpoint: String,
    /// The reason: the file, the offset, and what was expected there.
    pub reason: CheckpointError,
}

struct AllRefused<'a>(&'a [Refused]);

impl fmt::Display for AllRefused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no checkpoint can be trusted")?;
        self.0.iter().try_for_each(|refused| {
            write!(f, "; {}: {}", refused.checkpoint, Chain(&refused.reason))
        })
    }
}

/// Returns what a file is whose first bytes are those of a format that no file of a checkpoint has,
/// such as a pointer of Git LFS.
pub(crate) fn foreign(first: &[u8]) -> Option<String> {
    let first = &first[..first.len().min(FIRST_BYTES)];
    let is_own =
        |kind: &FileKind| kind.is_text() || kind.is_safetensors() || first.starts_with(b"{");
    let kind = FileKind::of(first).filter(|kind| !first.is_empty() && !is_own(kind));
    kind.map(FileKind::into_text)
}

/// Returns the error for a file whose contents at `offset` are not the expected ones.
pub(crate) fn corrupt(
    file: &str,
    offset: u64,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> CheckpointError {
    let expected = expected.to_string();
    let found = found.to_string();
    CheckpointError::Corrupt { file: file.to_owned(), offset, expected, found }
}
