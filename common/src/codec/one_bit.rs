//! The encoding onebit: for each block of 256 elements two means and one bit an element.
//!
//! A block starts with the mean of the elements that are not negative, then the mean of the
//! negative ones. Words of 64 bits follow, lowest bit first; 1 is not negative. Bits beyond the
//! last element are 0.
//!
//! F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its Application
//! to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014, with blocks instead of
//! columns. Training does not converge without the residual.

use super::{BLOCK, DecodeError, Real};

const WORD: usize = 64;
/// Elements processed side by side.
const LANES: usize = 8;

pub(super) const fn bytes(width: usize, elements: usize) -> usize {
    elements.div_ceil(BLOCK) * 2 * width + elements.div_ceil(WORD) * (WORD / 8)
}

pub(super) fn encode<T: Real>(values: &[T], out: &mut [u8]) {
    let width = size_of::<T>();
    for (values, out) in values.chunks(BLOCK).zip(out.chunks_mut(bytes(width, BLOCK))) {
        let (head, words) = out.split_at_mut(2 * width);
        let mut above = 0;
        for (word, values) in words.as_chunks_mut().0.iter_mut().zip(values.chunks(WORD)) {
            let bits = bits(values);
            above += u64::from(bits.count_ones());
            *word = bits.to_le_bytes();
        }
        let [sum_above, sum_below] = shares(values);
        let below = values.len() as u64 - above;
        for (head, (share, count)) in
            head.chunks_mut(width).zip([(sum_above, above), (sum_below, below)])
        {
            // The sum of no elements is 0, and so is its mean.
            let mean = T::saturating_from(share * (BLOCK as f64 / count.max(1) as f64));
            head.copy_from_slice(mean.to_bytes().as_ref());
        }
    }
}

/// Returns a bit mask of the elements that are not negative; at most 64 elements.
fn bits<T: Real>(values: &[T]) -> u64 {
    let (bytes, rest) = values.as_chunks::<LANES>();
    let byte = |values: &[T; LANES]| {
        let mut byte = 0;
        for (lane, &value) in values.iter().enumerate() {
            byte |= u8::from(value >= T::ZERO) << lane;
        }
        u64::from(byte)
    };
    let word = bytes.iter().rev().fold(0, |word, values| word << LANES | byte(values));
    rest.iter()
        .zip(LANES * bytes.len()..)
        .fold(word, |word, (&value, at)| word | u64::from(value >= T::ZERO) << at)
}

/// Returns the sums of the non-negative and of the negative elements of a block, over [`BLOCK`].
///
/// The division keeps each sum within the largest element. The order of summation is fixed.
fn shares<T: Real>(values: &[T]) -> [f64; 2] {
    const SHARE: f64 = 1.0 / BLOCK as f64;
    let mut above = [0f64; LANES];
    let mut below = [0f64; LANES];
    let mut add = |values: &[T; LANES]| {
        for lane in 0..LANES {
            let share = values[lane].to_f64() * SHARE;
            above[lane] += if share >= 0.0 { share } else { 0.0 };
            below[lane] += if share >= 0.0 { 0.0 } else { share };
        }
    };
    let (chunks, rest) = values.as_chunks::<LANES>();
    chunks.iter().for_each(&mut add);
    let mut last = [T::ZERO; LANES];
    last[..rest.len()].copy_from_slice(rest);
    add(&last);
    [above.iter().sum(), below.iter().sum()]
}

pub(super) fn decode<T: Real>(bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
    let width = size_of::<T>();
    let blocks = target.chunks_mut(BLOCK).zip(bytes.chunks(self::bytes(width, BLOCK)));
    for (block, (target, bytes)) in blocks.enumerate() {
        let (head, words) = bytes.split_at(2 * width);
        let above = T::from_bytes(head);
        let below = T::from_bytes(&head[width..]);
        let scale = |value: T| DecodeError::Scale { block, value: value.to_f64() };
        if !above.is_finite() || above < T::ZERO {
            return Err(scale(above));
        }
        if !below.is_finite() || below > T::ZERO {
            return Err(scale(below));
        }
        for (target, word) in target.chunks_mut(WORD).zip(words.as_chunks().0) {
            let word = u64::from_le_bytes(*word);
            for (at, target) in target.iter_mut().enumerate() {
                *target = if word >> at & 1 == 1 { above } else { below };
            }
            if target.len() < WORD && word >> target.len() != 0 {
                return Err(DecodeError::Padding);
            }
        }
    }
    Ok(())
}
