//! The weighted mean of gradients.

use std::ops::{Add, AddAssign, Div, DivAssign, Mul};

use pushpull_common::tensor::{DType, Element};

/// An element type whose values can be averaged.
pub(in crate::shard) trait MeanElement:
    Element + Add<Output = Self> + AddAssign + Mul<Output = Self> + Div<Output = Self> + DivAssign
{
    /// Converts a count to this type.
    fn of(count: u32) -> Self;

    /// Multiplies by a factor, in `f64` as workers do. Keeps the bits if the factor is 1.
    fn times(self, factor: f64) -> Self;
}

impl MeanElement for f32 {
    fn of(count: u32) -> f32 {
        count as f32
    }

    #[inline(always)]
    fn times(self, factor: f64) -> f32 {
        (f64::from(self) * factor) as f32
    }
}

impl MeanElement for f64 {
    fn of(count: u32) -> f64 {
        count.into()
    }

    #[inline(always)]
    fn times(self, factor: f64) -> f64 {
        self * factor
    }
}

/// The weighted sum of gradients of one length, added in the order given, and divided by a count
/// with the last of them.
pub(in crate::shard) struct Sum<'a> {
    dtype: DType,
    sum: &'a mut [u8],
    is_first: bool,
    /// The gradients still to be added, and the divisor that is applied with the last of them.
    remaining: usize,
    divisor: u32,
}

impl<'a> Sum<'a> {
    /// Starts a sum of `gradients` gradients divided by `divisor`. The memory must be aligned for
    /// `dtype`.
    pub(in crate::shard) fn new(
        dtype: DType,
        gradients: usize,
        divisor: u32,
        sum: &'a mut [u8],
    ) -> Sum<'a> {
        Sum { dtype, sum, is_first: true, remaining: gradients, divisor }
    }

    /// Returns the memory to copy the next gradient to, if it is the first and enters the sum
    /// unchanged. Otherwise call [`Sum::add`].
    pub(in crate::shard) fn copy_target(&mut self, factor: f64) -> Option<&mut [u8]> {
        let stays = self.is_first && factor == 1.0 && (self.remaining > 1 || self.divisor == 1);
        stays.then_some(&mut *self.sum)
    }

    /// Adds a piece of the current gradient that starts at byte `at`.
    pub(in crate::shard) fn add(&mut self, at: usize, gradient: &[u8], factor: f64) {
        let sum = &mut self.sum[at..at + gradient.len()];
        let divisor = if self.remaining > 1 { 1 } else { self.divisor };
        match self.dtype {
            DType::F32 => add_bytes::<f32>(sum, gradient, factor, self.is_first, divisor),
            DType::F64 => add_bytes::<f64>(sum, gradient, factor, self.is_first, divisor),
            _ => unreachable!("only floating-point variables are trainable"),
        }
    }

    /// Ends the current gradient.
    pub(in crate::shard) fn end_gradient(&mut self) {
        self.is_first = false;
        self.remaining -= 1;
    }
}

fn add_bytes<T: MeanElement>(
    sum: &mut [u8],
    gradient: &[u8],
    factor: f64,
    is_first: bool,
    divisor: u32,
) {
    let sum = bytemuck::cast_slice_mut(sum);
    let gradient = bytemuck::cast_slice(gradient);
    match divisor {
        1 => add::<T>(sum, gradient, factor, is_first),
        _ => add_last::<T>(sum, gradient, factor, is_first, divisor),
    }
}

/// Adds the last gradient times its factor to a sum, or starts the sum with it, and divides.
fn add_last<T: MeanElement>(
    sum: &mut [T],
    gradient: &[T],
    factor: f64,
    is_first: bool,
    divisor: u32,
) {
    let count = T::of(divisor);
    let both = sum.iter_mut().zip(gradient);
    match (is_first, factor == 1.0) {
        (true, _) => both.for_each(|(sum, &g)| *sum = g.times(factor) / count),
        // The reciprocal of a power of two gives the same bits, and a division takes several times
        // as long.
        (false, true) if divisor.is_power_of_two() => {
            let part = T::of(1) / count;
            both.for_each(|(sum, &g)| *sum = (*sum + g) * part);
        }
        (false, true) => both.for_each(|(sum, &g)| *sum = (*sum + g) / count),
        (false, false) => both.for_each(|(sum, &g)| *sum = (*sum + g.times(factor)) / count),
    }
}

/// Adds a gradient times its factor to a sum, or starts the sum with it.
pub(in crate::shard) fn add<T: MeanElement>(
    sum: &mut [T],
    gradient: &[T],
    factor: f64,
    is_first: bool,
) {
    let both = sum.iter_mut().zip(gradient);
    match (is_first, factor == 1.0) {
        (true, true) => both.for_each(|(sum, &g)| *sum = g),
        (true, false) => both.for_each(|(sum, &g)| *sum = g.times(factor)),
        (false, true) => both.for_each(|(sum, &g)| *sum += g),
        (false, false) => both.for_each(|(sum, &g)| *sum += g.times(factor)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean by its definition: the sum in order, then divided.
    fn plain<T: MeanElement>(gradients: &[Vec<T>], factors: &[f64], divisor: u32) -> Vec<T> {
        (0..gradients[0].len())
            .map(|at| {
                let each = || gradients.iter().zip(factors).map(|(g, &factor)| g[at].times(factor));
                let first = each().next().unwrap();
                each().skip(1).fold(first, |sum, g| sum + g) / T::of(divisor)
            })
            .collect()
    }

    fn check<T: MeanElement>(dtype: DType, number: impl Fn(usize, usize) -> T) {
        let mut words = Vec::new();
        for count in 1..6 {
            for divisor in [1, count as u32, 7] {
                for odd in [None, Some(0), Some(count - 1)] {
                    let factors: Vec<f64> =
                        (0..count).map(|at| if odd == Some(at) { 0.3 } else { 1.0 }).collect();
                    let gradients: Vec<Vec<T>> =
                        (0..count).map(|g| (0..37).map(|at| number(g, at)).collect()).collect();
                    let bytes = std::mem::size_of_val(&gradients[0][..]);
                    words.resize(bytes.div_ceil(8), 0_u64);
                    let mean: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
                    let mut sum = Sum::new(dtype, count, divisor, mean);
                    for (gradient, &factor) in gradients.iter().zip(&factors) {
                        let input: &[u8] = bytemuck::cast_slice(gradient);
                        // The gradient arrives in pieces of any length.
                        let (first, second) = input.split_at(8 * 5);
                        if let Some(begun) = sum.copy_target(factor) {
                            begun.copy_from_slice(input);
                        } else {
                            sum.add(0, first, factor);
                            sum.add(first.len(), second, factor);
                        }
                        sum.end_gradient();
                    }
                    let plain = plain(&gradients, &factors, divisor);
                    let plain: &[u8] = bytemuck::cast_slice(&plain);
                    assert!(
                        mean == plain,
                        "{count} gradients over {divisor}, gradient {odd:?} times 0.3"
                    );
                }
            }
        }
    }

    #[test]
    fn a_mean_has_the_bits_of_its_definition() {
        // Some values are so small that halving loses bits.
        let small = |g: usize, at: usize| 2f64.powi(-3 * (at as i32 % 50)) * (1.0 + g as f64 / 3.0);
        check::<f32>(DType::F32, |g, at| small(g, at) as f32);
        check::<f64>(DType::F64, |g, at| small(g, at) * 2f64.powi(-900));
    }
}
