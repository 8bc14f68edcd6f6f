//! Matrix products; the only file here with `unsafe` in it.

/// A matrix that borrows its values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    /// From one row to the next, and from one column to the next.
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// The `rows` x `columns` matrix that lies in `values` row by row.
    ///
    /// # Panics
    ///
    /// If there are not exactly `rows * columns` values.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert_eq!(Some(values.len()), rows.checked_mul(columns), "{rows} x {columns} values");
        Matrix { values, rows, columns, strides: (columns, 1) }
    }

    /// The same values with rows and columns exchanged; nothing is copied.
    pub(crate) fn transposed(self) -> Matrix<'a> {
        Matrix {
            values: self.values,
            rows: self.columns,
            columns: self.rows,
            strides: (self.strides.1, self.strides.0),
        }
    }
}

/// Writes `a * b + beta * product` to `product`, which lies row by row. With `beta` 0 what was in
/// it before does not matter, not even NaN.
///
/// # Panics
///
/// If the shapes do not fit together.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>, beta: f32, product: &mut [f32]) {
    let (rows, inner, columns) = (a.rows, a.columns, b.columns);
    assert_eq!(inner, b.rows, "columns of the left matrix and rows of the right one");
    assert_eq!(Some(product.len()), rows.checked_mul(columns), "values of the product");
    // SAFETY: `Matrix::new` made sure that `a` holds rows * inner values and `b` inner * columns,
    // and their fields are private; their strides, transposed or not, reach each value once and
    // nothing else. The assertion above says the same of `product`, whose strides are those of a
    // matrix that lies row by row. It is borrowed mutably, so it overlaps neither `a` nor `b`. A
    // slice is at most isize::MAX bytes long, and a stride that is multiplied by anything but 0 is
    // no greater than the number of values, so no offset overflows.
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
    fn products_by_hand() {
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
    fn a_matrix_has_as_many_values_as_it_says() {
        Matrix::new(&A, 2, 4);
    }

    #[test]
    #[should_panic(expected = "columns of the left matrix")]
    fn inner_sides_must_match() {
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 2, 3), 0.0, &mut [0.0; 6]);
    }

    #[test]
    #[should_panic(expected = "values of the product")]
    fn the_product_must_fit() {
        multiply(Matrix::new(&A, 2, 3), Matrix::new(&B, 3, 2), 0.0, &mut [0.0; 5]);
    }
}
