//! [`VariableError`]: why a variable cannot be declared.

use thiserror::Error;

use super::{Replication, VariableSpec};
use crate::initializer::InitializerError;
use crate::partition::PartitionError;
use crate::protocol::limits::PART_BYTES_MAX;
use crate::table::TableError;
use crate::tensor::{DType, ShapeError};

/// The reason why a variable cannot be declared. The caller's configuration is at fault.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum VariableError {
    /// The name is empty.
    #[error(
        "cannot declare a variable without a name: a name has 1 to {} bytes",
        VariableSpec::NAME_BYTES_MAX
    )]
    EmptyName,
    /// The name is longer than [`VariableSpec::NAME_BYTES_MAX`].
    #[error(
        "cannot declare a variable with a name of {bytes} bytes: a name has 1 to {} bytes",
        VariableSpec::NAME_BYTES_MAX
    )]
    LongName {
        /// The length of the name.
        bytes: usize,
    },
    /// The name has a control character.
    #[error(
        "cannot declare the variable {name:?}: its name has the control character {character:?}"
    )]
    ControlCharacter {
        /// The name.
        name: String,
        /// The first control character.
        character: char,
    },
    /// The extents are not a valid shape.
    #[error("cannot declare the variable {name:?}")]
    Shape {
        /// The variable's name.
        name: String,
        /// The fault in the extents.
        source: ShapeError,
    },
    /// The initializer is invalid.
    #[error("cannot declare the variable {name:?}")]
    Initializer {
        /// The variable's name.
        name: String,
        /// The fault in the initializer.
        source: InitializerError,
    },
    /// The partitioner cannot partition the variable.
    #[error("cannot declare the variable {name:?}")]
    Partitioner {
        /// The variable's name.
        name: String,
        /// The fault in the partitioner.
        source: PartitionError,
    },
    /// The variable is sparse and its rows are empty or too long for a part.
    #[error(
        "cannot declare the variable {name:?} sparse: its rows have {bytes} bytes each, and may \
         have 1 to {PART_BYTES_MAX}"
    )]
    RowBytes {
        /// The variable's name.
        name: String,
        /// The bytes of a row as servers store it.
        bytes: u64,
    },
    /// The variable is sparse and has no rows, or more than 32 bits can number.
    #[error(
        "cannot declare the variable {name:?} sparse: it has {rows} rows, and may have 1 to {}",
        u32::MAX
    )]
    Rows {
        /// The variable's name.
        name: String,
        /// The number of rows.
        rows: u64,
    },
    /// The variable is sparse, so no replica can have values of its own.
    #[error(
        "cannot declare the variable {name:?} as {replication}: it is sparse, and no replica has \
         all of its rows"
    )]
    SparseReplication {
        /// The variable's name.
        name: String,
        /// The declared replication.
        replication: Replication,
    },
    /// The interval of a mean is 0.
    #[error("cannot declare the variable {name:?} as a mean every 0 steps: every step is 1")]
    MeanInterval {
        /// The variable's name.
        name: String,
    },
    /// Values of this type cannot be averaged.
    #[error("cannot declare the variable {name:?} of {dtype} as a mean: only f32 and f64 can be")]
    MeanType {
        /// The variable's name.
        name: String,
        /// The type of its elements.
        dtype: DType,
    },
    /// The table is invalid.
    #[error("cannot declare the table {name:?}")]
    Table {
        /// The variable's name.
        name: String,
        /// The fault in the table.
        source: TableError,
    },
}
