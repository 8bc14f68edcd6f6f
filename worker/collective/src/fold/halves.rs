//! The arithmetic of `f16` and `bf16` on their bits, without branches, so that loops over it are
//! vectorized for any processor.
//!
//! A sum is computed in `f32` and then rounded. Rounding twice gives the correctly rounded sum,
//! because the 24 bits of `f32` are at least two more than twice the 11 bits of `f16` or the 8 of
//! `bf16`.
//!
//! The slice conversions of the crate `half` need a function call for every 8 elements: as fast with
//! the instructions F16C as this arithmetic is with SSE2, and much slower without.

use pushpull_common::tensor::{bf16, f16};

const SIGN: u16 = 0x8000;

/// The smallest normal `f16`, 2^-14, as bits of an `f32`.
const F16_SMALLEST_NORMAL: u32 = 113 << 23;

/// The difference of the exponents' biases, 127 - 15, as bits of an `f32`.
const F16_BIAS: u32 = 112 << 23;

/// A type of 2 bytes, by its bits.
pub(super) trait HalfFloat {
    /// The bits of infinity. Those of greater magnitudes are NaN.
    const INFINITE: u16;
    /// The NaN of all results.
    const RESULT_NAN: u16;

    /// Returns the sum, rounded to nearest, ties to even.
    fn sum(a: u16, b: u16) -> u16;

    /// Returns the quotient of a number and at least 1, rounded to `f32`, then to this type.
    fn divided(number: u16, divisor: f32) -> u16;

    /// Returns the lesser number: NaN if one is, and -0 of two zeros of different sign.
    #[inline(always)]
    fn minimum_of(a: u16, b: u16) -> u16 {
        let least = ordered(ordered(a as i16).min(ordered(b as i16)));
        if Self::are_nan_bits(a) | Self::are_nan_bits(b) { Self::RESULT_NAN } else { least as u16 }
    }

    /// Returns the greater number: NaN if one is, and +0 of two zeros of different sign.
    #[inline(always)]
    fn maximum_of(a: u16, b: u16) -> u16 {
        let greatest = ordered(ordered(a as i16).max(ordered(b as i16)));
        if Self::are_nan_bits(a) | Self::are_nan_bits(b) {
            Self::RESULT_NAN
        } else {
            greatest as u16
        }
    }

    /// Returns whether these are the bits of a NaN.
    #[inline(always)]
    fn are_nan_bits(bits: u16) -> bool {
        bits & !SIGN > Self::INFINITE
    }
}

/// Converts the bits of numbers to integers in the order of the numbers, and back.
#[inline(always)]
fn ordered(bits: i16) -> i16 {
    bits ^ ((bits >> 15) & i16::MAX)
}

impl HalfFloat for bf16 {
    const INFINITE: u16 = 0x7f80;
    const RESULT_NAN: u16 = 0x7fc0;

    #[inline(always)]
    fn sum(a: u16, b: u16) -> u16 {
        round_to_bf16(widen_bf16(a) + widen_bf16(b))
    }

    #[inline(always)]
    fn divided(number: u16, divisor: f32) -> u16 {
        round_to_bf16(widen_bf16(number) / divisor)
    }
}

#[inline(always)]
fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
fn round_to_bf16(value: f32) -> u16 {
    let bits = if value.is_nan() { u32::from(bf16::RESULT_NAN) << 16 } else { value.to_bits() };
    // Half a unit of the last place rounds up; a little less keeps a tie at an even number.
    let half = 0x7fff + (bits >> 16 & 1);
    (bits.wrapping_add(half) >> 16) as u16
}

impl HalfFloat for f16 {
    const INFINITE: u16 = 0x7c00;
    const RESULT_NAN: u16 = 0x7e00;

    #[inline(always)]
    fn sum(a: u16, b: u16) -> u16 {
        let finite = round_to_f16(widen_f16(a) + widen_f16(b));
        let is_nan = Self::are_nan_bits(a)
            | Self::are_nan_bits(b)
            | ((a & !SIGN == Self::INFINITE) & (a ^ b == SIGN));
        let a_is_finite = a & !SIGN < Self::INFINITE;
        let b_is_finite = b & !SIGN < Self::INFINITE;
        let infinite = if a_is_finite { b } else { a };
        let special = if is_nan { Self::RESULT_NAN } else { infinite };
        if a_is_finite & b_is_finite { finite } else { special }
    }

    #[inline(always)]
    fn divided(number: u16, divisor: f32) -> u16 {
        let finite = round_to_f16(widen_f16(number) / divisor);
        let special = if Self::are_nan_bits(number) { Self::RESULT_NAN } else { number };
        if number & !SIGN < Self::INFINITE { finite } else { special }
    }
}

/// Returns the value of a finite `f16`. Other numbers give some finite value.
///
/// No operand is a subnormal `f32`: many processors take a hundred cycles for one.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    let magnitude = f32::from_bits((u32::from(bits & !SIGN) << 13) + F16_BIAS);
    // A subnormal has been given the first bit that only normal numbers have, and half its weight:
    // 2^-15 (1 + m) is to be 2^-14 m.
    let excess = magnitude - f32::from_bits(F16_SMALLEST_NORMAL);
    let excess = if excess < 0.0 { excess } else { 0.0 };
    let magnitude = magnitude + excess;
    f32::from_bits(magnitude.to_bits() | u32::from(bits & SIGN) << 16)
}

/// Rounds a number below 2^17 in magnitude to `f16`, to nearest, ties to even.
#[inline(always)]
fn round_to_f16(value: f32) -> u16 {
    // The power of two of the number, at least that of subnormals.
    let power = f32::from_bits(value.to_bits() & 0x7f80_0000);
    let smallest = f32::from_bits(F16_SMALLEST_NORMAL);
    let power = if power > smallest { power } else { smallest }.to_bits();
    // The last place of this summand is that of the result, so the addition rounds to it.
    let summand = power + (13 << 23);
    let rounded = (value.abs() + f32::from_bits(summand)).to_bits();
    // The first bit of a normal number, and a carry of the rounding, increase the exponent.
    let mantissa = rounded.wrapping_sub(summand);
    let exponent = power.wrapping_sub(F16_SMALLEST_NORMAL) >> 13;
    let magnitude = mantissa.wrapping_add(exponent) as i16;
    let magnitude = magnitude.min(f16::INFINITE as i16) as u16;
    magnitude | (value.to_bits() >> 16) as u16 & SIGN
}
