//! Codecs: shorter encodings of gradients with a bounded error.
//!
//! A [`Codec`] decides how much of a gradient is sent, an [`Encoding`] is the byte format; several
//! codecs may share one encoding. The unit is a *stretch*: consecutive elements of one variable. A
//! [`Residual`] keeps the error of a stretch and adds it to the next one, so no gradient is lost
//! for good. `docs/codecs.md` has the formats, the bounds and when to use which.

mod blocks;
mod encodings;
mod error;
mod half_floats;
mod int8;
mod one_bit;
mod pairs;
mod real;
mod residual;
mod text;

pub use blocks::ScaleBlocks;
pub use encodings::Encodings;
use error::length;
pub use error::{CodecError, DecodeError};
pub use pairs::top_k_pairs_max;
pub use real::Real;
pub use residual::Residual;

use crate::finite::first_non_finite;
use crate::tensor::DType;

/// A way to encode gradients: decides which bits are sent.
///
/// The bounds are for finite elements; *largest* means largest in magnitude.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Codec {
    /// IEEE 754 half precision, 2 bytes an element. The error is at most 2^-11 of the element, or
    /// 2^-25 below 2^-14. Elements beyond 65504 become 65504.
    F16,
    /// The upper half of an f32, 2 bytes an element. The error is at most 2^-8 of the element, or
    /// 2^-134 below 2^-126. Elements beyond the largest bf16 become that.
    Bf16,
    /// One byte an element, plus a scale for each block of [`BLOCK`] elements; blocks end with
    /// their row. The error is at most 1/254 of the block's largest element. Elements must be
    /// finite.
    Int8,
    /// One bit an element, plus two means for each block of [`BLOCK`] elements.
    ///
    /// One is the mean of the elements that are not negative, the other the mean of the negative
    /// ones, so the block's sum is kept. The error is below the block's largest element. Elements
    /// must be finite.
    OneBit,
    /// Only the elements with the largest magnitudes, unchanged, as pairs of index and value. The
    /// error is the omitted elements. Elements must be finite.
    TopK {
        /// The share of each stretch that is sent, above 0 and at most 1, rounded up to whole
        /// elements. Of equal magnitudes the first are sent. Zeros are never sent.
        fraction: f64,
    },
    /// Only the elements of at least a given magnitude, unchanged, as pairs of index and value. The
    /// error is below that magnitude. Elements must be finite.
    Threshold {
        /// The smallest magnitude that is sent; above 0.
        magnitude: f64,
    },
}

/// The byte format of an encoded stretch.
///
/// A decoder needs nothing else but the type and number of the elements and their [`ScaleBlocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Encoding {
    /// The format of [`Codec::F16`].
    F16,
    /// The format of [`Codec::Bf16`].
    Bf16,
    /// The format of [`Codec::Int8`].
    Int8,
    /// The format of [`Codec::OneBit`].
    OneBit,
    /// The format of [`Codec::TopK`] and [`Codec::Threshold`].
    Pairs,
}

/// The number of elements that share a scale or a pair of means.
pub const BLOCK: usize = 256;

/// The most elements of one stretch: a 32-bit index must tell them apart.
pub const STRETCH_ELEMENTS_MAX: usize = u32::MAX as usize;

impl Codec {
    /// Checks that the parameters are in range.
    pub fn validate(&self) -> Result<(), CodecError> {
        let sound = match *self {
            Codec::TopK { fraction } => fraction > 0.0 && fraction <= 1.0,
            Codec::Threshold { magnitude } => magnitude > 0.0 && magnitude.is_finite(),
            _ => true,
        };
        if sound { Ok(()) } else { Err(CodecError::Parameter { codec: *self }) }
    }

    /// Returns the byte format that the codec produces.
    pub fn encoding(&self) -> Encoding {
        match self {
            Codec::F16 => Encoding::F16,
            Codec::Bf16 => Encoding::Bf16,
            Codec::Int8 => Encoding::Int8,
            Codec::OneBit => Encoding::OneBit,
            Codec::TopK { .. } | Codec::Threshold { .. } => Encoding::Pairs,
        }
    }

    /// Returns the most bytes of an encoded stretch of `elements` elements of a float type: fewer
    /// than [`Encoding::bytes_max`] if the codec bounds how many elements it sends.
    pub fn bytes_max(&self, dtype: DType, elements: usize) -> usize {
        match *self {
            Codec::TopK { fraction } => {
                pairs::bytes(dtype.size(), top_k_pairs_max(fraction, elements))
            }
            _ => self.encoding().bytes_max(dtype, elements),
        }
    }

    /// Encodes a stretch and appends it to `out`: at most [`Codec::bytes_max`] bytes, always a
    /// multiple of 8. On an error `out` is unchanged.
    ///
    /// The error of the encoding is lost; gradients need [`Residual::encode`].
    pub fn encode<T: Real>(&self, values: &[T], out: &mut Vec<u8>) -> Result<(), CodecError> {
        self.encode_rows(ScaleBlocks::THROUGH, values, out)
    }

    /// Encodes a stretch whose blocks may end with rows; otherwise as [`Codec::encode`].
    pub fn encode_rows<T: Real>(
        &self,
        blocks: ScaleBlocks,
        values: &[T],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        self.check(values)?;
        self.encode_checked(blocks, values, &mut Vec::new(), out);
        Ok(())
    }

    /// Checks that these values can be encoded: not too many, and finite if the codec needs that.
    pub fn check<T: Real>(&self, values: &[T]) -> Result<(), CodecError> {
        if values.len() > STRETCH_ELEMENTS_MAX {
            return Err(CodecError::TooLong { elements: values.len() });
        }
        if self.encoding().takes_non_finite() {
            return Ok(());
        }
        match first_non_finite(T::DTYPE, bytemuck::cast_slice(values)) {
            None => Ok(()),
            Some((element, value)) => Err(CodecError::NonFinite { codec: *self, element, value }),
        }
    }

    /// Encodes values that passed `check`. `scratch` is reusable memory; its content does not
    /// matter.
    fn encode_checked<T: Real>(
        &self,
        blocks: ScaleBlocks,
        values: &[T],
        scratch: &mut Vec<T>,
        out: &mut Vec<u8>,
    ) {
        let start = out.len();
        if self.encoding() != Encoding::Pairs {
            out.resize(start + self.encoding().rows_bytes_max(blocks, T::DTYPE, values.len()), 0);
        }
        match *self {
            Codec::F16 => half_floats::encode_f16(values, &mut out[start..]),
            Codec::Bf16 => half_floats::encode_bf16(values, &mut out[start..]),
            Codec::Int8 => int8::encode(blocks, values, &mut out[start..]),
            Codec::OneBit => one_bit::encode(values, &mut out[start..]),
            Codec::TopK { fraction } => pairs::encode_top(values, fraction, scratch, out),
            Codec::Threshold { magnitude } => pairs::encode_beyond(values, magnitude, out),
        }
    }
}

impl Encoding {
    /// Every encoding, in the order of their codes.
    pub const ALL: [Encoding; 5] =
        [Encoding::F16, Encoding::Bf16, Encoding::Int8, Encoding::OneBit, Encoding::Pairs];

    /// Returns the code on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Encoding::F16 => 1,
            Encoding::Bf16 => 2,
            Encoding::Int8 => 3,
            Encoding::OneBit => 4,
            Encoding::Pairs => 5,
        }
    }

    /// Returns the encoding of a code; `None` for a code that this version does not know.
    pub fn from_code(code: u8) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| encoding.code() == code)
    }

    /// Returns the wire encoding of a type that servers store as another, [`DType::master`]. No bit
    /// of an element is lost.
    pub const fn of_type(dtype: DType) -> Option<Encoding> {
        match dtype {
            DType::F16 => Some(Encoding::F16),
            DType::Bf16 => Some(Encoding::Bf16),
            _ => None,
        }
    }

    /// Returns the codec for values: only codecs that encode each element by itself, NaN included,
    /// qualify.
    pub const fn codec_of_values(self) -> Option<Codec> {
        match self {
            Encoding::F16 => Some(Codec::F16),
            Encoding::Bf16 => Some(Codec::Bf16),
            _ => None,
        }
    }

    /// Returns whether gradients of rows may use the encoding. The error of the others is as large
    /// as what they send. The next gradient of the row would repair it, but a row may never get
    /// one.
    pub const fn is_for_rows(self) -> bool {
        matches!(self, Encoding::F16 | Encoding::Bf16 | Encoding::Int8)
    }

    /// Returns whether NaN and infinities survive encoding.
    pub const fn takes_non_finite(self) -> bool {
        matches!(self, Encoding::F16 | Encoding::Bf16)
    }

    /// Returns the bytes of an encoded stretch of `elements` elements of a float type. The number
    /// is exact, except for [`Encoding::Pairs`], where it is the maximum.
    pub const fn bytes_max(self, dtype: DType, elements: usize) -> usize {
        self.rows_bytes_max(ScaleBlocks::THROUGH, dtype, elements)
    }

    /// Returns the bytes of a stretch whose blocks may end with rows; otherwise as
    /// [`Encoding::bytes_max`].
    pub const fn rows_bytes_max(self, blocks: ScaleBlocks, dtype: DType, elements: usize) -> usize {
        let width = dtype.size();
        match self {
            Encoding::F16 | Encoding::Bf16 => (2 * elements).next_multiple_of(8),
            Encoding::Int8 => int8::bytes(width, blocks, elements),
            Encoding::OneBit => one_bit::bytes(width, elements),
            Encoding::Pairs => pairs::bytes(width, elements),
        }
    }

    /// Decodes a stretch into `target`, which has exactly its elements. After an error the content
    /// of `target` is unspecified.
    ///
    /// The bytes may be hostile: everything is validated and nothing is allocated. The result may
    /// contain NaN or infinities if the encoding can express them.
    pub fn decode<T: Real>(self, bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
        self.decode_rows(ScaleBlocks::THROUGH, bytes, target)
    }

    /// Decodes a stretch whose blocks may end with rows; otherwise as [`Encoding::decode`].
    pub fn decode_rows<T: Real>(
        self,
        blocks: ScaleBlocks,
        bytes: &[u8],
        target: &mut [T],
    ) -> Result<(), DecodeError> {
        if self != Encoding::Pairs {
            let expected = self.rows_bytes_max(blocks, T::DTYPE, target.len());
            length(self, target.len(), bytes, expected)?;
        }
        match self {
            Encoding::F16 => half_floats::decode_f16(bytes, target),
            Encoding::Bf16 => half_floats::decode_bf16(bytes, target),
            Encoding::Int8 => int8::decode(blocks, bytes, target),
            Encoding::OneBit => one_bit::decode(bytes, target),
            Encoding::Pairs => pairs::decode(bytes, target),
        }
    }

    /// Decodes a stretch that zeros follow, up to a length on which both sides have agreed;
    /// otherwise as [`Encoding::decode`].
    pub fn decode_padded<T: Real>(self, bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
        let length = match self {
            Encoding::Pairs => pairs::announced_bytes(size_of::<T>(), target.len(), bytes)?,
            _ => self.bytes_max(T::DTYPE, target.len()),
        };
        match bytes.split_at_checked(length) {
            Some((stretch, rest)) => {
                self.decode(stretch, target)?;
                padding(rest)
            }
            // Too short: the error names both lengths.
            None => self.decode(bytes, target),
        }
    }

    /// Copies a stretch into memory of the type that this encoding stands for
    /// ([`Encoding::of_type`]). The bytes may be hostile, as in [`Encoding::decode`].
    pub fn take(self, bytes: &[u8], target: &mut [u8]) -> Result<(), DecodeError> {
        let elements = target.len() / 2;
        length(self, elements, bytes, self.bytes_max(DType::F32, elements))?;
        let (values, rest) = bytes.split_at(2 * elements);
        target[..2 * elements].copy_from_slice(values);
        padding(rest)
    }

    /// Decodes a stretch into raw memory of elements of this type, as [`Encoding::decode_rows`].
    /// Fails if the memory is not aligned for the type.
    pub fn decode_into(
        self,
        blocks: ScaleBlocks,
        dtype: DType,
        bytes: &[u8],
        target: &mut [u8],
    ) -> Result<(), DecodeError> {
        let unfit = DecodeError::Target { dtype, bytes: target.len() };
        match dtype {
            DType::F32 => match bytemuck::try_cast_slice_mut::<u8, f32>(target) {
                Ok(target) => self.decode_rows(blocks, bytes, target),
                Err(_) => Err(unfit),
            },
            DType::F64 => match bytemuck::try_cast_slice_mut::<u8, f64>(target) {
                Ok(target) => self.decode_rows(blocks, bytes, target),
                Err(_) => Err(unfit),
            },
            _ => Err(unfit),
        }
    }
}

/// Rejects padding that is not zero, so that a stretch has only one form.
pub(crate) fn padding(bytes: &[u8]) -> Result<(), DecodeError> {
    if bytes.iter().all(|&byte| byte == 0) { Ok(()) } else { Err(DecodeError::Padding) }
}
