//! Error feedback: the error of one encoding is added to the next gradient.

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
        let left = &mut self.left[first..first + values.len()];
        for (left, &value) in left.iter_mut().zip(values) {
            let sum = (*left + value).saturated();
            *left = if value.is_finite() { sum } else { value };
        }
        let start = out.len();
        codec.encode_checked(blocks, left, &mut self.decoded, out);
        self.decoded.resize(values.len(), T::ZERO);
        codec
            .encoding()
            .decode_rows(blocks, &out[start..], &mut self.decoded)
            .expect("an encoded stretch decodes");
        for (left, &decoded) in left.iter_mut().zip(&self.decoded) {
            let rest = *left - decoded;
            *left = if rest.is_finite() { rest } else { T::ZERO };
        }
        Ok(())
    }
}
