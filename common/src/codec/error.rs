//! The errors of choosing a codec and encoding with it, and of decoding.

use thiserror::Error;

use super::{Codec, Encoding, STRETCH_ELEMENTS_MAX};
use crate::tensor::DType;

/// An invalid codec, or elements that it cannot encode. The caller is at fault.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A parameter is out of range.
    #[error(
        "cannot use the codec {codec}: the fraction of topk is above 0 and at most 1, the \
         magnitude of threshold is above 0 and finite"
    )]
    Parameter {
        /// The codec.
        codec: Codec,
    },
    /// The text is not a codec.
    #[error(
        "cannot read {text:?} as a codec: expected f16, bf16, int8, onebit, topk(FRACTION) or \
         threshold(MAGNITUDE)"
    )]
    Text {
        /// The text.
        text: String,
    },
    /// An element is NaN or infinite, which the codec cannot express.
    #[error("cannot encode element {element} as {codec}: it is {value}")]
    NonFinite {
        /// The codec.
        codec: Codec,
        /// The index of the first such element in the stretch.
        element: usize,
        /// The element's value.
        value: f64,
    },
    /// A stretch has too many elements.
    #[error("cannot encode {elements} elements at once: the limit is {STRETCH_ELEMENTS_MAX}")]
    TooLong {
        /// The number of elements.
        elements: usize,
    },
}

/// Bytes that are not a valid encoded stretch. The peer is at fault, except for `Target`.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The number of bytes does not match the number of elements.
    #[error(
        "cannot decode {elements} elements from {bytes} bytes of {encoding}: {expected} are needed"
    )]
    Length {
        /// The expected encoding.
        encoding: Encoding,
        /// The number of elements to decode.
        elements: usize,
        /// The number of bytes found.
        bytes: usize,
        /// The number of bytes expected.
        expected: usize,
    },
    /// The scale or a mean of a block is not finite or has the wrong sign.
    #[error("cannot decode block {block}: {value} is not a valid scale or mean")]
    Scale {
        /// The index of the block.
        block: usize,
        /// The value found.
        value: f64,
    },
    /// There are more pairs than elements.
    #[error("cannot decode {pairs} pairs of index and value: there are {elements} elements")]
    Count {
        /// The number of pairs that the stretch announces.
        pairs: u32,
        /// The number of elements to decode.
        elements: usize,
    },
    /// An index is not above the one before it, or not below the number of elements.
    #[error(
        "cannot decode pair {pair}: the index {index} is not above the one before it, or not below {elements}"
    )]
    Index {
        /// The index of the pair.
        pair: usize,
        /// The element index of the pair.
        index: u32,
        /// The number of elements to decode.
        elements: usize,
    },
    /// The padding is not zero.
    #[error("cannot decode a stretch: its padding is not zero")]
    Padding,
    /// The target memory does not hold whole, aligned elements of a float type.
    #[error("cannot decode into {bytes} bytes of {dtype}: they are not whole, aligned floats")]
    Target {
        /// The type of the elements.
        dtype: DType,
        /// The length of the memory in bytes.
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
