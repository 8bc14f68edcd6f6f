//! The encodings f16 and bf16: 2 bytes an element, rounded to nearest, ties to even.
//!
//! A finite element beyond the largest finite number becomes that number. NaN and infinities are
//! kept.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{DecodeError, Real, padding};

/// Elements converted at a time, on the stack.
const CHUNK: usize = 256;

pub(super) fn encode_f16<T: Real>(values: &[T], out: &mut [u8]) {
    const LARGEST: f32 = 65504.0;
    let mut wide = [0f32; CHUNK];
    let mut halves = [f16::ZERO; CHUNK];
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(2 * CHUNK)) {
        for (wide, value) in wide.iter_mut().zip(values) {
            let value = value.to_odd_f32();
            *wide = if value.is_finite() { value.clamp(-LARGEST, LARGEST) } else { value };
        }
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(&wide[..values.len()]);
        for (out, half) in out.as_chunks_mut().0.iter_mut().zip(halves) {
            *out = half.to_le_bytes();
        }
    }
}

pub(super) fn decode_f16<T: Real>(bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
    let mut halves = [f16::ZERO; CHUNK];
    let mut wide = [0f32; CHUNK];
    for (target, bytes) in target.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let halves = &mut halves[..target.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        let wide = &mut wide[..target.len()];
        halves.convert_to_f32_slice(wide);
        for (target, wide) in target.iter_mut().zip(wide) {
            *target = T::from_f32(*wide);
        }
    }
    padding(&bytes[2 * target.len()..])
}

pub(super) fn encode_bf16<T: Real>(values: &[T], out: &mut [u8]) {
    for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *out = to_bf16(value.to_odd_f32()).to_le_bytes();
    }
}

pub(super) fn decode_bf16<T: Real>(bytes: &[u8], target: &mut [T]) -> Result<(), DecodeError> {
    for (target, bytes) in target.iter_mut().zip(bytes.as_chunks().0) {
        *target = T::from_f32(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
    }
    padding(&bytes[2 * target.len()..])
}

/// Rounds to bf16 without branches, so that the compiler vectorizes the loop over elements.
#[inline]
fn to_bf16(value: f32) -> u16 {
    const INFINITY: u32 = 0x7f80_0000;
    const LARGEST: u32 = 0x7f7f_0000;
    const QUIET: u32 = 0x0040_0000;
    let sign = value.to_bits() & 0x8000_0000;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let finite = magnitude.min(LARGEST);
    let rounded = finite + 0x7fff + (finite >> 16 & 1);
    let special = if magnitude > INFINITY { magnitude | QUIET } else { INFINITY };
    let found = if magnitude < INFINITY { rounded } else { special };
    ((sign | found) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// The conversion of the crate `half` rounds the same way, except that it overflows to
    /// infinity.
    #[test]
    fn bf16_rounds_to_nearest_and_saturates() {
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                let expected = match bf16::from_f32(value) {
                    found if found.is_infinite() && value > 0.0 && value.is_finite() => bf16::MAX,
                    found if found.is_infinite() && value.is_finite() => bf16::MIN,
                    found => found,
                };
                assert_eq!(to_bf16(value), expected.to_bits(), "{value:e}");
            }
        }
    }
}
