//! Staleness policies: how asynchronous mode adjusts a stale gradient.

use std::ops::{Add, Mul, Sub};

use pushpull_common::tensor::{DType, Element};

/// The adjustment of a gradient that was computed from older values than those it is applied to.
///
/// The staleness is the number of gradients that the shard has applied in between. Every policy
/// leaves a gradient of staleness 0 unchanged, to the bit. `docs/asynchronous.md` has the
/// mathematics and the sources.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum StalenessPolicy {
    /// The gradient is applied unchanged.
    #[default]
    Ignore,
    /// The learning rate of the gradient is divided by `1 + staleness` (Zhang et al. 2016). The
    /// optimizer slots receive the whole gradient. Costs nothing.
    ///
    /// Requires an optimizer with [`crate::optim::Optimizer::scales_rate`]; all built-in ones except FTRL
    /// have it. With another optimizer the server does not start.
    Damp,
    /// `lambda g g (w - w_read)` is added to each element, where `w_read` are the values that the
    /// gradient was computed from and `w` those that it is applied to (DC-ASGD with a constant
    /// lambda, Zheng et al. 2017).
    ///
    /// Costs a copy of the shard's values for each worker, on the heap and within the byte limit of
    /// [`crate::Storage`]. Each pull of a worker makes one more pass over the values. Each stale
    /// gradient makes one more pass over the gradient, the copy and the values. A gradient whose
    /// values have no copy is applied unchanged and counted in
    /// [`crate::Metrics::gradients_uncompensated`].
    DelayCompensation {
        /// The weight of the compensation: finite and not negative. [`StalenessPolicy::LAMBDA`] is
        /// a usual value.
        lambda: f64,
    },
}

impl StalenessPolicy {
    /// The default lambda of MXNet's `DCASGD`: 0.04.
    pub const LAMBDA: f64 = 0.04;

    /// Returns the value that cannot be used and the reason, if there is one.
    pub(crate) fn fault(self) -> Option<(String, &'static str)> {
        match self {
            StalenessPolicy::DelayCompensation { lambda }
                if !(lambda.is_finite() && lambda >= 0.0) =>
            {
                Some((lambda.to_string(), "lambda must be finite and not negative"))
            }
            _ => None,
        }
    }

    /// Returns the factor that the learning rate is multiplied by.
    pub(crate) fn rate(self, staleness: u64) -> f64 {
        match self {
            StalenessPolicy::Damp => 1.0 / (1.0 + staleness as f64),
            _ => 1.0,
        }
    }
}

/// Compensates a gradient for the change from the values it was computed from (`read`) to those it
/// is applied to (`now`). All three have the same type and length.
///
/// An element whose compensation overflows stays unchanged, so a finite element never becomes
/// infinite.
///
/// # Panics
/// If the lengths differ, or the type is not a floating-point type.
pub(crate) fn compensate(dtype: DType, lambda: f64, gradient: &mut [u8], read: &[u8], now: &[u8]) {
    assert!(
        gradient.len() == read.len() && read.len() == now.len(),
        "a gradient and its values must have the same length"
    );
    match dtype {
        DType::F32 => elements::<f32>(lambda as f32, gradient, read, now, f32::is_finite),
        DType::F64 => elements::<f64>(lambda, gradient, read, now, f64::is_finite),
        _ => unreachable!("only floating-point variables are trainable"),
    }
}

fn elements<T>(lambda: T, gradient: &mut [u8], read: &[u8], now: &[u8], finite: impl Fn(T) -> bool)
where
    T: Element + Add<Output = T> + Sub<Output = T> + Mul<Output = T>,
{
    let gradient: &mut [T] = bytemuck::cast_slice_mut(gradient);
    let (read, now): (&[T], &[T]) = (bytemuck::cast_slice(read), bytemuck::cast_slice(now));
    for ((g, &read), &now) in gradient.iter_mut().zip(read).zip(now) {
        // The square of a large gradient may overflow where its product with a small change does
        // not.
        let compensated = *g + (lambda * *g) * (*g * (now - read));
        if finite(compensated) {
            *g = compensated;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damping_divides_the_rate_by_one_plus_the_staleness() {
        for (staleness, rate) in [(0, 1.0), (1, 0.5), (3, 0.25), (7, 0.125), (9, 0.1)] {
            assert_eq!(StalenessPolicy::Damp.rate(staleness), rate);
        }
        assert!(StalenessPolicy::Damp.rate(u64::MAX) > 0.0);
        let lambda = StalenessPolicy::LAMBDA;
        for policy in [StalenessPolicy::Ignore, StalenessPolicy::DelayCompensation { lambda }] {
            assert_eq!((policy.rate(0), policy.rate(9)), (1.0, 1.0));
        }
    }

    #[test]
    fn an_invalid_lambda_is_reported() {
        let fault = |lambda| StalenessPolicy::DelayCompensation { lambda }.fault();
        for lambda in [-0.1, f64::NAN, f64::INFINITY] {
            assert_eq!(fault(lambda).unwrap().0, lambda.to_string());
        }
        assert_eq!((fault(0.0), fault(0.04), StalenessPolicy::Damp.fault()), (None, None, None));
    }

    /// The gradient, the value that was read, the current value, and the compensated gradient for a
    /// lambda of 0.5; all exact in `f32`.
    const CASES: [[f64; 4]; 8] = [
        [2.0, 1.0, 1.0, 2.0],
        [2.0, 1.0, 3.0, 6.0],
        [-2.0, 1.0, 3.0, 2.0],
        [2.0, 1.0, -3.0, -6.0],
        [0.0, 1.0, 3.0, 0.0],
        [-0.5, 0.25, -0.25, -0.5625],
        // g g overflows here; in the next case the sum does.
        [1.25e38, 1.0, 1.0, 1.25e38],
        [f32::MAX as f64, 0.0, 1.0, f32::MAX as f64],
    ];

    #[test]
    fn compensation_adds_the_squared_gradient_times_the_change() {
        let column = |column: usize| CASES.map(|case| case[column] as f32);
        let (mut gradient, read, now) = (column(0), column(1), column(2));
        let (read, now) = (bytemuck::cast_slice(&read), bytemuck::cast_slice(&now));
        compensate(DType::F32, 0.5, bytemuck::cast_slice_mut(&mut gradient), read, now);
        assert_eq!(gradient, column(3));

        let column = |column: usize| CASES.map(|case| case[column]);
        let (mut gradient, read, now) = (column(0), column(1), column(2));
        let (read, now) = (bytemuck::cast_slice(&read), bytemuck::cast_slice(&now));
        compensate(DType::F64, 0.5, bytemuck::cast_slice_mut(&mut gradient), read, now);
        // The last case does not overflow in this type.
        assert_eq!(gradient[..7], column(3)[..7]);
    }

    #[test]
    fn elements_with_a_non_finite_result_stay_unchanged() {
        let mut gradient = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1.0];
        let (read, now) = ([0.0; 4], [1.0, 0.0, 1.0, f64::INFINITY]);
        let bytes = bytemuck::cast_slice_mut(&mut gradient);
        compensate(DType::F64, 1.0, bytes, bytemuck::cast_slice(&read), bytemuck::cast_slice(&now));
        assert_eq!((gradient[0], gradient[1]), (f64::INFINITY, f64::NEG_INFINITY));
        assert_eq!((gradient[2].is_nan(), gradient[3]), (true, 1.0));
    }
}
