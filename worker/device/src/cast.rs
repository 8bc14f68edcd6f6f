//! Casts between `f32` and the half types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{DeviceElement, View, ViewMut};

mod sealed {
    pub trait SealedHalf {}
    impl SealedHalf for half::f16 {}
    impl SealedHalf for half::bf16 {}
}

/// A half type: [`half::f16`] or [`half::bf16`].
pub trait Half: sealed::SealedHalf + DeviceElement {
    /// The names of the kernels of CUDA devices.
    #[doc(hidden)]
    const ROUND: &'static str;
    #[doc(hidden)]
    const WIDEN: &'static str;

    /// Converts a slice of the same length from `f32`, rounded to the nearest, ties to even.
    #[doc(hidden)]
    fn round(values: &[f32], halves: &mut [Self]);

    /// Converts a slice of the same length to `f32`, exactly.
    #[doc(hidden)]
    fn widen(halves: &[Self], values: &mut [f32]);
}

impl Half for f16 {
    const ROUND: &'static str = "round_f16";
    const WIDEN: &'static str = "widen_f16";

    fn round(values: &[f32], halves: &mut [f16]) {
        halves.convert_from_f32_slice(values);
    }

    fn widen(halves: &[f16], values: &mut [f32]) {
        halves.convert_to_f32_slice(values);
    }
}

impl Half for bf16 {
    const ROUND: &'static str = "round_bf16";
    const WIDEN: &'static str = "widen_bf16";

    fn round(values: &[f32], halves: &mut [bf16]) {
        halves.convert_from_f32_slice(values);
    }

    fn widen(halves: &[bf16], values: &mut [f32]) {
        halves.convert_to_f32_slice(values);
    }
}

impl Device {
    /// Writes `values` to `halves`, rounded to the nearest, ties to even. Values beyond the range
    /// become infinite.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if the lengths differ.
    pub fn round<'a, H: Half>(
        &self,
        values: impl Into<View<'a, f32>>,
        halves: impl Into<ViewMut<'a, H>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "round";
        let values = values.into();
        let halves = halves.into();
        check_length(NAME, "values", values.len(), halves.len())?;
        match self.backend() {
            Backend::Cpu(pool) => {
                pool.round(values.host(NAME, "values")?, halves.host(NAME, "halves")?);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let values = values.cuda(cuda, NAME, "values")?;
                cuda.round(values, halves.cuda(cuda, NAME, "halves")?)?;
            }
        }
        Ok(())
    }

    /// Writes `halves` to `values`, exactly.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if the lengths differ.
    pub fn widen<'a, H: Half>(
        &self,
        halves: impl Into<View<'a, H>>,
        values: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "widen";
        let halves = halves.into();
        let values = values.into();
        check_length(NAME, "halves", halves.len(), values.len())?;
        match self.backend() {
            Backend::Cpu(pool) => {
                pool.widen(halves.host(NAME, "halves")?, values.host(NAME, "values")?);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let halves = halves.cuda(cuda, NAME, "halves")?;
                cuda.widen(halves, values.cuda(cuda, NAME, "values")?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::ELEMENTS_AT_ONCE;
    use crate::kernels::testing::random;

    #[test]
    fn casts_are_those_of_single_values() {
        let mut values = random(1, ELEMENTS_AT_ONCE + 9);
        values[..4].copy_from_slice(&[f32::INFINITY, -0.0, 1e38, 1e-40]);
        for threads in 1..=3 {
            let device = Device::cpu_threads(threads).unwrap();
            let mut halves = vec![f16::NAN; values.len()];
            device.round(&values, &mut halves).unwrap();
            assert!(halves.iter().zip(&values).all(|(half, &x)| *half == f16::from_f32(x)));
            let mut halves = vec![bf16::NAN; values.len()];
            device.round(&values, &mut halves).unwrap();
            assert!(halves.iter().zip(&values).all(|(half, &x)| *half == bf16::from_f32(x)));
            let mut wide = vec![f32::NAN; values.len()];
            device.widen(&halves, &mut wide).unwrap();
            assert!(wide.iter().zip(&halves).all(|(x, half)| *x == half.to_f32()));
            let error = device.widen(&halves, &mut wide[1..]).unwrap_err();
            let count = halves.len();
            let expected = format!("widen needs {} elements of halves, not {count}", count - 1);
            assert_eq!(error.to_string(), expected);
        }
    }
}
