//! Matrix products. The only file of the network with `unsafe`.

/// A matrix over borrowed values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    /// Distance in values between rows, and between columns.
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// Creates the `rows` x `columns` matrix stored in `values` row by row.
    ///
    /// # Panics
    ///
    /// If there are not exactly `rows * columns` values.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert_eq!(Some(values.len()), rows.checked_mul(columns), "{rows} x {columns} values");
        Matrix { values, rows, columns, strides: (columns, 1) }
    }

    /// Returns the transposed matrix over the same values; copies nothing.
    pub(crate) fn transposed(self) -> Matrix<'a> {
        Matrix {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            strides: (self.strides.1, self.strides.0),
        }
    }
}

/// Writes `a * b + beta * product` to `product`, which is stored row by row. With a `beta` of 0 the
/// previous contents are ignored, even NaN.
///
/// # Panics
///
/// If the shapes do not match.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, beta: f32, product: &mut [f32]) {
    let (rows, inner, columns) = (a.rows, a.columns, b.columns);
    assert_eq!(inner, b.rows, "columns of the left matrix and rows of the right one");
    assert_eq!(Some(product.len()), rows.checked_mul(columns), "values of the product");
    // SAFETY: The pointers and strides cover exactly the three slices.
    // - `Matrix::new` checked that `a` has rows * inner values and `b` inner * columns, and their
    //   fields are private. Their strides, transposed or not, reach each value once and nothing
    //   else.
    // - The assertion above checked the length of `product`, whose strides are those of a matrix
    //   stored row by row.
    // - `product` is borrowed mutably, so it overlaps neither `a` nor `b`.
    // - No offset overflows: a slice has at most isize::MAX bytes, and a stride that is multiplied
    //   by anything but 0 is at most the number of values.
    unsafe {
        matrixmultiply::sgemm(
            rows,
            inner,
            columns,
            1.0,
            a.values.as_ptr(),
            a.strides.0 as isize,
            a.strides.1 as isize,
            b.values.as_ptr(),
            b.strides.0 as isize,
            b.strides.1 as isize,
            beta,
            product.as_mut_ptr(),
            columns as isize,
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    const B: [f32; 6] = [1.0, 0.0, -1.0, 2.0, 3.0, 1.0];

    #[test]
    fn products_match_those_computed_by_hand() {
        let mut product = [f32::NAN; 4];
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 3, 2), 0.0, &mut product);
        assert_eq!(product, [8.0, 7.0, 17.0, 16.0]);
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 3, 2), 1.0, &mut product);
        assert_eq!(product, [16.0, 14.0, 34.0, 32.0]);
        let (left, right) = (Matrix::new(&A, 3, 2), Matrix::new(&B, 2, 3));
        multiply(left.transposed(), right.transposed(), 0.0, &mut product);
        assert_eq!(product, [-4.0, 16.0, -4.0, 22.0]);
        multiply(Matrix::new(&[], 2, 0), Matrix::new(&[], 0, 2), 0.0, &mut product);
        assert_eq!(product, [0.0; 4]);
    }

    #[test]
    #[should_panic(expected = "2 x 4 values")]
    fn a_matrix_needs_rows_times_columns_values() {
        Matrix::new(&A, 2, 4);
    }

    #[test]
    #[should_panic(expected = "columns of the left matrix")]
    fn inner_dimensions_must_match() {
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 2, 3), 0.0, &mut [0.0; 6]);
    }

    #[test]
    #[should_panic(expected = "values of the product")]
    fn the_product_needs_rows_times_columns_values() {
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 3, 2), 0.0, &mut [0.0; 5]);
    }
}
