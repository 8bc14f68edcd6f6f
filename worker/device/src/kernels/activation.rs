//! Activations with their biases, forwards and backwards.

use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{View, ViewMut};

/// A function that a layer applies to each of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// The sum itself, whose derivative is 1.
    Identity,
    /// `max(x, 0)`, and NaN of NaN. Its derivative at 0 is 0.
    Relu,
    /// The hyperbolic tangent of the sum.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x * normal(x)` with the cumulative normal distribution, in its exact form:
    /// <https://arxiv.org/abs/1606.08415>.
    Gelu,
}

impl Device {
    /// Adds `bias` to each row of `sums`, and writes the activations of the results to `outputs`.
    /// The gradients need both later.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `sums` is not rows of the length of `bias`, or if `outputs` has
    /// another length.
    pub fn activate<'a>(
        &self,
        activation: Activation,
        bias: impl Into<View<'a, f32>>,
        sums: impl Into<ViewMut<'a, f32>>,
        outputs: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "activate";
        let bias = bias.into();
        let sums = sums.into();
        let outputs = outputs.into();
        let rows = sums.len().checked_div(bias.len()).unwrap_or(0);
        check_length(NAME, "sums", sums.len(), rows * bias.len())?;
        check_length(NAME, "outputs", outputs.len(), sums.len())?;
        match self.backend() {
            Backend::Cpu(pool) => pool.activate(
                activation,
                bias.host(NAME, "bias")?,
                sums.host(NAME, "sums")?,
                outputs.host(NAME, "outputs")?,
            ),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.activate(
                activation,
                bias.cuda(cuda, NAME, "bias")?,
                sums.cuda(cuda, NAME, "sums")?,
                outputs.cuda(cuda, NAME, "outputs")?,
            )?,
        }
        Ok(())
    }

    /// Replaces the gradients by the outputs of [`Device::activate`] with the gradients by its
    /// sums. Writes the gradients by its bias, which are the sums over all rows.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `gradients` is not rows of the length of `bias_gradients`, or if
    /// `sums` or `outputs` has another length.
    pub fn activate_back<'a>(
        &self,
        activation: Activation,
        sums: impl Into<View<'a, f32>>,
        outputs: impl Into<View<'a, f32>>,
        gradients: impl Into<ViewMut<'a, f32>>,
        bias_gradients: impl Into<ViewMut<'a, f32>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "activate_back";
        let sums = sums.into();
        let outputs = outputs.into();
        let gradients = gradients.into();
        let bias_gradients = bias_gradients.into();
        let columns = bias_gradients.len();
        let rows = gradients.len().checked_div(columns).unwrap_or(0);
        check_length(NAME, "gradients", gradients.len(), rows * columns)?;
        check_length(NAME, "sums", sums.len(), gradients.len())?;
        check_length(NAME, "outputs", outputs.len(), gradients.len())?;
        match self.backend() {
            Backend::Cpu(pool) => pool.activate_back(
                activation,
                sums.host(NAME, "sums")?,
                outputs.host(NAME, "outputs")?,
                gradients.host(NAME, "gradients")?,
                bias_gradients.host(NAME, "bias_gradients")?,
            ),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.activate_back(
                activation,
                sums.cuda(cuda, NAME, "sums")?,
                outputs.cuda(cuda, NAME, "outputs")?,
                gradients.cuda(cuda, NAME, "gradients")?,
                bias_gradients.cuda(cuda, NAME, "bias_gradients")?,
            )?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::elementwise::ROWS_AT_ONCE;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    const ALL: [Activation; 5] = [
        Activation::Identity,
        Activation::Relu,
        Activation::Tanh,
        Activation::Sigmoid,
        Activation::Gelu,
    ];

    fn reference(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Identity => x,
            Activation::Relu => x.max(0.0),
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Gelu => x * 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        }
    }

    #[test]
    fn gradients_are_derivatives_on_any_number_of_threads() {
        // More rows than a chunk has, and an odd width.
        let rows = 2 * ROWS_AT_ONCE + 3;
        let columns = 5;
        let bias = random(1, columns);
        let weights = random(3, rows * columns);
        for activation in ALL {
            let on = |threads| {
                let device = Device::cpu_threads(threads).unwrap();
                let mut sums: Vec<f32> =
                    random(2, rows * columns).iter().map(|sum| 3.0 * sum).collect();
                let mut outputs = vec![f32::NAN; sums.len()];
                device.activate(activation, &bias, &mut sums, &mut outputs).unwrap();
                let mut gradients = weights.clone();
                let mut bias_gradients = vec![f32::NAN; columns];
                let out = &mut gradients;
                let bias = &mut bias_gradients;
                device.activate_back(activation, &sums, &outputs, out, bias).unwrap();
                (sums, outputs, gradients, bias_gradients)
            };
            let (sums, outputs, gradients, bias_gradients) = on(1);
            for (&sum, &output) in sums.iter().zip(&outputs) {
                assert_close(output.into(), reference(activation, sum.into()), 1e-6);
            }
            // The derivative of one output at a time, for each element by itself.
            for index in 0..sums.len() {
                let weight = f64::from(weights[index]);
                let loss = |x: &[f64]| weight * reference(activation, x[0]);
                assert_gradients(&gradients[index..=index], &sums[index..=index], loss);
            }
            for (column, &found) in bias_gradients.iter().enumerate() {
                let of_column = gradients.iter().skip(column).step_by(columns);
                let sum: f64 = of_column.map(|&gradient| f64::from(gradient)).sum();
                assert_close(found.into(), sum, 1e-5);
            }
            for threads in [2, 3] {
                assert!(
                    on(threads)
                        == (
                            sums.clone(),
                            outputs.clone(),
                            gradients.clone(),
                            bias_gradients.clone()
                        )
                );
            }
        }
    }

    #[test]
    fn activations_of_extreme_values() {
        let device = Device::cpu_threads(1).unwrap();
        let infinity = f32::INFINITY;
        let nan = f32::NAN;
        let cases = [
            (Activation::Relu, [infinity, -infinity], [infinity, 0.0]),
            (Activation::Tanh, [infinity, -infinity], [1.0, -1.0]),
            (Activation::Sigmoid, [200.0, -200.0], [1.0, 0.0]),
            (Activation::Gelu, [100.0, -100.0], [100.0, 0.0]),
        ];
        for (activation, mut sums, expected) in cases {
            let mut outputs = [nan; 2];
            device.activate(activation, &[0.0], &mut sums, &mut outputs).unwrap();
            assert_eq!(outputs, expected, "{activation:?}");
        }
        for activation in ALL {
            let mut sums = [nan];
            let mut outputs = [0.0];
            device.activate(activation, &[0.0], &mut sums, &mut outputs).unwrap();
            assert!(outputs[0].is_nan(), "{activation:?} hides NaN");
        }
        let mut gradients = [infinity];
        let mut bias = [0.0];
        let relu = Activation::Relu;
        device.activate_back(relu, &[-1.0], &[0.0], &mut gradients, &mut bias).unwrap();
        assert_eq!((gradients, bias), ([0.0], [0.0]));
    }

    #[test]
    fn rows_of_the_wrong_length_are_refused() {
        let device = Device::cpu_threads(1).unwrap();
        let mut sums = [1.0; 5];
        let relu = Activation::Relu;
        let error = device.activate(relu, &[0.0; 2], &mut sums, &mut [0.0; 5]).unwrap_err();
        assert_eq!(error.to_string(), "activate needs 4 elements of sums, not 5");
        let error = device.activate(relu, &[], &mut sums, &mut [0.0; 5]).unwrap_err();
        assert_eq!(error.to_string(), "activate needs 0 elements of sums, not 5");
        let error = device.activate(relu, &[0.0], &mut sums, &mut [0.0; 4]).unwrap_err();
        assert_eq!(error.to_string(), "activate needs 5 elements of outputs, not 4");
        assert_eq!(sums, [1.0; 5]);
        let mut gradients = [1.0; 4];
        let mut bias = [0.0; 2];
        let error = device
            .activate_back(relu, &[0.0; 3], &[0.0; 4], &mut gradients, &mut bias)
            .unwrap_err();
        assert_eq!(error.to_string(), "activate_back needs 4 elements of sums, not 3");
        device.activate(relu, &[], &mut [], &mut []).unwrap();
        device.activate_back(relu, &[], &[], &mut [], &mut []).unwrap();
    }
}
