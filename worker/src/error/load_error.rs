//! Faults in a file of first values.

use std::path::PathBuf;

use pushpull_common::tensor::DType;
use thiserror::Error;

/// Why a file cannot fill variables: see [`crate::InitialValues::load`]. No variable was filled.
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
    /// The file has a tensor for a sparse variable, whose rows are not loaded.
    #[error(
        "cannot load {path:?}: the variable {variable:?} is sparse, and only dense ones are loaded"
    )]
    Sparse {
        /// The file.
        path: PathBuf,
        /// The variable.
        variable: String,
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
