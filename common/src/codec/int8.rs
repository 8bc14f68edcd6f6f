//! A byte an element: for each block of 256 its scale, then an `i8` for each element, which is its
//! multiple of the scale. Padded with zeros to a multiple of 8 bytes.
//!
//! The scale is the largest magnitude over 127. A block whose scale is too small to have its full
//! precision is of zeros.

use super::{BLOCK, DecodeError, Real, padding};

/// The largest multiple.
const LEVELS: i8 = 127;

pub(super) const fn bytes(width: usize, elements: usize) -> usize {
    (elements.div_ceil(BLOCK) * width + elements).next_multiple_of(8)
}

pub(super) fn encode<T: Real>(values: &[T], out: &mut [u8]) {
    let width = size_of::<T>();
    for (values, out) in values.chunks(BLOCK).zip(out.chunks_mut(width + BLOCK)) {
        let scale = scale(values);
        let (head, codes) = out.split_at_mut(width);
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
    // Rounded up, the largest number would decode as infinite.
    if (scale * T::from_i8(LEVELS)).is_finite() { scale } else { scale.next_down() }
}

pub(super) fn decode<T: Real>(bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
    let width = size_of::<T>();
    let blocks = target.chunks_mut(BLOCK).zip(bytes.chunks(width + BLOCK));
    for (block, (target, bytes)) in blocks.enumerate() {
        let (head, codes) = bytes.split_at(width);
        let scale = T::from_bytes(head);
        if !scale.is_finite() || scale < T::ZERO {
            return Err(DecodeError::Scale { block, value: scale.to_f64() });
        }
        for (target, &code) in target.iter_mut().zip(codes) {
            *target = T::from_i8(code.cast_signed()) * scale;
        }
    }
    padding(&bytes[target.len().div_ceil(BLOCK) * width + target.len()..])
}
