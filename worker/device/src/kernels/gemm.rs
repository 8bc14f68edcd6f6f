//! Matrix products.

use crate::device::Device;
use crate::error::{ComputeError, check_length};

const NAME: &str = "multiply";

/// A matrix over borrowed values.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    /// Distance in values between rows, and between columns.
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// Creates the `rows` x `columns` matrix that is stored in `values` row by row.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if there are not exactly `rows * columns` values.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Result<Matrix<'a>, ComputeError> {
        let expected = rows.saturating_mul(columns);
        check_length(NAME, "a matrix", values.len(), expected)?;
        Ok(Matrix { values, rows, columns, strides: (columns, 1) })
    }

    /// Returns the transposed matrix over the same values. Copies nothing.
    pub fn transposed(self) -> Matrix<'a> {
        let (row, column) = self.strides;
        Matrix { rows: self.columns, columns: self.rows, strides: (column, row), ..self }
    }

    /// Returns the part of the matrix with these rows and columns.
    fn part(self, rows: Span, columns: Span) -> Matrix<'a> {
        let first = match rows.length > 0 && columns.length > 0 {
            true => rows.start * self.strides.0 + columns.start * self.strides.1,
            // An empty part has no first value.
            false => 0,
        };
        let values = &self.values[first..];
        Matrix { values, rows: rows.length, columns: columns.length, ..self }
    }
}

/// Consecutive rows or columns.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    length: usize,
}

impl Span {
    fn all(length: usize) -> Span {
        Span { start: 0, length }
    }

    /// Returns part `index` of a range that is cut every `step`.
    fn part(length: usize, step: usize, index: usize) -> Span {
        let start = index * step;
        Span { start, length: step.min(length - start) }
    }
}

/// The memory of a product. Its parts are written at the same time.
#[derive(Clone, Copy)]
struct Product {
    values: *mut f32,
    /// Distance in values between rows.
    stride: usize,
}

// SAFETY: Each thread writes a part of its own. See `Device::multiply`.
unsafe impl Send for Product {}
// SAFETY: As above.
unsafe impl Sync for Product {}

/// Parts start at multiples of this, so that they consist of the same tiles as the whole. The sides
/// of all tiles of `matrixmultiply` divide it: they are 4, 8 or 16.
const PART_STEP: usize = 16;

/// Operations (multiply and add) below which one thread is faster than two.
const PARALLEL_MIN: usize = 1 << 21;

impl Device {
    /// Writes `a * b + beta * product` to `product`, which is stored row by row. With a `beta` of 0
    /// the previous contents are ignored, even NaN.
    ///
    /// Cost: `2 * a.rows * a.columns * b.columns` operations.
    ///
    /// # Errors
    /// [`ComputeError::Inner`] if the columns of `a` are not as many as the rows of `b`;
    /// [`ComputeError::Length`] if `product` does not have `a.rows * b.columns` elements.
    pub fn multiply(
        &self,
        a: Matrix<'_>,
        b: Matrix<'_>,
        beta: f32,
        product: &mut [f32],
    ) -> Result<(), ComputeError> {
        let (rows, inner, columns) = (a.rows, a.columns, b.columns);
        if inner != b.rows {
            return Err(ComputeError::Inner { columns: inner, rows: b.rows });
        }
        let expected = rows.saturating_mul(columns);
        check_length(NAME, "the product", product.len(), expected)?;
        let product = Product { values: product.as_mut_ptr(), stride: columns };
        let threads = match rows.saturating_mul(inner).saturating_mul(columns) >= PARALLEL_MIN {
            true => self.threads(),
            false => 1,
        };
        let step = rows.max(columns).div_ceil(threads).next_multiple_of(PART_STEP).max(1);
        let parts = rows.max(columns).div_ceil(step);
        self.pool().run(parts, &|index| {
            let (row_part, column_part) = match rows >= columns {
                true => (Span::part(rows, step, index), Span::all(columns)),
                false => (Span::all(rows), Span::part(columns, step, index)),
            };
            let a = a.part(row_part, Span::all(inner));
            let b = b.part(Span::all(inner), column_part);
            // SAFETY: `product` has rows * columns values, is borrowed mutably by this call, and
            // outlives it. No other index has a row and a column of this part.
            unsafe { multiply_part(a, b, beta, product, row_part.start, column_part.start) };
        });
        Ok(())
    }
}

/// Multiplies into the part of `product` that starts at a row and a column.
///
/// # Safety
///
/// The part of `a.rows` rows and `b.columns` columns lies within the product, and no other thread
/// accesses it meanwhile.
unsafe fn multiply_part(
    a: Matrix<'_>,
    b: Matrix<'_>,
    beta: f32,
    product: Product,
    row: usize,
    column: usize,
) {
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    // SAFETY: The pointers and strides stay within the three slices.
    // - A matrix is a whole slice or a part of one, and its fields are private. Its strides reach
    //   only values of its rows and columns.
    // - The caller guarantees that the part of the product lies within it and is not shared, so it
    //   overlaps neither `a` nor `b`.
    // - No offset overflows: a slice has at most isize::MAX bytes, and a stride that is multiplied
    //   by anything but 0 is at most the number of values.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            1.0,
            a.values.as_ptr(),
            a.strides.0 as isize,
            a.strides.1 as isize,
            b.values.as_ptr(),
            b.strides.0 as isize,
            b.strides.1 as isize,
            beta,
            product.values.add(row * product.stride + column),
            product.stride as isize,
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::testing::{assert_close, random};

    const A: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    const B: [f32; 6] = [1.0, 0.0, -1.0, 2.0, 3.0, 1.0];

    fn matrix(values: &[f32], rows: usize, columns: usize) -> Matrix<'_> {
        Matrix::new(values, rows, columns).unwrap()
    }

    #[test]
    fn products_match_those_computed_by_hand() {
        let device = Device::cpu_threads(2).unwrap();
        let mut product = [f32::NAN; 4];
        device.multiply(matrix(&A, 2, 3), matrix(&B, 3, 2), 0.0, &mut product).unwrap();
        assert_eq!(product, [8.0, 7.0, 17.0, 16.0]);
        device.multiply(matrix(&A, 2, 3), matrix(&B, 3, 2), 1.0, &mut product).unwrap();
        assert_eq!(product, [16.0, 14.0, 34.0, 32.0]);
        let (left, right) = (matrix(&A, 3, 2), matrix(&B, 2, 3));
        device.multiply(left.transposed(), right.transposed(), 0.0, &mut product).unwrap();
        assert_eq!(product, [-4.0, 16.0, -4.0, 22.0]);
        device.multiply(matrix(&[], 2, 0), matrix(&[], 0, 2), 0.0, &mut product).unwrap();
        assert_eq!(product, [0.0; 4]);
        for (rows, columns) in [(0, 3), (3, 0)] {
            let (left, right) = ([1.0; 6], [1.0; 6]);
            let (left, right) = (&left[..rows * 2], &right[..columns * 2]);
            let (left, right) = (matrix(left, rows, 2), matrix(right, 2, columns));
            device.multiply(left, right, 0.0, &mut []).unwrap();
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let device = Device::cpu_threads(1).unwrap();
        let length = |argument, found, expected| ComputeError::Length {
            kernel: "multiply",
            argument,
            found,
            expected,
        };
        assert_eq!(Matrix::new(&A, 2, 4).unwrap_err(), length("a matrix", 6, 8));
        let huge = Matrix::new(&A, usize::MAX, 2).unwrap_err();
        assert_eq!(huge, length("a matrix", 6, usize::MAX));
        let mut product = [7.0; 6];
        let inner = device.multiply(matrix(&A, 2, 3), matrix(&B, 2, 3), 0.0, &mut product);
        assert_eq!(inner, Err(ComputeError::Inner { columns: 3, rows: 2 }));
        let short = device.multiply(matrix(&A, 2, 3), matrix(&B, 3, 2), 0.0, &mut product[..3]);
        assert_eq!(short, Err(length("the product", 3, 4)));
        assert_eq!(product, [7.0; 6]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        /// Sizes around the step of parts, and thread counts that cut them differently.
        #[test]
        fn products_are_right_and_equal_for_any_number_of_threads(
            rows in 1_usize..300,
            inner in 1_usize..300,
            columns in 1_usize..300,
            transposed in any::<[bool; 2]>(),
            beta in prop::sample::select(vec![0.0_f32, 1.0, -0.5]),
            seed in any::<u64>(),
        ) {
            let (a, b) = (random(seed, rows * inner), random(seed ^ 1, inner * columns));
            let oriented = |values, rows, columns, is_transposed| match is_transposed {
                true => matrix(values, columns, rows).transposed(),
                false => matrix(values, rows, columns),
            };
            let a = oriented(&a, rows, inner, transposed[0]);
            let b = oriented(&b, inner, columns, transposed[1]);
            let before = random(seed ^ 2, rows * columns);
            let on = |threads| {
                let mut product = match beta == 0.0 {
                    true => vec![f32::NAN; rows * columns],
                    false => before.clone(),
                };
                let device = Device::cpu_threads(threads).unwrap();
                device.multiply(a, b, beta, &mut product).unwrap();
                product
            };
            let one = on(1);
            for threads in [2, 3, 5] {
                prop_assert!(on(threads) == one, "{threads} threads differ from one");
            }
            let at = |m: Matrix<'_>, row: usize, column: usize| {
                f64::from(m.values[row * m.strides.0 + column * m.strides.1])
            };
            for row in 0..rows {
                for column in 0..columns {
                    let sum: f64 = (0..inner).map(|i| at(a, row, i) * at(b, i, column)).sum();
                    let index = row * columns + column;
                    let expected = sum + f64::from(beta) * f64::from(before[index]);
                    assert_close(f64::from(one[index]), expected, 1e-4 * (inner as f64).sqrt());
                }
            }
        }
    }
}
