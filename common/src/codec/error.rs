//! What can be wrong with a codec, with what it is given to encode, and with what it is to decode.

use thiserror::Error;

use super::{Codec, Encoding, STRETCH_ELEMENTS_MAX};
use crate::tensor::DType;

/// A codec that cannot be. Always the fault of the caller's configuration.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Its parameter is out of range.
    #[error(
        "cannot use the codec {codec}: the fraction of topk is above 0 and at most 1, the \
         magnitude of threshold is above 0 and finite"
    )]
    Parameter {
        /// The codec.
        codec: Codec,
    },
    /// The text names none.
    #[error(
        "cannot read {text:?} as a codec: expected f16, bf16, int8, onebit, topk(FRACTION) or \
         threshold(MAGNITUDE)"
    )]
    Text {
        /// The text.
        text: String,
    },
}

/// Elements that cannot be encoded. Always the fault of the caller.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// An element is NaN or infinite, and the codec has no room for that.
    #[error("cannot encode element {element} as {codec}: it is {value}")]
    NonFinite {
        /// The codec.
        codec: Codec,
        /// The first such element, counted from the start of the stretch.
        element: usize,
        /// It.
        value: f64,
    },
    /// More elements than a stretch may have.
    #[error("cannot encode {elements} elements at once: {STRETCH_ELEMENTS_MAX} are the most")]
    TooLong {
        /// How many there are.
        elements: usize,
    },
}

/// Bytes that are no encoded stretch. Always the peer's fault.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Another number of bytes than so many elements need.
    #[error(
        "cannot decode {elements} elements from {bytes} bytes of {encoding}: {expected} are needed"
    )]
    Length {
        /// What the bytes should be.
        encoding: Encoding,
        /// How many elements they should be.
        elements: usize,
        /// How many bytes there are.
        bytes: usize,
        /// How many there should be.
        expected: usize,
    },
    /// The scale or the mean of a block is none: it is not finite, or has the wrong sign.
    #[error("cannot decode block {block}: {value} is not its scale or mean")]
    Scale {
        /// The block.
        block: usize,
        /// What stands there.
        value: f64,
    },
    /// More pairs than elements.
    #[error("cannot decode {pairs} pairs of index and value: there are {elements} elements")]
    Count {
        /// How many pairs are announced.
        pairs: u32,
        /// How many elements there are.
        elements: usize,
    },
    /// An index that is not above the one before it, or beyond the elements.
    #[error(
        "cannot decode pair {pair}: the index {index} is not above the one before it, or not below {elements}"
    )]
    Index {
        /// The pair.
        pair: usize,
        /// Its index.
        index: u32,
        /// How many elements there are.
        elements: usize,
    },
    /// Padding that is not zero.
    #[error("cannot decode a stretch: its padding is not zero")]
    Padding,
    /// The memory is not that of whole, aligned elements of a float type.
    #[error("cannot decode into {bytes} bytes of {dtype}: they are no whole, aligned floats")]
    Target {
        /// The type of the elements.
        dtype: DType,
        /// The length of the memory.
        bytes: usize,
    },
}

/// Checks the length of an encoded stretch.
pub(super) fn length(
    encoding: Encoding,
    elements: usize,
    bytes: &[u8],
    expected: usize,
) -> Result<(), DecodeError> {
    match bytes.len() {
        found if found == expected => Ok(()),
        bytes => Err(DecodeError::Length { encoding, elements, bytes, expected }),
    }
}
