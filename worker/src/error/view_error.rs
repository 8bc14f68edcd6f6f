//! Faults in how a call uses a variable.

use pushpull_common::tensor::DType;
use thiserror::Error;

/// Why a call cannot use a variable like this. Nothing was sent or changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ViewError {
    /// No declared variable has this name.
    #[error("cannot use the variable {name:?}: none of this name is declared")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The variable's elements are of another type.
    #[error("cannot use {name:?} as {asked}: its elements are {dtype}")]
    Type {
        /// The variable.
        name: String,
        /// The requested type.
        asked: DType,
        /// The variable's type.
        dtype: DType,
    },
    /// The number of elements is not the variable's.
    #[error("cannot take {elements} elements for {name:?}: its shape is {shape}")]
    Length {
        /// The variable.
        name: String,
        /// The elements given.
        elements: usize,
        /// The variable's shape.
        shape: String,
    },
    /// The variable is plain: it supports `assign` and `assign_add`, and has no gradients.
    #[error("cannot push a gradient for {name:?}: it is a plain variable")]
    Plain {
        /// The variable.
        name: String,
    },
    /// The optimizer trains the variable: it supports gradients and `assign`.
    #[error("cannot add to {name:?}: it is trained by the optimizer")]
    Trainable {
        /// The variable.
        name: String,
    },
    /// The variable is sparse: it is pulled and pushed by rows, and workers have no copy of it.
    #[error("cannot use {name:?} whole: it is sparse, and pulled and pushed by rows")]
    Sparse {
        /// The variable.
        name: String,
    },
    /// The variable is dense: it is pulled and pushed whole.
    #[error("cannot use rows of {name:?}: it is not sparse")]
    Dense {
        /// The variable.
        name: String,
    },
    /// The number of elements is not a whole row for each id.
    #[error("cannot take {elements} elements for {rows} rows of {name:?}: a row has {width}")]
    Width {
        /// The variable.
        name: String,
        /// The number of ids.
        rows: usize,
        /// The number of elements.
        elements: usize,
        /// The elements of one row.
        width: u64,
    },
    /// The variable has no such row.
    #[error("cannot use row {row} of {name:?}, at index {place}: it has {rows} rows")]
    Row {
        /// The variable.
        name: String,
        /// The first invalid id.
        row: u64,
        /// Its index among the ids, from 0.
        place: usize,
        /// The number of rows of the variable.
        rows: u64,
    },
    /// The push has more rows of a table for one shard than the table's `rows_at_once`.
    #[error("cannot push {rows} rows of table {name:?} to one shard: it takes {limit} at once")]
    RowsAtOnce {
        /// The table.
        name: String,
        /// The number of different rows.
        rows: usize,
        /// The limit.
        limit: u32,
    },
    /// An assignment names a row twice.
    #[error("cannot assign row {row} of {name:?} twice: it is repeated at index {place}")]
    RowTwice {
        /// The variable.
        name: String,
        /// The row.
        row: u64,
        /// The index of its second occurrence among the ids, from 0.
        place: usize,
    },
    /// The variable already has a gradient in this push, or is named twice in one call.
    #[error("cannot use {name:?} twice in one push")]
    Twice {
        /// The variable.
        name: String,
    },
    /// A streamed step on a ring needs the gradient of every trainable variable. The ring is given up.
    #[error("cannot push: {name:?} has no gradient in this step")]
    Missing {
        /// The first such variable, in the order of the reduction.
        name: String,
    },
}
