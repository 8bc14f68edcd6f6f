//! The floating-point types of variables, as the rules compute with them.

use std::ops::{Add, Div, Mul, Sub};

/// A floating-point type. Every operation rounds as IEEE 754 requires and so gives the same bits on
/// every machine, except `pow`, whose last digit depends on the platform.
pub(super) trait OptimizerFloat:
    bytemuck::Pod
    + Into<f64>
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// The bits of a number without its sign. They are ordered as the numbers are.
    type Magnitude: Copy + Default + Ord;
    /// The magnitude of infinity. Those of NaN are larger.
    const INFINITE: Self::Magnitude;

    /// Rounds a number to this type.
    fn of(number: f64) -> Self;
    /// Returns the square root.
    fn sqrt(self) -> Self;
    /// Raises a non-negative number to a power.
    fn pow(self, exponent: Self) -> Self;
    /// Returns the absolute value.
    fn abs(self) -> Self;
    /// Returns the bits without the sign.
    fn magnitude(self) -> Self::Magnitude;

    /// Returns `self + factor * other`. If the factor is 0, returns `self` bit for bit, even if
    /// `other` is infinite or NaN.
    #[inline(always)]
    fn plus(self, factor: Self, other: Self) -> Self {
        if factor == Self::default() { self } else { self + factor * other }
    }
}

macro_rules! float {
    ($float:ident, $bits:ident) => {
        impl OptimizerFloat for $float {
            type Magnitude = $bits;
            const INFINITE: $bits = $float::INFINITY.to_bits().cast_signed();

            #[inline(always)]
            fn of(number: f64) -> Self {
                number as $float
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }

            #[inline(always)]
            fn pow(self, exponent: Self) -> Self {
                $float::powf(self, exponent)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $float::abs(self)
            }

            #[inline(always)]
            fn magnitude(self) -> $bits {
                $float::abs(self).to_bits().cast_signed()
            }
        }
    };
}
float!(f32, i32);
float!(f64, i64);
