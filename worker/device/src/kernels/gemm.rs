//! Matrix products on every device, with strides and a scaled addend.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use crate::cpu::gemm::HostMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::cuda_device::CudaDevice;
#[cfg(feature = "cuda")]
use crate::cuda::gemm::CudaMatrix;
use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{View, ViewMut};

const NAME: &str = "multiply";

/// A matrix over borrowed values.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: View<'a, f32>,
    rows: usize,
    columns: usize,
    /// The distances in values between rows and between columns.
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// Creates the `rows` x `columns` matrix that is stored in `values` row by row.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if there are not exactly `rows * columns` values.
    pub fn new(
        values: impl Into<View<'a, f32>>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix<'a>, ComputeError> {
        let values = values.into();
        let expected = rows.saturating_mul(columns);
        check_length(NAME, "a matrix", values.len(), expected)?;
        Ok(Matrix { values, rows, columns, strides: (columns, 1) })
    }

    /// Returns the transposed matrix over the same values. Copies nothing.
    pub fn transposed(self) -> Matrix<'a> {
        let (row, column) = self.strides;
        Matrix { rows: self.columns, columns: self.rows, strides: (column, row), ..self }
    }

    #[cfg(feature = "cuda")]
    fn cuda(self, device: &Arc<CudaDevice>) -> Result<CudaMatrix<'a>, ComputeError> {
        let Matrix { rows, columns, strides, .. } = self;
        let values = self.values.cuda(device, NAME, "a matrix")?;
        Ok(CudaMatrix { values, rows, columns, strides })
    }

    fn host(self) -> Result<HostMatrix<'a>, ComputeError> {
        let values = self.values.host(NAME, "a matrix")?;
        Ok(HostMatrix::new(values, self.rows, self.columns, self.strides))
    }
}

impl Device {
    /// Returns whether cuBLAS computes large products. On a CUDA device the call opens that
    /// library.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn uses_cublas(&self) -> Result<bool, ComputeError> {
        match self.backend() {
            Backend::Cpu(_) => Ok(false),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Ok(cuda.cublas()?.is_some()),
        }
    }

    /// Writes `a * b + beta * product` to `product`, which is stored row by row. With a `beta` of 0
    /// the previous contents are ignored, even NaN.
    ///
    /// Cost: `2 * a.rows * a.columns * b.columns` operations.
    ///
    /// # Errors
    /// [`ComputeError::Inner`] if the columns of `a` are not as many as the rows of `b`;
    /// [`ComputeError::Length`] if `product` does not have `a.rows * b.columns` elements.
    pub fn multiply<'a>(
        &self,
        a: Matrix<'_>,
        b: Matrix<'_>,
        beta: f32,
        product: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        let product = product.into();
        if a.columns != b.rows {
            return Err(ComputeError::Inner { columns: a.columns, rows: b.rows });
        }
        let expected = a.rows.saturating_mul(b.columns);
        check_length(NAME, "the product", product.len(), expected)?;
        match self.backend() {
            Backend::Cpu(pool) => {
                pool.multiply(a.host()?, b.host()?, beta, product.host(NAME, "the product")?);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let product = product.cuda(cuda, NAME, "the product")?;
                cuda.multiply(a.cuda(cuda)?, b.cuda(cuda)?, beta, product)?;
            }
        }
        Ok(())
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
        let left = matrix(&A, 3, 2);
        let right = matrix(&B, 2, 3);
        device.multiply(left.transposed(), right.transposed(), 0.0, &mut product).unwrap();
        assert_eq!(product, [-4.0, 16.0, -4.0, 22.0]);
        device.multiply(matrix(&[], 2, 0), matrix(&[], 0, 2), 0.0, &mut product).unwrap();
        assert_eq!(product, [0.0; 4]);
        for (rows, columns) in [(0, 3), (3, 0)] {
            let left = [1.0; 6];
            let right = [1.0; 6];
            let left = &left[..rows * 2];
            let right = &right[..columns * 2];
            let left = matrix(left, rows, 2);
            let right = matrix(right, 2, columns);
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
            let a = random(seed, rows * inner);
            let b = random(seed ^ 1, inner * columns);
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
                f64::from(m.values.as_host().unwrap()[row * m.strides.0 + column * m.strides.1])
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
