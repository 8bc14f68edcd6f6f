//! What gradients may be encoded as on their way: fewer bytes, for an error that is bounded.
//!
//! A [`Codec`] says how much is left out, an [`Encoding`] what the bytes are; several codecs may
//! share one. What is encoded at a time is a *stretch*: elements that follow each other in a
//! variable. A [`Residual`] keeps what a stretch left out and adds it to the next one, so that
//! nothing is lost for good. `docs/codecs.md` has the layouts, the bounds and when to use which.

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

pub use blocks::Blocks;
pub use encodings::Encodings;
use error::length;
pub use error::{CodecError, DecodeError, EncodeError};
pub use real::Real;
pub use residual::Residual;

use crate::finite::first_non_finite;
use crate::tensor::DType;

/// How a gradient is encoded: which of its bits are sent.
///
/// The bounds are for finite elements; *largest* is by magnitude.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Codec {
    /// IEEE 754 half precision, 2 bytes an element. An error of at most 2^-11 of the element, or
    /// 2^-25 below 2^-14. What is beyond 65504 becomes that.
    F16,
    /// The upper half of an f32, 2 bytes an element. An error of at most 2^-8 of the element, or
    /// 2^-134 below 2^-126. What is beyond its largest number becomes that.
    Bf16,
    /// A byte an element, and a scale for each block of [`BLOCK`], or for each row. An error of at most 1/254 of the
    /// block's largest element. Elements must be finite.
    Int8,
    /// A bit an element, and for each block of [`BLOCK`] the mean of the elements that are not
    /// negative and the mean of those that are: the block's sum stays. An error of less than the block's
    /// largest element. Elements must be finite.
    OneBit,
    /// The elements with the largest magnitudes as they are, and no others: index and value. The
    /// error is that of leaving out. Elements must be finite.
    TopK {
        /// The share of each stretch that is sent, above 0 and at most 1. It is rounded up to whole
        /// elements; of equal magnitudes the first go. Zeros are never sent.
        fraction: f64,
    },
    /// The elements of at least this magnitude as they are, and no others: index and value. The
    /// error is less than the magnitude. Elements must be finite.
    Threshold {
        /// The smallest magnitude that is sent; above 0.
        magnitude: f64,
    },
}

/// What the bytes of an encoded stretch are. Says all that is needed to decode them, with the
/// type and the number of the elements, and how rows lie in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Encoding {
    /// Of [`Codec::F16`].
    F16,
    /// Of [`Codec::Bf16`].
    Bf16,
    /// Of [`Codec::Int8`].
    Int8,
    /// Of [`Codec::OneBit`].
    OneBit,
    /// Of [`Codec::TopK`] and [`Codec::Threshold`].
    Pairs,
}

/// Elements that share a scale or a pair of means.
pub const BLOCK: usize = 256;

/// Elements that one stretch may have: what an index of 32 bits can tell apart.
pub const STRETCH_ELEMENTS_MAX: usize = u32::MAX as usize;

impl Codec {
    /// Whether it can be used.
    pub fn validate(&self) -> Result<(), CodecError> {
        let sound = match *self {
            Codec::TopK { fraction } => fraction > 0.0 && fraction <= 1.0,
            Codec::Threshold { magnitude } => magnitude > 0.0 && magnitude.is_finite(),
            _ => true,
        };
        if sound { Ok(()) } else { Err(CodecError::Parameter { codec: *self }) }
    }

    /// What its bytes are.
    pub fn encoding(&self) -> Encoding {
        match self {
            Codec::F16 => Encoding::F16,
            Codec::Bf16 => Encoding::Bf16,
            Codec::Int8 => Encoding::Int8,
            Codec::OneBit => Encoding::OneBit,
            Codec::TopK { .. } | Codec::Threshold { .. } => Encoding::Pairs,
        }
    }

    /// Appends a stretch, encoded, to `out`: at most [`Encoding::bytes_max`] of it, and always a
    /// multiple of 8 bytes. On an error `out` is as it was.
    ///
    /// What it leaves out is lost: gradients want [`Residual::encode`].
    pub fn encode<T: Real>(&self, values: &[T], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.encode_rows(Blocks::THROUGH, values, out)
    }

    /// The same for elements of rows, or of none.
    pub fn encode_rows<T: Real>(
        &self,
        blocks: Blocks,
        values: &[T],
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
        self.check(values)?;
        self.encode_checked(blocks, values, out);
        Ok(())
    }

    /// Why these values cannot be encoded, if they cannot.
    pub fn check<T: Real>(&self, values: &[T]) -> Result<(), EncodeError> {
        if values.len() > STRETCH_ELEMENTS_MAX {
            return Err(EncodeError::TooLong { elements: values.len() });
        }
        if self.encoding().takes_non_finite() {
            return Ok(());
        }
        match first_non_finite(T::DTYPE, bytemuck::cast_slice(values)) {
            None => Ok(()),
            Some((element, value)) => Err(EncodeError::NonFinite { codec: *self, element, value }),
        }
    }

    /// Encodes what `check` allows.
    fn encode_checked<T: Real>(&self, blocks: Blocks, values: &[T], out: &mut Vec<u8>) {
        let start = out.len();
        if self.encoding() != Encoding::Pairs {
            out.resize(start + self.encoding().rows_bytes_max(blocks, T::DTYPE, values.len()), 0);
        }
        match *self {
            Codec::F16 => half_floats::encode_f16(values, &mut out[start..]),
            Codec::Bf16 => half_floats::encode_bf16(values, &mut out[start..]),
            Codec::Int8 => int8::encode(blocks, values, &mut out[start..]),
            Codec::OneBit => one_bit::encode(values, &mut out[start..]),
            Codec::TopK { fraction } => pairs::encode_top(values, fraction, out),
            Codec::Threshold { magnitude } => pairs::encode_beyond(values, magnitude, out),
        }
    }
}

impl Encoding {
    /// Every encoding, in the order of their codes.
    pub const ALL: [Encoding; 5] =
        [Encoding::F16, Encoding::Bf16, Encoding::Int8, Encoding::OneBit, Encoding::Pairs];

    /// The code on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Encoding::F16 => 1,
            Encoding::Bf16 => 2,
            Encoding::Int8 => 3,
            Encoding::OneBit => 4,
            Encoding::Pairs => 5,
        }
    }

    /// The encoding a code stands for; `None` for a code this version does not know.
    pub fn from_code(code: u8) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| encoding.code() == code)
    }

    /// What elements of a type travel as if servers keep them in another, [`DType::master`]: nothing is
    /// lost on the way there.
    pub const fn of_type(dtype: DType) -> Option<Encoding> {
        match dtype {
            DType::F16 => Some(Encoding::F16),
            DType::Bf16 => Some(Encoding::Bf16),
            _ => None,
        }
    }

    /// The codec of values: those that encode each element by itself, whatever it is, are for them.
    pub const fn codec_of_values(self) -> Option<Codec> {
        match self {
            Encoding::F16 => Some(Codec::F16),
            Encoding::Bf16 => Some(Codec::Bf16),
            _ => None,
        }
    }

    /// Whether gradients of rows may travel so. What the others leave out is of the size of what they
    /// send, and is made good with the next gradient: of a row, that may never come.
    pub const fn is_for_rows(self) -> bool {
        matches!(self, Encoding::F16 | Encoding::Bf16 | Encoding::Int8)
    }

    /// Whether NaN and infinities come out as they went in.
    pub const fn takes_non_finite(self) -> bool {
        matches!(self, Encoding::F16 | Encoding::Bf16)
    }

    /// The bytes of an encoded stretch of so many elements of a float type: exactly so many, and at
    /// most so many of [`Encoding::Pairs`].
    pub const fn bytes_max(self, dtype: DType, elements: usize) -> usize {
        self.rows_bytes_max(Blocks::THROUGH, dtype, elements)
    }

    /// The same for elements of rows, or of none.
    pub const fn rows_bytes_max(self, blocks: Blocks, dtype: DType, elements: usize) -> usize {
        let width = dtype.size();
        match self {
            Encoding::F16 | Encoding::Bf16 => (2 * elements).next_multiple_of(8),
            Encoding::Int8 => int8::bytes(width, blocks, elements),
            Encoding::OneBit => one_bit::bytes(width, elements),
            Encoding::Pairs => pairs::bytes(width, elements),
        }
    }

    /// Decodes a stretch into `target`, which has its elements. On an error `target` is of whatever
    /// content.
    ///
    /// The bytes may be anything: nothing is believed, and nothing allocated. What comes out may
    /// be NaN or infinite where the encoding has room for that.
    pub fn decode<T: Real>(self, bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
        self.decode_rows(Blocks::THROUGH, bytes, target)
    }

    /// The same for elements of rows, or of none.
    pub fn decode_rows<T: Real>(
        self,
        blocks: Blocks,
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

    /// Takes a stretch of elements whose type this is ([`Encoding::of_type`]) as it came into memory of
    /// that type. The bytes may be anything, as those of [`Encoding::decode`].
    pub fn take(self, bytes: &[u8], target: &mut [u8]) -> Result<(), DecodeError> {
        let elements = target.len() / 2;
        length(self, elements, bytes, self.bytes_max(DType::F32, elements))?;
        let (values, rest) = bytes.split_at(2 * elements);
        target[..2 * elements].copy_from_slice(values);
        padding(rest)
    }

    /// Decodes a stretch of elements of this type into their memory; as [`Encoding::decode_rows`].
    /// The memory is aligned for the type.
    pub fn decode_into(
        self,
        blocks: Blocks,
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

/// Refuses padding that is not zero: so a stretch has one form only.
pub(crate) fn padding(bytes: &[u8]) -> Result<(), DecodeError> {
    if bytes.iter().all(|&byte| byte == 0) { Ok(()) } else { Err(DecodeError::Padding) }
}
