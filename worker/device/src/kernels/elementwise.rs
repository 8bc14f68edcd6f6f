//! Operations on each element, and sums.

use crate::device::Device;
use crate::error::{ComputeError, check_length};

/// Elements of one part of an elementwise operation. The parts of a sum, and with them its
/// rounding, follow from this number alone.
pub(crate) const ELEMENTS_AT_ONCE: usize = 1 << 15;

/// Rows of one part of an operation on rows.
pub(crate) const ROWS_AT_ONCE: usize = 64;

impl Device {
    /// Adds `factor * x` to `y`.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `x` does not have the length of `y`. The same holds for the
    /// other operations on two slices.
    pub fn axpy(&self, factor: f32, x: &[f32], y: &mut [f32]) -> Result<(), ComputeError> {
        self.combine("axpy", x, y, |x, y| factor * x + y)
    }

    /// Adds `x` to `y`.
    ///
    /// # Errors
    /// As [`Device::axpy`].
    pub fn add(&self, x: &[f32], y: &mut [f32]) -> Result<(), ComputeError> {
        self.combine("add", x, y, |x, y| y + x)
    }

    /// Multiplies `y` by `x`.
    ///
    /// # Errors
    /// As [`Device::axpy`].
    pub fn mul(&self, x: &[f32], y: &mut [f32]) -> Result<(), ComputeError> {
        self.combine("mul", x, y, |x, y| y * x)
    }

    /// Divides `y` by `x`.
    ///
    /// # Errors
    /// As [`Device::axpy`].
    pub fn div(&self, x: &[f32], y: &mut [f32]) -> Result<(), ComputeError> {
        self.combine("div", x, y, |x, y| y / x)
    }

    fn combine(
        &self,
        kernel: &'static str,
        x: &[f32],
        y: &mut [f32],
        combine: impl Fn(f32, f32) -> f32 + Sync,
    ) -> Result<(), ComputeError> {
        check_length(kernel, "x", x.len(), y.len())?;
        self.pool().for_chunks(y, ELEMENTS_AT_ONCE, |chunk, y| {
            let x = &x[chunk * ELEMENTS_AT_ONCE..];
            y.iter_mut().zip(x).for_each(|(y, &x)| *y = combine(x, *y));
        });
        Ok(())
    }

    /// Multiplies `values` by `factor`.
    pub fn scale(&self, factor: f32, values: &mut [f32]) {
        self.pool().for_chunks(values, ELEMENTS_AT_ONCE, |_, values| {
            values.iter_mut().for_each(|value| *value *= factor);
        });
    }

    /// Returns the sum, which is accumulated in `f64`.
    pub fn sum(&self, values: &[f32]) -> f64 {
        let mut partial = vec![0.0; values.len().div_ceil(ELEMENTS_AT_ONCE)];
        self.pool().for_chunks(&mut partial, 1, |chunk, partial| {
            let values = &values[chunk * ELEMENTS_AT_ONCE..];
            let values = &values[..values.len().min(ELEMENTS_AT_ONCE)];
            partial[0] = sum_of(values);
        });
        partial.iter().sum()
    }

    /// Returns the mean; NaN of nothing.
    pub fn mean(&self, values: &[f32]) -> f64 {
        self.sum(values) / values.len() as f64
    }

    /// Calls `compute` with each chunk of [`ROWS_AT_ONCE`] rows of two matrices.
    pub(crate) fn for_row_chunks(
        &self,
        columns: usize,
        first: &mut [f32],
        second: &mut [f32],
        compute: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        self.for_pairs(ROWS_AT_ONCE * columns, first, ROWS_AT_ONCE * columns, second, compute);
    }

    /// Calls `compute` with each chunk of [`ROWS_AT_ONCE`] rows, and a row of `partial`.
    pub(crate) fn for_row_chunk_sums(
        &self,
        columns: usize,
        rows: &mut [f32],
        partial: &mut [f32],
        compute: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        self.for_pairs(ROWS_AT_ONCE * columns, rows, columns, partial, compute);
    }

    /// Calls `compute` with each pair of chunks of two slices.
    pub(crate) fn for_pairs<A: Send, B: Send>(
        &self,
        first_length: usize,
        first: &mut [A],
        second_length: usize,
        second: &mut [B],
        compute: impl Fn(usize, &mut [A], &mut [B]) + Sync,
    ) {
        let second = second.chunks_mut(second_length.max(1));
        let first = first.chunks_mut(first_length.max(1));
        let mut pairs: Vec<_> = first.zip(second).collect();
        self.pool().for_chunks(&mut pairs, 1, |index, pairs| {
            let (first, second) = &mut pairs[0];
            compute(index, first, second);
        });
    }
}

/// Sums in `f64`, with several sums at once for the vector unit.
fn sum_of(values: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0_f64; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(|&value| f64::from(value)).sum();
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, &value)| *sum += f64::from(value));
    }
    sums.iter().sum::<f64>() + rest
}

/// Writes the sum of all rows of a matrix. The row width is the length of `sum`.
pub(crate) fn sum_rows_of(matrix: &[f32], sum: &mut [f32]) {
    sum.fill(0.0);
    if !sum.is_empty() {
        for row in matrix.chunks_exact(sum.len()) {
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, random};

    #[test]
    fn elements_are_combined_on_any_number_of_threads() {
        let count = 2 * ELEMENTS_AT_ONCE + 17;
        let (x, before) = (random(1, count), random(2, count));
        type Kernel = fn(&Device, &[f32], &mut [f32]) -> Result<(), ComputeError>;
        type Combine = fn(f32, f32) -> f32;
        let cases: [(&str, Kernel, Combine); 5] = [
            ("axpy", |device, x, y| device.axpy(-0.5, x, y), |x, y| -0.5 * x + y),
            ("add", Device::add, |x, y| y + x),
            ("mul", Device::mul, |x, y| y * x),
            ("div", Device::div, |x, y| y / x),
            (
                "scale",
                |device, _, y| {
                    device.scale(3.0, y);
                    Ok(())
                },
                |_, y| 3.0 * y,
            ),
        ];
        for threads in 1..=3 {
            let device = Device::cpu_threads(threads).unwrap();
            for (name, kernel, expected) in cases {
                let mut y = before.clone();
                kernel(&device, &x, &mut y).unwrap();
                let expected = x.iter().zip(&before).map(|(&x, &y)| expected(x, y));
                assert!(y.iter().copied().eq(expected), "{name} on {threads} threads");
                kernel(&device, &[], &mut []).unwrap();
            }
            let error = device.mul(&x[..3], &mut [0.0; 4]).unwrap_err();
            assert_eq!(error.to_string(), "mul needs 4 elements of x, not 3");
        }
    }

    #[test]
    fn sums_are_accumulated_in_f64_in_one_order() {
        let values = random(3, 3 * ELEMENTS_AT_ONCE + 5);
        let exact: f64 = values.iter().map(|&value| f64::from(value)).sum();
        let one = Device::cpu_threads(1).unwrap();
        assert_close(one.sum(&values), exact, 1e-12);
        assert_close(one.mean(&values), exact / values.len() as f64, 1e-12);
        for threads in 2..=4 {
            assert!(Device::cpu_threads(threads).unwrap().sum(&values) == one.sum(&values));
        }
        // A sum in f32 would stop at 2^24.
        let ones = vec![1.0; (1 << 24) + 3];
        assert_eq!(one.sum(&ones), f64::from((1 << 24) + 3));
        assert!(one.sum(&[]) == 0.0 && one.mean(&[]).is_nan());
    }
}
