//! Encoded reductions: a tensor as stretches that travel in a codec, and what a rank adds to each.
//!
//! An encoded stretch is the element of such a reduction: all stretches have as many bytes, so the
//! passes, the parts and their order are those of plain elements. Only the fold differs. It decodes
//! the sum of the ranks before, adds the rank's own elements and its residual, and encodes the
//! result. What that leaves out stays in the rank's residual. Each rank encodes each element once
//! in an operation, so over all ranks
//!
//! > decoded sum = sum of contributions + residuals before - residuals after,
//!
//! up to the rounding of `f32` or `f64`. The bytes that a rank sends are those of an all-reduce of
//! the encoded tensor. Two other designs were considered:
//!
//! - *Gather the encoded contributions, and add them up on each rank*: fewer roundings, and n-1
//!   times the encoded tensor for each rank instead of 2(n-1)/n times. A half type would cost more
//!   than no codec from five ranks on.
//! - *Reduce elements of a half type*: as many bytes, but the roundings of partial sums are lost,
//!   and no other codec works.

#[cfg(test)]
mod tests;

use std::ops::Range;

use pushpull_common::codec::{BLOCK, Codec, DecodeError, Real, Residual};
use pushpull_common::error::Chain;
use pushpull_common::tensor::DType;

/// The most elements of a stretch. The fold of one takes tens of microseconds.
const STRETCH_ELEMENTS_MAX: usize = 16 << 10;

/// A tensor, cut into stretches that have equally many bytes when they are encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stretches {
    codec: Codec,
    dtype: DType,
    /// The elements of the tensor.
    elements: usize,
    /// The elements of each stretch but the last.
    length: usize,
}

impl Stretches {
    /// Cuts a tensor for this many ranks: each gets a share, unless the tensor is short.
    pub(crate) fn new(codec: Codec, dtype: DType, elements: usize, ranks: u32) -> Stretches {
        let share = elements.div_ceil(ranks.max(1) as usize).next_multiple_of(BLOCK);
        let length = share.clamp(BLOCK, STRETCH_ELEMENTS_MAX);
        Stretches { codec, dtype, elements, length }
    }

    /// Returns the codec.
    pub(crate) fn codec(&self) -> Codec {
        self.codec
    }

    /// Returns the number of stretches.
    pub(crate) fn count(&self) -> usize {
        self.elements.div_ceil(self.length)
    }

    /// Returns the bytes of an encoded stretch, at most 256 KiB.
    pub(crate) fn width(&self) -> usize {
        self.codec.bytes_max(self.dtype, self.length)
    }

    /// Returns the elements of a stretch.
    fn elements(&self, stretch: usize) -> Range<usize> {
        let start = stretch * self.length;
        start..self.elements.min(start + self.length)
    }
}

/// The share of a rank in encoded stretches.
pub(crate) trait Contribution: Send {
    /// Adds the rank's own elements to stretches: `others` has the sums of the ranks before, `sums`
    /// gets the result. `bytes` is the place of both among the bytes of all stretches.
    ///
    /// # Errors
    /// `others` does not decode: what is wrong with it.
    fn add(&mut self, bytes: Range<usize>, others: &[u8], sums: &mut [u8]) -> Result<(), String>;
}

/// The elements of one rank, with the residual that their encodings leave.
#[derive(Debug)]
pub(crate) struct OwnElements<'a, T> {
    stretches: Stretches,
    values: &'a mut [T],
    residual: &'a mut Residual<T>,
    /// The decoded sum of the ranks before.
    others: Vec<T>,
    encoded: Vec<u8>,
}

impl<'a, T: Real> OwnElements<'a, T> {
    /// The contribution of a rank. `residual` has as many elements as `values`; these can be
    /// encoded ([`Codec::check`]).
    pub(crate) fn new(
        stretches: Stretches,
        values: &'a mut [T],
        residual: &'a mut Residual<T>,
    ) -> OwnElements<'a, T> {
        OwnElements { stretches, values, residual, others: Vec::new(), encoded: Vec::new() }
    }

    /// Encodes the stretches whose sums begin with this rank.
    ///
    /// # Errors
    /// The elements cannot be encoded.
    pub(crate) fn begin(&mut self, bytes: Range<usize>, sums: &mut [u8]) -> Result<(), String> {
        self.encode(bytes, None, sums)
    }

    /// Replaces the elements by the sum of all ranks, from its encoded stretches.
    ///
    /// # Errors
    /// They do not decode: what is wrong with them.
    pub(crate) fn finish(self, sums: &[u8]) -> Result<(), String> {
        let OwnElements { stretches, values, .. } = self;
        for (stretch, encoded) in sums.chunks_exact(stretches.width()).enumerate() {
            let sum = &mut values[stretches.elements(stretch)];
            decode(stretches.codec, encoded, sum).map_err(|fault| at(stretch, &fault))?;
            // An honest rank has encoded finite elements, unless the codec takes others.
            let finite = stretches.codec.check(sum);
            finite.map_err(|error| at(stretch, &Chain(&error).to_string()))?;
        }
        Ok(())
    }

    /// Encodes the sums of stretches with this rank's elements; `others` has the ranks before.
    fn encode(
        &mut self,
        bytes: Range<usize>,
        others: Option<&[u8]>,
        sums: &mut [u8],
    ) -> Result<(), String> {
        let Stretches { codec, .. } = self.stretches;
        let width = self.stretches.width();
        for (nth, sum) in sums.chunks_exact_mut(width).enumerate() {
            let stretch = bytes.start / width + nth;
            let elements = self.stretches.elements(stretch);
            let first = elements.start;
            let values = &self.values[elements];
            self.others.clear();
            self.others.resize(values.len(), T::zeroed());
            if let Some(others) = others {
                decode(codec, &others[nth * width..][..width], &mut self.others)
                    .map_err(|fault| at(stretch, &fault))?;
            }
            self.encoded.clear();
            // Refuses sums that are not finite, which no honest rank has encoded.
            self.residual
                .encode_onto(&codec, first, values, &self.others, &mut self.encoded)
                .map_err(|error| at(stretch, &Chain(&error).to_string()))?;
            let (encoded, padding) = sum.split_at_mut(self.encoded.len());
            encoded.copy_from_slice(&self.encoded);
            padding.fill(0);
        }
        Ok(())
    }
}

impl<T: Real + Send> Contribution for OwnElements<'_, T> {
    fn add(&mut self, bytes: Range<usize>, others: &[u8], sums: &mut [u8]) -> Result<(), String> {
        self.encode(bytes, Some(others), sums)
    }
}

/// Decodes a stretch of another rank, which may have sent anything.
fn decode<T: Real>(codec: Codec, encoded: &[u8], target: &mut [T]) -> Result<(), String> {
    let text = |error: DecodeError| Chain(&error).to_string();
    codec.encoding().decode_padded(encoded, target).map_err(text)
}

fn at(stretch: usize, fault: &str) -> String {
    format!("encoded stretch {stretch}: {fault}")
}
