//! [`CheckpointFault`]: why a request for a checkpoint failed, sorted by what can be done about it.

use std::fmt;

use pushpull_common::error::Chain;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;

use crate::error::CheckpointError;

/// A failure to save, find or restore a checkpoint, as its requester needs to know it. The cause is
/// in words; the kind decides the refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointFault {
    /// The storage failed. It may work again.
    Storage(String),
    /// A shard cannot be reached, was lost, or is behind the others. It may return.
    Unavailable(String),
    /// The configuration, the variables or the checkpoints must be changed by a person.
    Unfit(String),
    /// The variables have no values.
    NotInitialized,
}

impl CheckpointFault {
    /// Returns the refusal of the request.
    pub fn refusal(&self) -> Refusal {
        match self {
            CheckpointFault::Storage(cause) => {
                Refusal::Storage { detail: Detail::clipped(&**cause) }
            }
            CheckpointFault::Unavailable(cause) => {
                Refusal::Unavailable { detail: Detail::clipped(&**cause) }
            }
            CheckpointFault::Unfit(cause) => {
                Refusal::Checkpoint { detail: Detail::clipped(&**cause) }
            }
            CheckpointFault::NotInitialized => Refusal::NotInitialized {},
        }
    }

    /// Returns the fault of a save for which another shard has refused its part.
    pub fn of_part(refusal: &Refusal, cause: String) -> CheckpointFault {
        match refusal {
            Refusal::Storage { .. } => CheckpointFault::Storage(cause),
            Refusal::Checkpoint { .. } => CheckpointFault::Unfit(cause),
            // The shard was restarted or restored, or still writes an earlier part.
            _ => CheckpointFault::Unavailable(cause),
        }
    }

    /// Adds words to the cause.
    pub fn map_cause(self, map: impl FnOnce(String) -> String) -> CheckpointFault {
        match self {
            CheckpointFault::Storage(cause) => CheckpointFault::Storage(map(cause)),
            CheckpointFault::Unavailable(cause) => CheckpointFault::Unavailable(map(cause)),
            CheckpointFault::Unfit(cause) => CheckpointFault::Unfit(map(cause)),
            CheckpointFault::NotInitialized => CheckpointFault::NotInitialized,
        }
    }
}

impl fmt::Display for CheckpointFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CheckpointFault::Storage(cause)
            | CheckpointFault::Unavailable(cause)
            | CheckpointFault::Unfit(cause) => f.write_str(cause),
            CheckpointFault::NotInitialized => f.write_str("the variables have no values yet"),
        }
    }
}

impl From<CheckpointError> for CheckpointFault {
    fn from(error: CheckpointError) -> CheckpointFault {
        let cause = Chain(&error).to_string();
        match error {
            CheckpointError::GivenUp { .. } | CheckpointError::NotSaved { .. } => {
                CheckpointFault::Unavailable(cause)
            }
            // The next search finds another checkpoint, if one was damaged or deleted meanwhile.
            CheckpointError::Storage(_)
            | CheckpointError::Corrupt { .. }
            | CheckpointError::OtherFile { .. }
            | CheckpointError::NotFound { .. }
            | CheckpointError::NoCheckpoint
            | CheckpointError::Memory { .. } => CheckpointFault::Storage(cause),
            CheckpointError::NoneGood { .. }
            | CheckpointError::Forked { .. }
            | CheckpointError::VariableMissing { .. }
            | CheckpointError::DTypeMismatch { .. }
            | CheckpointError::ShapeMismatch { .. }
            | CheckpointError::OtherFormat { .. }
            | CheckpointError::TableMismatch { .. }
            | CheckpointError::TableFull { .. }
            | CheckpointError::OptimizerMismatch { .. }
            | CheckpointError::SlotMissing { .. }
            | CheckpointError::Unfit { .. }
            | CheckpointError::TooLarge { .. }
            | CheckpointError::ShardMissing { .. }
            | CheckpointError::SlotName { .. }
            | CheckpointError::ExportName { .. } => CheckpointFault::Unfit(cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::Shape;

    use super::*;
    use crate::{Refused, StorageFault};

    fn storage(kind: std::io::ErrorKind) -> CheckpointError {
        let path = "ckpt-1-2".to_owned();
        CheckpointError::Storage(StorageFault { operation: "read", path, source: kind.into() })
    }

    /// A requester that retries what cannot heal waits in vain; one that ends for what can, loses
    /// its training.
    #[test]
    fn the_refusal_says_whether_a_retry_can_help() {
        let corrupt = || crate::error::corrupt("ckpt-1-2/data", 0, "a", "b");
        let none_good = |reason| {
            let refused = Refused { checkpoint: "ckpt-1-2".to_owned(), reason };
            CheckpointError::NoneGood { refused: vec![refused] }
        };
        let mismatch = CheckpointError::ShapeMismatch {
            variable: "w".to_owned(),
            checkpoint: "ckpt-1-2".to_owned(),
            found: Shape::new([2]).unwrap(),
            expected: Shape::new([3]).unwrap(),
        };
        let optimizer = CheckpointError::OptimizerMismatch {
            variable: "w".to_owned(),
            checkpoint: "ckpt-1-2".to_owned(),
            found: "adam".to_owned(),
            expected: "sgd".to_owned(),
        };
        for (error, expected) in [
            (storage(std::io::ErrorKind::StorageFull), "Storage"),
            (storage(std::io::ErrorKind::NotFound), "Storage"),
            (corrupt(), "Storage"),
            (none_good(corrupt()), "Checkpoint"),
            (none_good(storage(std::io::ErrorKind::NotFound)), "Checkpoint"),
            (mismatch, "Checkpoint"),
            (optimizer, "Checkpoint"),
        ] {
            let text = error.to_string();
            let refusal = CheckpointFault::from(error).refusal();
            let name = format!("{refusal:?}");
            assert_eq!(name.split_whitespace().next(), Some(expected), "{text}");
        }
    }
}
