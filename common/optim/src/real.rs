//! Element types that can be summed and averaged.

use std::ops::AddAssign;

use pushpull_common::tensor::Element;

/// An element type of gradients: `f32` or `f64`. The trait is sealed.
pub trait Summand: Element + AddAssign + sealed::SealedSummand {
    /// Divides this number by `count`. The count is rounded to the type first, which is exact up to
    /// 2^24 for `f32` and 2^53 for `f64`.
    fn over(self, count: u64) -> Self;
}

impl Summand for f32 {
    fn over(self, count: u64) -> f32 {
        self / count as f32
    }
}

impl Summand for f64 {
    fn over(self, count: u64) -> f64 {
        self / count as f64
    }
}

/// Adds `other` to `sum`, element by element. Both must have the same length.
pub(super) fn add<T: Summand>(sum: &mut [T], other: &[T]) {
    for (sum, &other) in sum.iter_mut().zip(other) {
        *sum += other;
    }
}

mod sealed {
    pub trait SealedSummand {}
    impl SealedSummand for f32 {}
    impl SealedSummand for f64 {}
}
