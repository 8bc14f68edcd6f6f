//! Error feedback: what an encoding leaves out is added to what is encoded next.

use super::{Blocks, Codec, EncodeError, Real};

/// What has been left out of a variable's gradients so far and not been made good yet.
///
/// Each stretch is encoded of the sum of its elements and what is left of them, and what that leaves
/// out is left for the next time (Seide et al. 2014; S. P. Karimireddy, Q. Rebjock, S. Stich,
/// M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019). So the
/// sum of all that was decoded is the sum of all that was given, less what is left now, but for the
/// rounding of one addition and one subtraction each time: however many steps there were, it is off
/// by the error of one.
///
/// It belongs to whoever encodes, and holds one element for each of the variable's. It depends on
/// what it was given alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual<T> {
    left: Vec<T>,
    /// What the other side makes of a stretch, and memory to encode it with.
    decoded: Vec<T>,
}

impl<T: Real> Residual<T> {
    /// Nothing is left of so many elements.
    pub fn new(elements: usize) -> Residual<T> {
        Residual::from_left(vec![T::ZERO; elements])
    }

    /// This is left.
    pub fn from_left(left: Vec<T>) -> Residual<T> {
        Residual { left, decoded: Vec::new() }
    }

    /// Puts what is left of other elements in place of what is left of these, and the other way round:
    /// for whoever keeps it elsewhere between two stretches. Costs nothing.
    pub fn swap_left(&mut self, left: &mut Vec<T>) {
        std::mem::swap(&mut self.left, left);
    }

    /// What is left of each element.
    pub fn left(&self) -> &[T] {
        &self.left
    }

    /// Appends a stretch, with what is left of it, encoded, to `out`, as [`Codec::encode_rows`]. On an
    /// error nothing has changed. Takes four passes over the stretch.
    ///
    /// A sum beyond the largest finite number becomes that. Nothing is left of an element that is
    /// NaN or infinite, where the codec takes it.
    ///
    /// # Panics
    /// If the stretch, from element `first` on, reaches beyond the elements.
    pub fn encode(
        &mut self,
        codec: &Codec,
        blocks: Blocks,
        first: usize,
        values: &[T],
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
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
            .expect("what has just been encoded is decoded");
        for (left, &decoded) in left.iter_mut().zip(&self.decoded) {
            let rest = *left - decoded;
            *left = if rest.is_finite() { rest } else { T::ZERO };
        }
        Ok(())
    }
}
