//! The float types that can be encoded.

use std::ops::{Add, Div, Mul, Sub};

use crate::tensor::Element;

/// The type of a gradient element: `f32` or `f64`. The trait is sealed.
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
    /// The operations that the codecs need.
    pub trait Sealed: Copy {
        /// The little-endian bytes of a number.
        type Bytes: AsRef<[u8]>;
        /// The magnitude as an integer, in the same order.
        type Magnitude: Copy + Ord + Default + bytemuck::Pod;

        /// 0.
        const ZERO: Self;
        /// The largest finite number.
        const MAX: Self;
        /// The smallest normal number, that is, of full precision.
        const NORMAL_MIN: Self;

        fn to_bytes(self) -> Self::Bytes;
        /// Reads a number from the first bytes of a slice that is long enough.
        fn from_bytes(bytes: &[u8]) -> Self;
        /// Returns the nearest number, or the largest finite one if `value` is beyond it.
        fn saturating_from(value: f64) -> Self;
        /// Converts exactly.
        fn to_f64(self) -> f64;
        /// Converts exactly.
        fn from_f32(value: f32) -> Self;
        /// Rounds to odd, to an f32 that rounds to any shorter float exactly as the number itself
        /// would. Finite numbers stay finite.
        fn to_odd_f32(self) -> f32;
        fn abs(self) -> Self;
        fn is_finite(self) -> bool;
        /// Returns the magnitude of a number that is not NaN.
        fn magnitude(self) -> Self::Magnitude;
        /// Returns the number if it is finite, otherwise the largest finite number of its sign.
        fn saturated(self) -> Self;
        /// Returns the next smaller number.
        fn next_down(self) -> Self;
        fn from_i8(value: i8) -> Self;
        /// Returns the nearest integer, ties to even; the magnitude must be at most 127.5.
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
                    // The unit in the last place of the sum is 1: the addition rounds and leaves
                    // the integer in the lowest bits. Other ways call a function for each element
                    // on targets with only SSE2.
                    const SHIFT: $float = 1.5 / $float::EPSILON;
                    (self + SHIFT).to_bits() as i8
                }
            }
        };
    }
    real!(f32, u32, std::convert::identity);
    real!(f64, u64, odd);

    /// Rounds towards zero and sets the last bit if that was inexact ("round to odd"). A second
    /// rounding then never sees a false tie. S. Boldo, G. Melquiond, "Emulation of FMA and
    /// correctly rounded sums: proved algorithms using rounding to odd", 2008.
    #[inline]
    fn odd(value: f64) -> f32 {
        let largest = f64::from(f32::MAX);
        let bounded = if value.is_finite() { value.clamp(-largest, largest) } else { value };
        let nearest = bounded as f32;
        let wide = f64::from(nearest);
        let down = nearest.to_bits().wrapping_sub(u32::from(wide.abs() > bounded.abs()));
        // A NaN is unequal to itself, and remains NaN with its last bit set.
        let inexact = u32::from(wide != bounded);
        f32::from_bits(down | inexact)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn rounding_to_odd_avoids_double_rounding() {
            // Above the midpoint of the f16 numbers 1 and 1 + 2^-10, by less than an f32 can
            // express.
            let above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
            assert_eq!(above as f32, 1.0 + 2f32.powi(-11), "the nearest f32 is the midpoint");
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
