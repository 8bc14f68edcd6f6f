//! Operations on each element, and sums.

use crate::cpu::pool::ThreadPool;
use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{View, ViewMut};

impl Device {
    /// Adds `factor * x` to `y`.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `x` does not have the length of `y`. The same holds for the
    /// other operations on two arguments.
    pub fn axpy<'a>(
        &self,
        factor: f32,
        x: impl Into<View<'a, f32>>,
        y: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        self.combine("axpy", Some(factor), x.into(), y.into(), |pool, x, y| {
            pool.combine(x, y, |x, y| factor * x + y);
        })
    }

    /// Adds `x` to `y`.
    ///
    /// # Errors
    /// The errors of [`Device::axpy`].
    pub fn add<'a>(
        &self,
        x: impl Into<View<'a, f32>>,
        y: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        self.combine("add", None, x.into(), y.into(), |pool, x, y| pool.combine(x, y, |x, y| y + x))
    }

    /// Multiplies `y` by `x`.
    ///
    /// # Errors
    /// The errors of [`Device::axpy`].
    pub fn mul<'a>(
        &self,
        x: impl Into<View<'a, f32>>,
        y: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        self.combine("mul", None, x.into(), y.into(), |pool, x, y| pool.combine(x, y, |x, y| y * x))
    }

    /// Divides `y` by `x`.
    ///
    /// # Errors
    /// The errors of [`Device::axpy`].
    pub fn div<'a>(
        &self,
        x: impl Into<View<'a, f32>>,
        y: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        self.combine("div", None, x.into(), y.into(), |pool, x, y| pool.combine(x, y, |x, y| y / x))
    }

    fn combine(
        &self,
        kernel: &'static str,
        factor: Option<f32>,
        x: View<'_, f32>,
        y: ViewMut<'_, f32>,
        on_cpu: impl FnOnce(&ThreadPool, &[f32], &mut [f32]),
    ) -> Result<(), ComputeError> {
        #[cfg(not(feature = "cuda"))]
        let _ = factor;
        check_length(kernel, "x", x.len(), y.len())?;
        match self.backend() {
            Backend::Cpu(pool) => on_cpu(pool, x.host(kernel, "x")?, y.host(kernel, "y")?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let x = x.cuda(cuda, kernel, "x")?;
                cuda.combine(kernel, factor, x, y.cuda(cuda, kernel, "y")?)?;
            }
        }
        Ok(())
    }

    /// Multiplies `values` by `factor`.
    ///
    /// # Errors
    /// The error of every kernel: [`ComputeError::OtherMemory`].
    pub fn scale<'a>(
        &self,
        factor: f32,
        values: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        match self.backend() {
            Backend::Cpu(pool) => pool.scale(factor, values.into().host("scale", "values")?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                cuda.change("scale", factor, values.into().cuda(cuda, "scale", "values")?)?;
            }
        }
        Ok(())
    }

    /// Sets all `values` to one.
    ///
    /// # Errors
    /// The errors of [`Device::scale`].
    pub fn fill<'a>(
        &self,
        value: f32,
        values: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        match self.backend() {
            Backend::Cpu(_) => values.into().host("fill", "values")?.fill(value),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                cuda.change("fill", value, values.into().cuda(cuda, "fill", "values")?)?;
            }
        }
        Ok(())
    }

    /// Returns the sum, accumulated in `f64`.
    ///
    /// # Errors
    /// The errors of [`Device::scale`].
    pub fn sum<'a>(&self, values: impl Into<View<'a, f32>>) -> Result<f64, ComputeError> {
        match self.backend() {
            Backend::Cpu(pool) => Ok(pool.sum(values.into().host("sum", "values")?)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.sum(values.into().cuda(cuda, "sum", "values")?),
        }
    }

    /// Returns the mean, accumulated in `f64`; NaN without values.
    ///
    /// # Errors
    /// The errors of [`Device::scale`].
    pub fn mean<'a>(&self, values: impl Into<View<'a, f32>>) -> Result<f64, ComputeError> {
        let values = values.into();
        Ok(self.sum(values)? / values.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::ELEMENTS_AT_ONCE;
    use crate::kernels::testing::{assert_close, random};

    #[test]
    fn elements_are_combined_on_any_number_of_threads() {
        let count = 2 * ELEMENTS_AT_ONCE + 17;
        let x = random(1, count);
        let before = random(2, count);
        type Kernel = fn(&Device, &[f32], &mut [f32]) -> Result<(), ComputeError>;
        type Combine = fn(f32, f32) -> f32;
        let cases: [(&str, Kernel, Combine); 5] = [
            ("axpy", |device, x, y| device.axpy(-0.5, x, y), |x, y| -0.5 * x + y),
            ("add", |device, x, y| device.add(x, y), |x, y| y + x),
            ("mul", |device, x, y| device.mul(x, y), |x, y| y * x),
            ("div", |device, x, y| device.div(x, y), |x, y| y / x),
            ("scale", |device, _, y| device.scale(3.0, y), |_, y| 3.0 * y),
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
        assert_close(one.sum(&values).unwrap(), exact, 1e-12);
        assert_close(one.mean(&values).unwrap(), exact / values.len() as f64, 1e-12);
        for threads in 2..=4 {
            assert!(Device::cpu_threads(threads).unwrap().sum(&values) == one.sum(&values));
        }
        // A sum in f32 would stop at 2^24.
        let ones = vec![1.0; (1 << 24) + 3];
        assert_eq!(one.sum(&ones).unwrap(), f64::from((1 << 24) + 3));
        assert!(one.sum(&[]) == Ok(0.0) && one.mean(&[]).unwrap().is_nan());
    }
}
