//! The mean of gradients, each times a factor.

use std::ops::{AddAssign, DivAssign};

use pushpull_common::tensor::{DType, Element};

/// A type whose elements can be averaged.
pub(super) trait Mean: Element + AddAssign + DivAssign {
    /// A count in this type.
    fn of(count: u32) -> Self;

    /// The number times a factor, which is multiplied in `f64` as workers do it; the same bits if the
    /// factor is 1.
    fn times(self, factor: f64) -> Self;
}

impl Mean for f32 {
    fn of(count: u32) -> f32 {
        count as f32
    }

    #[inline(always)]
    fn times(self, factor: f64) -> f32 {
        (f64::from(self) * factor) as f32
    }
}

impl Mean for f64 {
    fn of(count: u32) -> f64 {
        count.into()
    }

    #[inline(always)]
    fn times(self, factor: f64) -> f64 {
        self * factor
    }
}

/// The sum of gradients of one length, each times its factor, added up in this order, over `count`; in
/// words, as it is aligned for every type.
pub(super) fn mean<'a>(
    dtype: DType,
    gradients: &[(&[u8], f64)],
    count: u32,
    words: &'a mut Vec<u64>,
) -> &'a [u8] {
    let Some((first, _)) = gradients.first() else { return &[] };
    words.resize(words.len().max(first.len().div_ceil(8)), 0);
    let mean = &mut bytemuck::cast_slice_mut(words)[..first.len()];
    match dtype {
        DType::F32 => mean_as::<f32>(gradients, count, bytemuck::cast_slice_mut(mean)),
        DType::F64 => mean_as::<f64>(gradients, count, bytemuck::cast_slice_mut(mean)),
        _ => unreachable!("only floating-point variables are trainable"),
    }
    mean
}

fn mean_as<T: Mean>(gradients: &[(&[u8], f64)], count: u32, mean: &mut [T]) {
    for (index, &(gradient, factor)) in gradients.iter().enumerate() {
        add(mean, bytemuck::cast_slice(gradient), factor, index == 0);
    }
    if count > 1 {
        mean.iter_mut().for_each(|sum| *sum /= T::of(count));
    }
}

/// Adds a gradient times its factor to a sum, or begins the sum with it.
pub(super) fn add<T: Mean>(sum: &mut [T], gradient: &[T], factor: f64, begins: bool) {
    let both = sum.iter_mut().zip(gradient);
    match (begins, factor == 1.0) {
        (true, true) => both.for_each(|(sum, &g)| *sum = g),
        (true, false) => both.for_each(|(sum, &g)| *sum = g.times(factor)),
        (false, true) => both.for_each(|(sum, &g)| *sum += g),
        (false, false) => both.for_each(|(sum, &g)| *sum += g.times(factor)),
    }
}
