//! Loss scaling, so that small gradients are not lost in half precision.

use crate::error::ConfigError;
use crate::gradients::params::Gradients;

/// A factor for the loss that grows while gradients are finite and shrinks when they are not
/// (Micikevicius and others, 2018, "Mixed precision training", section 3.2; the dynamic form is
/// NVIDIA's).
///
/// Use it in a replica that computes its gradients in half precision. Each replica has its own. The
/// servers receive gradients of the unscaled loss; those of `f16` variables are unscaled in `f32`
/// ([`Gradients::scale`]).
///
/// ```no_run
/// # use pushpull_worker::{Error, LossScale, Params, Worker};
/// # fn gradients_of(_: &Params, _: f64, _: &mut pushpull_worker::Gradients) {}
/// # async fn run(mut worker: Worker, mut params: Params) -> Result<(), Error> {
/// let mut scale = LossScale::default();
/// while let Some(token) = worker.token().await? {
///     worker.pull(&token, &mut params).await?;
///     let mut gradients = worker.gradients();
///     gradients_of(&params, scale.scale(), &mut gradients); // of the loss times the scale
///     if scale.unscale(&mut gradients) {
///         worker.push(token, gradients).await?;
///     } // otherwise the token is returned, and the next batch uses a smaller scale
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LossScale {
    scale: f64,
    growth_interval: u64,
    backoff: f64,
    /// The number of finite gradients since the scale was changed.
    finite: u64,
}

impl LossScale {
    /// The largest scale, 2^32.
    pub const SCALE_MAX: f64 = (1_u64 << 32) as f64;

    /// Returns a factor that starts at `scale`. A gradient that is not finite multiplies it by
    /// `backoff`; `growth_interval` finite gradients in a row divide it by that. It stays between 1
    /// and [`LossScale::SCALE_MAX`]. Powers of two scale without rounding.
    ///
    /// # Errors
    /// If the scale is out of these limits, the interval is 0, or the backoff is not between 0 and
    /// 1.
    pub fn new(scale: f64, growth_interval: u64, backoff: f64) -> Result<Self, ConfigError> {
        if !(1.0..=Self::SCALE_MAX).contains(&scale) {
            return Err(ConfigError::LossScale { scale });
        }
        if growth_interval == 0 {
            return Err(ConfigError::GrowthInterval);
        }
        if !(backoff > 0.0 && backoff < 1.0) {
            return Err(ConfigError::Backoff { backoff });
        }
        Ok(LossScale { scale, growth_interval, backoff, finite: 0 })
    }

    /// Returns the factor by which to multiply the loss.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Divides the gradients of a scaled loss by the scale and returns `true`, if their norm is
    /// finite. Otherwise returns `false`: do not push them. Updates the scale for the next
    /// gradients.
    #[must_use = "gradients that are not finite must not be pushed"]
    pub fn unscale(&mut self, gradients: &mut Gradients) -> bool {
        if !gradients.global_norm().is_finite() {
            self.scale = (self.scale * self.backoff).max(1.0);
            self.finite = 0;
            return false;
        }
        gradients.scale(1.0 / self.scale);
        self.finite += 1;
        if self.finite == self.growth_interval {
            self.scale = (self.scale / self.backoff).min(Self::SCALE_MAX);
            self.finite = 0;
        }
        true
    }
}

impl Default for LossScale {
    /// A scale of 65,536, doubled after 2000 finite gradients and halved by one that is not finite.
    fn default() -> Self {
        LossScale { scale: 65_536.0, growth_interval: 2000, backoff: 0.5, finite: 0 }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::DType;

    use super::*;
    use crate::testing::plans::gradients_of;

    /// Whether a gradient is to be pushed, the gradient after `unscale`, and the scale.
    fn unscaled(scale: &mut LossScale, gradient: f32) -> (bool, f32, f64) {
        let mut gradients = gradients_of(&[("w", DType::F32, 1)], "left");
        gradients.view_mut("w").unwrap()[0] = gradient;
        let pushed = scale.unscale(&mut gradients);
        (pushed, gradients.view_mut("w").unwrap()[0], scale.scale())
    }

    #[test]
    fn the_scale_grows_with_finite_gradients_and_shrinks_with_others() {
        let mut scale = LossScale::new(8.0, 2, 0.5).unwrap();
        assert_eq!(unscaled(&mut scale, 4.0), (true, 0.5, 8.0));
        assert_eq!(unscaled(&mut scale, f32::INFINITY), (false, f32::INFINITY, 4.0));
        // The count of finite gradients restarted.
        assert_eq!(unscaled(&mut scale, 4.0), (true, 1.0, 4.0));
        assert_eq!(unscaled(&mut scale, 4.0), (true, 1.0, 8.0));
        assert_eq!(unscaled(&mut scale, 4.0), (true, 0.5, 8.0));
        assert!(!unscaled(&mut scale, f32::NAN).0);
    }

    #[test]
    fn the_scale_stays_within_its_limits() {
        let mut scale = LossScale::new(2.0, 1, 0.25).unwrap();
        assert_eq!(unscaled(&mut scale, f32::NAN).2, 1.0);
        for _ in 0..40 {
            assert!(unscaled(&mut scale, 1.0).0);
        }
        assert_eq!(scale.scale(), LossScale::SCALE_MAX);
    }

    #[test]
    fn invalid_scales_are_refused() {
        for scale in [0.5, f64::NAN, f64::INFINITY] {
            assert!(matches!(LossScale::new(scale, 1, 0.5), Err(ConfigError::LossScale { .. })));
        }
        assert_eq!(LossScale::new(1.0, 0, 0.5), Err(ConfigError::GrowthInterval));
        for backoff in [0.0, 1.0, f64::NAN] {
            let error = LossScale::new(1.0, 1, backoff);
            assert!(matches!(error, Err(ConfigError::Backoff { .. })));
        }
    }
}
