//! The numbers that can be encoded.

use std::ops::{Add, Div, Mul, Sub};

use crate::tensor::Element;

/// An element of a gradient: `f32` or `f64`. No other type can be one.
pub trait Real:
    Element
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + sealed::Sealed
{
}

impl Real for f32 {}
impl Real for f64 {}

pub(super) mod sealed {
    /// What the codecs need of a number, and nobody else.
    pub trait Sealed: Copy {
        /// As bytes, little-endian.
        type Bytes: AsRef<[u8]>;
        /// A magnitude as an integer, of the same order.
        type Magnitude: Copy + Ord + Default + bytemuck::Pod;

        /// 0.
        const ZERO: Self;
        /// The largest finite number.
        const MAX: Self;
        /// The smallest number of full precision.
        const NORMAL_MIN: Self;

        fn to_bytes(self) -> Self::Bytes;
        /// Reads the first bytes of a slice that has enough.
        fn from_bytes(bytes: &[u8]) -> Self;
        /// The nearest number; beyond the largest finite one that.
        fn saturating_from(value: f64) -> Self;
        /// Exact.
        fn to_f64(self) -> f64;
        /// Exact.
        fn from_f32(value: f32) -> Self;
        /// As an f32 that rounds to any shorter float as the number itself would. What is finite
        /// stays so.
        fn to_odd_f32(self) -> f32;
        fn abs(self) -> Self;
        fn is_finite(self) -> bool;
        /// The magnitude of a number that is not NaN.
        fn magnitude(self) -> Self::Magnitude;
        /// The number, if it is finite, or the largest finite one of its sign.
        fn saturated(self) -> Self;
        /// The next smaller number.
        fn next_down(self) -> Self;
        fn from_i8(value: i8) -> Self;
        /// The nearest integer, ties to even, of a number of at most 127.5 in magnitude.
        fn to_i8(self) -> i8;
    }

    macro_rules! real {
        ($float:ident, $bits:ident, $odd:expr) => {
            impl Sealed for $float {
                type Bytes = [u8; size_of::<$float>()];
                type Magnitude = $bits;

                const ZERO: $float = 0.0;
                const MAX: $float = $float::MAX;
                const NORMAL_MIN: $float = $float::MIN_POSITIVE;

                #[inline]
                fn to_bytes(self) -> Self::Bytes {
                    self.to_le_bytes()
                }

                #[inline]
                fn from_bytes(bytes: &[u8]) -> $float {
                    let mut own = [0; size_of::<$float>()];
                    own.copy_from_slice(&bytes[..size_of::<$float>()]);
                    $float::from_le_bytes(own)
                }

                #[inline]
                fn saturating_from(value: f64) -> $float {
                    (value as $float).saturated()
                }

                #[inline]
                fn to_f64(self) -> f64 {
                    self.into()
                }

                #[inline]
                fn from_f32(value: f32) -> $float {
                    value.into()
                }

                #[inline]
                fn to_odd_f32(self) -> f32 {
                    $odd(self)
                }

                #[inline]
                fn abs(self) -> $float {
                    $float::abs(self)
                }

                #[inline]
                fn is_finite(self) -> bool {
                    $float::is_finite(self)
                }

                #[inline]
                fn magnitude(self) -> $bits {
                    self.to_bits() & ($bits::MAX >> 1)
                }

                #[inline]
                fn saturated(self) -> $float {
                    self.clamp($float::MIN, $float::MAX)
                }

                #[inline]
                fn next_down(self) -> $float {
                    $float::next_down(self)
                }

                #[inline]
                fn from_i8(value: i8) -> $float {
                    value.into()
                }

                #[inline]
                fn to_i8(self) -> i8 {
                    // In the sum the unit is the last place: the addition rounds, and the integer
                    // stands in the lowest bits. Other ways are a call for each element where the
                    // processor is only known to have SSE2.
                    const SHIFT: $float = 1.5 / $float::EPSILON;
                    (self + SHIFT).to_bits() as i8
                }
            }
        };
    }
    real!(f32, u32, std::convert::identity);
    real!(f64, u64, odd);

    /// Rounds towards zero, and sets the last bit if that was not exact ("round to odd"): so a tie that
    /// is none is not taken for one when it is rounded again. S. Boldo, G. Melquiond, "Emulation of
    /// FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    #[inline]
    fn odd(value: f64) -> f32 {
        let largest = f64::from(f32::MAX);
        let bounded = if value.is_finite() { value.clamp(-largest, largest) } else { value };
        let nearest = bounded as f32;
        let wide = f64::from(nearest);
        let down = nearest.to_bits().wrapping_sub(u32::from(wide.abs() > bounded.abs()));
        // A NaN is unequal to itself, and stays one with its last bit set.
        let inexact = u32::from(wide != bounded);
        f32::from_bits(down | inexact)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn what_is_rounded_to_odd_rounds_right() {
            // Between the f16 1 and 1 + 2^-10, a little above the middle: less than f32 can tell.
            let above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
            assert_eq!(above as f32, 1.0 + 2f32.powi(-11), "the nearest f32 is the middle");
            assert_eq!(odd(above), 1.0 + 2f32.powi(-11) + f32::EPSILON);
            assert_eq!(odd(-above), -odd(above));
            assert_eq!(odd(2f64.powi(-300)), f32::from_bits(1));
            assert_eq!((odd(1e300), odd(f64::NEG_INFINITY)), (f32::MAX, f32::NEG_INFINITY));
            assert_eq!(odd(-0.0).to_bits(), (-0f32).to_bits());
            assert!(odd(f64::NAN).is_nan());
        }

        #[test]
        fn integers_are_rounded_to_even() {
            for (value, rounded) in [(126.6, 127), (-127.0, -127), (2.5, 2), (-3.5, -4), (-0.2, 0)]
            {
                assert_eq!((value as f32).to_i8(), rounded);
                assert_eq!(value.to_i8(), rounded);
            }
        }
    }
}
