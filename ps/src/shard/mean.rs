//! The mean of gradients, each times a factor.

use std::ops::{Add, AddAssign, Div, DivAssign, Mul};

use pushpull_common::tensor::{DType, Element};

/// A type whose elements can be averaged.
pub(super) trait Mean:
    Element + Add<Output = Self> + AddAssign + Mul<Output = Self> + Div<Output = Self> + DivAssign
{
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
/// given; over a count, once all of them have been.
pub(super) struct Sum<'a> {
    dtype: DType,
    sum: &'a mut [u8],
    begins: bool,
    /// How many gradients are still to come, and what the sum is divided by with the last of them.
    left: usize,
    over: u32,
}

impl<'a> Sum<'a> {
    /// Of so many gradients, over a count, in this memory, which is aligned for their type.
    pub(super) fn new(dtype: DType, gradients: usize, over: u32, sum: &'a mut [u8]) -> Sum<'a> {
        Sum { dtype, sum, begins: true, left: gradients, over }
    }

    /// Where the next gradient is to be copied, as it is the first and stays as it is; otherwise it is to be
    /// added.
    pub(super) fn beginning(&mut self, factor: f64) -> Option<&mut [u8]> {
        let stays = self.begins && factor == 1.0 && (self.left > 1 || self.over == 1);
        stays.then_some(&mut *self.sum)
    }

    /// Adds what a gradient has from some byte of them on.
    pub(super) fn add(&mut self, at: usize, gradient: &[u8], factor: f64) {
        let sum = &mut self.sum[at..at + gradient.len()];
        let over = if self.left > 1 { 1 } else { self.over };
        match self.dtype {
            DType::F32 => add_bytes::<f32>(sum, gradient, factor, self.begins, over),
            DType::F64 => add_bytes::<f64>(sum, gradient, factor, self.begins, over),
            _ => unreachable!("only floating-point variables are trainable"),
        }
    }

    /// All of a gradient has been added.
    pub(super) fn next(&mut self) {
        self.begins = false;
        self.left -= 1;
    }
}

fn add_bytes<T: Mean>(sum: &mut [u8], gradient: &[u8], factor: f64, begins: bool, over: u32) {
    let (sum, gradient) = (bytemuck::cast_slice_mut(sum), bytemuck::cast_slice(gradient));
    match over {
        1 => add::<T>(sum, gradient, factor, begins),
        _ => add_last::<T>(sum, gradient, factor, begins, over),
    }
}

/// Adds the last gradient times its factor to a sum, or begins the sum with it, and divides.
fn add_last<T: Mean>(sum: &mut [T], gradient: &[T], factor: f64, begins: bool, over: u32) {
    let count = T::of(over);
    let both = sum.iter_mut().zip(gradient);
    match (begins, factor == 1.0) {
        (true, _) => both.for_each(|(sum, &g)| *sum = g.times(factor) / count),
        // The same bits, as the part is a power of two, and a division takes several times as long.
        (false, true) if over.is_power_of_two() => {
            let part = T::of(1) / count;
            both.for_each(|(sum, &g)| *sum = (*sum + g) * part);
        }
        (false, true) => both.for_each(|(sum, &g)| *sum = (*sum + g) / count),
        (false, false) => both.for_each(|(sum, &g)| *sum = (*sum + g.times(factor)) / count),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What a mean is by its definition: added up in order, then divided.
    fn plain<T: Mean>(gradients: &[Vec<T>], factors: &[f64], over: u32) -> Vec<T> {
        (0..gradients[0].len())
            .map(|at| {
                let each = || gradients.iter().zip(factors).map(|(g, &factor)| g[at].times(factor));
                let first = each().next().unwrap();
                each().skip(1).fold(first, |sum, g| sum + g) / T::of(over)
            })
            .collect()
    }

    fn check<T: Mean>(dtype: DType, number: impl Fn(usize, usize) -> T) {
        let mut words = Vec::new();
        for count in 1..6 {
            for over in [1, count as u32, 7] {
                for odd in [None, Some(0), Some(count - 1)] {
                    let factors: Vec<f64> =
                        (0..count).map(|at| if odd == Some(at) { 0.3 } else { 1.0 }).collect();
                    let gradients: Vec<Vec<T>> =
                        (0..count).map(|g| (0..37).map(|at| number(g, at)).collect()).collect();
                    let bytes = std::mem::size_of_val(&gradients[0][..]);
                    words.resize(bytes.div_ceil(8), 0_u64);
                    let mean: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
                    let mut sum = Sum::new(dtype, count, over, mean);
                    for (gradient, &factor) in gradients.iter().zip(&factors) {
                        let input: &[u8] = bytemuck::cast_slice(gradient);
                        // It comes in pieces of any length.
                        let (first, second) = input.split_at(8 * 5);
                        if let Some(begun) = sum.beginning(factor) {
                            begun.copy_from_slice(input);
                        } else {
                            sum.add(0, first, factor);
                            sum.add(first.len(), second, factor);
                        }
                        sum.next();
                    }
                    let plain = plain(&gradients, &factors, over);
                    let plain: &[u8] = bytemuck::cast_slice(&plain);
                    assert!(mean == plain, "{count} over {over}, {odd:?} times 0.3");
                }
            }
        }
    }

    #[test]
    fn a_mean_has_the_bits_of_its_definition() {
        // Some of them so small that they lose bits when they are halved.
        let small = |g: usize, at: usize| 2f64.powi(-3 * (at as i32 % 50)) * (1.0 + g as f64 / 3.0);
        check::<f32>(DType::F32, |g, at| small(g, at) as f32);
        check::<f64>(DType::F64, |g, at| small(g, at) * 2f64.powi(-900));
    }
}
