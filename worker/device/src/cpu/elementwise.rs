//! Operations on each element, and sums, on the threads of a pool.

use super::pool::{ELEMENTS_AT_ONCE, ThreadPool};

/// Rows of one part of an operation on rows.
pub(crate) const ROWS_AT_ONCE: usize = 64;

impl ThreadPool {
    /// Replaces each element of `y` by `combine(x, y)`.
    pub(crate) fn combine(
        &self,
        x: &[f32],
        y: &mut [f32],
        combine: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        self.for_chunks(y, ELEMENTS_AT_ONCE, |chunk, y| {
            let x = &x[chunk * ELEMENTS_AT_ONCE..];
            y.iter_mut().zip(x).for_each(|(y, &x)| *y = combine(x, *y));
        });
    }

    pub(crate) fn scale(&self, factor: f32, values: &mut [f32]) {
        self.for_chunks(values, ELEMENTS_AT_ONCE, |_, values| {
            values.iter_mut().for_each(|value| *value *= factor);
        });
    }

    pub(crate) fn sum(&self, values: &[f32]) -> f64 {
        let mut partial = vec![0.0; values.len().div_ceil(ELEMENTS_AT_ONCE)];
        self.for_chunks(&mut partial, 1, |chunk, partial| {
            let values = &values[chunk * ELEMENTS_AT_ONCE..];
            let values = &values[..values.len().min(ELEMENTS_AT_ONCE)];
            partial[0] = sum_of(values);
        });
        partial.iter().sum()
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
        self.for_chunks(&mut pairs, 1, |index, pairs| {
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
