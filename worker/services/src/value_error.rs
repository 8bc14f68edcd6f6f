//! [`ValueError`]: the reasons why a value cannot be made or used.

use pushpull_common::tensor::ShapeError;
use thiserror::Error;

use super::value::Elements;

/// The reason why a value cannot be made or used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The extents are no valid shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// There are more or fewer elements than the shape has.
    #[error("cannot make a tensor of the shape {shape:?} from {found} elements")]
    Length {
        /// The extents of the shape, outermost first.
        shape: Vec<u64>,
        /// The number of elements that were given.
        found: u64,
    },
    /// The elements have another type.
    #[error("cannot use {found} as {expected}")]
    Elements {
        /// The element type that the program asked for.
        expected: Elements,
        /// The element type of the value.
        found: Elements,
    },
    /// The tensor does not have one element.
    #[error("cannot use a tensor of the shape {shape:?} as a single number")]
    NotScalar {
        /// The extents of the shape, outermost first.
        shape: Vec<u64>,
    },
    /// The bytes are not text.
    #[error("cannot use bytes as text: they are not UTF-8 after {valid_bytes} bytes")]
    Text {
        /// The number of bytes before the first that is not UTF-8.
        valid_bytes: usize,
    },
    /// The shapes of two tensors differ.
    #[error("cannot combine tensors of the shapes {left:?} and {right:?}")]
    Shapes {
        /// The extents of the first tensor.
        left: Vec<u64>,
        /// The extents of the second tensor.
        right: Vec<u64>,
    },
    /// The system has no memory for a value.
    #[error("cannot make a value of {bytes} bytes: the system has no memory for it")]
    Memory {
        /// The size of the value in bytes.
        bytes: u64,
    },
    /// There is no value of this name.
    #[error("cannot find the value {name:?}: there are {known}")]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The known names, in words.
        known: String,
    },
}
