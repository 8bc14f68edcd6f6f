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

/// The sum of gradients of one length, each times its factor, added up in the order in which they are
/// given, and what it is over their count.
pub(super) struct Sum<'a> {
    dtype: DType,
    /// In words, as it is aligned for every type.
    sum: &'a mut [u8],
    begins: bool,
}

impl<'a> Sum<'a> {
    /// Of gradients of so many bytes.
    pub(super) fn new(dtype: DType, bytes: usize, words: &'a mut Vec<u64>) -> Sum<'a> {
        words.resize(words.len().max(bytes.div_ceil(8)), 0);
        Sum { dtype, sum: &mut bytemuck::cast_slice_mut(words)[..bytes], begins: true }
    }

    /// Adds what a gradient has from some byte of them on.
    pub(super) fn add(&mut self, at: usize, gradient: &[u8], factor: f64) {
        let sum = &mut self.sum[at..at + gradient.len()];
        match self.dtype {
            DType::F32 => add_bytes::<f32>(sum, gradient, factor, self.begins),
            DType::F64 => add_bytes::<f64>(sum, gradient, factor, self.begins),
            _ => unreachable!("only floating-point variables are trainable"),
        }
    }

    /// All of a gradient has been added.
    pub(super) fn next(&mut self) {
        self.begins = false;
    }

    /// The sum over this count.
    pub(super) fn over(self, count: u32) -> &'a [u8] {
        match self.dtype {
            DType::F32 => divide::<f32>(self.sum, count),
            DType::F64 => divide::<f64>(self.sum, count),
            _ => unreachable!("only floating-point variables are trainable"),
        }
        self.sum
    }
}

fn add_bytes<T: Mean>(sum: &mut [u8], gradient: &[u8], factor: f64, begins: bool) {
    add::<T>(bytemuck::cast_slice_mut(sum), bytemuck::cast_slice(gradient), factor, begins);
}

fn divide<T: Mean>(sum: &mut [u8], count: u32) {
    if count > 1 {
        bytemuck::cast_slice_mut(sum).iter_mut().for_each(|sum: &mut T| *sum /= T::of(count));
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
