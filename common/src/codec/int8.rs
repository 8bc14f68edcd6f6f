//! The encoding int8: for each block its scale, then one `i8` for each element, its multiple of the
//! scale. Zeros pad the stretch to a multiple of 8 bytes.
//!
//! The scale is the block's largest magnitude over 127. A block whose scale would be subnormal is
//! encoded as zeros.

use super::{DecodeError, Real, ScaleBlocks, padding};

/// The largest multiple.
const LEVELS: i8 = 127;

pub(super) const fn bytes(width: usize, blocks: ScaleBlocks, elements: usize) -> usize {
    (blocks.count(elements) * width + elements).next_multiple_of(8)
}

pub(super) fn encode<T: Real>(blocks: ScaleBlocks, values: &[T], mut out: &mut [u8]) {
    let mut rest = values;
    for length in blocks.lengths(values.len()) {
        let (values, later) = rest.split_at(length);
        let (head, tail) = std::mem::take(&mut out).split_at_mut(size_of::<T>());
        let (codes, tail) = tail.split_at_mut(length);
        rest = later;
        out = tail;
        let scale = scale(values);
        head.copy_from_slice(scale.to_bytes().as_ref());
        if scale > T::ZERO {
            for (code, &value) in codes.iter_mut().zip(values) {
                *code = (value / scale).to_i8().cast_unsigned();
            }
        }
    }
}

fn scale<T: Real>(values: &[T]) -> T {
    const LANES: usize = 16;
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::ZERO; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value.abs());
        }
    }
    let rest = rest.iter().map(|value| value.abs());
    let largest = lanes.into_iter().chain(rest).fold(T::ZERO, larger);
    let scale = largest / T::from_i8(LEVELS);
    if scale < T::NORMAL_MIN {
        return T::ZERO;
    }
    // A scale that was rounded up would decode the largest number as infinity.
    if (scale * T::from_i8(LEVELS)).is_finite() { scale } else { scale.next_down() }
}

pub(super) fn decode<T: Real>(
    blocks: ScaleBlocks,
    bytes: &[u8],
    target: &mut [T],
) -> Result<(), DecodeError> {
    let lengths = blocks.lengths(target.len());
    let mut rest = target;
    let mut bytes = bytes;
    for (block, length) in lengths.enumerate() {
        let (target, later) = std::mem::take(&mut rest).split_at_mut(length);
        let (head, tail) = bytes.split_at(size_of::<T>());
        let (codes, tail) = tail.split_at(length);
        rest = later;
        bytes = tail;
        let scale = T::from_bytes(head);
        if !scale.is_finite() || scale < T::ZERO {
            return Err(DecodeError::Scale { block, value: scale.to_f64() });
        }
        for (target, &code) in target.iter_mut().zip(codes) {
            *target = T::from_i8(code.cast_signed()) * scale;
        }
    }
    padding(bytes)
}
