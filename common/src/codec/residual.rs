//! Error feedback: the error of one encoding is added to the next gradient.

use std::ops::Range;

use super::{Codec, CodecError, Real, ScaleBlocks};

/// The accumulated encoding error of a variable's gradients, one element for each of the
/// variable's.
///
/// A stretch is encoded from the sum of its elements and their residual; the error of that encoding
/// is the new residual (Seide et al. 2014; S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi,
/// "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019). The sum of
/// all decoded gradients is therefore the sum of all given gradients less the current residual, up
/// to the rounding of one addition and one subtraction each time. The error does not grow with the
/// number of steps.
///
/// The encoding side owns the residual. It depends only on the gradients it was given.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual<T> {
    left: Vec<T>,
    /// The decoded form of a stretch; also scratch memory for the encoder.
    decoded: Vec<T>,
}

impl<T: Real> Residual<T> {
    /// Creates a residual of zeros.
    pub fn new(elements: usize) -> Residual<T> {
        Residual::from_left(vec![T::ZERO; elements])
    }

    /// Creates a residual from stored values.
    pub fn from_left(left: Vec<T>) -> Residual<T> {
        Residual { left, decoded: Vec::new() }
    }

    /// Swaps the residual values with `left`, for callers that keep them elsewhere between two
    /// stretches. Costs nothing.
    pub fn swap_left(&mut self, left: &mut Vec<T>) {
        std::mem::swap(&mut self.left, left);
    }

    /// Returns the residual of each element.
    pub fn left(&self) -> &[T] {
        &self.left
    }

    /// Encodes the sum of a stretch and its residual and appends it to `out`, as
    /// [`Codec::encode_rows`]. On an error nothing has changed. Takes four passes over the stretch.
    ///
    /// A sum beyond the largest finite number becomes that number. An element that is NaN or
    /// infinite leaves no residual, where the codec accepts it.
    ///
    /// # Panics
    /// If the stretch, starting at element `first`, exceeds the residual.
    pub fn encode(
        &mut self,
        codec: &Codec,
        blocks: ScaleBlocks,
        first: usize,
        values: &[T],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        codec.check(values)?;
        for (left, &value) in self.left[first..first + values.len()].iter_mut().zip(values) {
            let sum = (*left + value).saturated();
            *left = if value.is_finite() { sum } else { value };
        }
        self.encode_left(codec, blocks, first..first + values.len(), out);
        Ok(())
    }

    /// Encodes the sum of a stretch, its residual and `others`, the decoded sum of the same stretch
    /// of other ranks; otherwise as [`Residual::encode`]. So the error of a sum that several ranks
    /// encode one after the other is kept where it arises.
    ///
    /// # Panics
    /// If the stretch exceeds the residual, or `others` has fewer elements.
    pub fn encode_onto(
        &mut self,
        codec: &Codec,
        first: usize,
        values: &[T],
        others: &[T],
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        codec.check(values)?;
        codec.check(others)?;
        let others = &others[..values.len()];
        let left = &mut self.left[first..first + values.len()];
        for ((left, &value), &others) in left.iter_mut().zip(values).zip(others) {
            let sum = ((*left + value).saturated() + others).saturated();
            let is_finite = value.is_finite() && others.is_finite();
            *left = if is_finite { sum } else { value + others };
        }
        self.encode_left(codec, ScaleBlocks::THROUGH, first..first + values.len(), out);
        Ok(())
    }

    /// Encodes these elements of the residual and keeps what the encoding leaves out.
    fn encode_left(
        &mut self,
        codec: &Codec,
        blocks: ScaleBlocks,
        stretch: Range<usize>,
        out: &mut Vec<u8>,
    ) {
        let left = &mut self.left[stretch];
        let start = out.len();
        codec.encode_checked(blocks, left, &mut self.decoded, out);
        self.decoded.resize(left.len(), T::ZERO);
        codec
            .encoding()
            .decode_rows(blocks, &out[start..], &mut self.decoded)
            .expect("an encoded stretch decodes");
        for (left, &decoded) in left.iter_mut().zip(&self.decoded) {
            let rest = *left - decoded;
            *left = if rest.is_finite() { rest } else { T::ZERO };
        }
    }
}
