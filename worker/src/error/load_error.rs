//! Faults in a file of first values.

use std::path::PathBuf;

use pushpull_common::tensor::DType;
use thiserror::Error;

/// The reason why first values were not loaded: see [`crate::InitialValues::load`]. The variables are
/// not ready then.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be read.
    #[error("cannot load {path:?}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        reason: String,
    },
    /// The file is not in the safetensors format, or is damaged.
    #[error("cannot load {path:?} as a safetensors file: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// The index of a sharded checkpoint is damaged, or differs from its files.
    #[error("cannot load {path:?} as the index of a sharded checkpoint: {reason}")]
    Index {
        /// The index.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A folder has no model under the names of Hugging Face.
    #[error(
        "cannot load {path:?}: the folder has no model.safetensors and no model.safetensors.index.json"
    )]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// The file lacks the values of a variable.
    #[error("cannot load {path:?}: it has no tensor {tensor:?} for the variable {variable:?}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The variable.
        variable: String,
        /// The name of its tensor.
        tensor: String,
    },
    /// The file has a tensor for which there is no variable.
    #[error("cannot load {path:?}: no variable takes its tensor {tensor:?}")]
    Extra {
        /// The file.
        path: PathBuf,
        /// The first such tensor, by name.
        tensor: String,
    },
    /// The elements of a tensor are of another type than those of its variable.
    #[error(
        "cannot load {path:?}: the tensor {tensor:?} has elements of {found}, and {variable:?} of {dtype}"
    )]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type in the file, by its name in the format.
        found: String,
        /// The variable.
        variable: String,
        /// The variable's type.
        dtype: DType,
    },
    /// A number is beyond the range of the type to which it is cast: see
    /// [`crate::LoadOptions::cast`].
    #[error(
        "cannot load {path:?}: element {element} of the tensor {tensor:?} is {value}, beyond the range of {dtype}"
    )]
    Range {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The index of the element.
        element: u64,
        /// The number, as text.
        value: String,
        /// The variable's type.
        dtype: DType,
    },
    /// A tensor has another shape than its variable.
    #[error(
        "cannot load {path:?}: the shape of the tensor {tensor:?} is {found}, and that of {variable:?} is {shape}"
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape in the file.
        found: String,
        /// The variable.
        variable: String,
        /// The variable's shape.
        shape: String,
    },
    /// The ids of a table's rows are missing or cannot be such ids.
    #[error(
        "cannot load {path:?}: the tensor {tensor:?}, the ids of the table {variable:?}, {fault}"
    )]
    Ids {
        /// The file.
        path: PathBuf,
        /// The tensor of the ids.
        tensor: String,
        /// The table.
        variable: String,
        /// The fault, as the rest of the sentence.
        fault: String,
    },
    /// A name of [`crate::LoadOptions::rename`] is no variable.
    #[error("cannot load {path:?}: there is no variable {variable:?} to rename a tensor for")]
    Rename {
        /// The file.
        path: PathBuf,
        /// The name.
        variable: String,
    },
}
