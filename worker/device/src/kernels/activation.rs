//! Activations with their biases, forwards and backwards.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::elementwise::{ROWS_AT_ONCE, sum_rows_of};

/// A function that a layer applies to each of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// The sum itself.
    Identity,
    /// `max(x, 0)`, and NaN of NaN. Its derivative at 0 is 0.
    Relu,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x * normal(x)` with the cumulative normal distribution, in its exact form:
    /// <https://arxiv.org/abs/1606.08415>.
    Gelu,
}

impl Activation {
    fn value(self, x: f32) -> f32 {
        match self {
            Activation::Identity => x,
            // `max` would turn NaN into 0 and hide that training has diverged.
            Activation::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => sigmoid(x),
            Activation::Gelu => x * normal(x),
        }
    }

    /// Returns the derivative at `x`, where the function has the value `y`.
    fn slope(self, x: f32, y: f32) -> f32 {
        match self {
            Activation::Identity => 1.0,
            // NaN is not at most 0.
            Activation::Relu => {
                if x <= 0.0 {
                    0.0
                } else {
                    1.0
                }
            }
            Activation::Tanh => 1.0 - y * y,
            Activation::Sigmoid => y * (1.0 - y),
            Activation::Gelu => {
                let density = (-0.5 * x * x).exp()
                    * (0.5 * std::f32::consts::FRAC_2_SQRT_PI)
                    * std::f32::consts::FRAC_1_SQRT_2;
                normal(x) + x * density
            }
        }
    }
}

/// Returns `1 / (1 + exp(-x))`. The exponent is never above 0, so nothing overflows.
pub(crate) fn sigmoid(x: f32) -> f32 {
    let small = (-x.abs()).exp();
    match x < 0.0 {
        true => small / (1.0 + small),
        false => 1.0 / (1.0 + small),
    }
}

/// Returns the cumulative normal distribution.
fn normal(x: f32) -> f32 {
    0.5 * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2)
}

impl Device {
    /// Adds `bias` to each row of `sums`, and writes the activations of the results to `outputs`.
    /// The gradients need both later.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `sums` is not rows of the length of `bias`, or if `outputs` has
    /// another length.
    pub fn activate(
        &self,
        activation: Activation,
        bias: &[f32],
        sums: &mut [f32],
        outputs: &mut [f32],
    ) -> Result<(), ComputeError> {
        const NAME: &str = "activate";
        let rows = sums.len().checked_div(bias.len()).unwrap_or(0);
        check_length(NAME, "sums", sums.len(), rows * bias.len())?;
        check_length(NAME, "outputs", outputs.len(), sums.len())?;
        self.for_row_chunks(bias.len(), sums, outputs, |_, sums, outputs| {
            let rows = sums.chunks_exact_mut(bias.len());
            for (sums, outputs) in rows.zip(outputs.chunks_exact_mut(bias.len())) {
                for ((sum, output), bias) in sums.iter_mut().zip(outputs).zip(bias) {
                    *sum += bias;
                    *output = activation.value(*sum);
                }
            }
        });
        Ok(())
    }

    /// Replaces the gradients by the outputs of [`Device::activate`] with those by its sums, and
    /// writes those by its bias, which are the sums over all rows.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `gradients` is not rows of the length of `bias_gradients`, or if
    /// `sums` or `outputs` has another length.
    pub fn activate_back(
        &self,
        activation: Activation,
        sums: &[f32],
        outputs: &[f32],
        gradients: &mut [f32],
        bias_gradients: &mut [f32],
    ) -> Result<(), ComputeError> {
        const NAME: &str = "activate_back";
        let columns = bias_gradients.len();
        let rows = gradients.len().checked_div(columns).unwrap_or(0);
        check_length(NAME, "gradients", gradients.len(), rows * columns)?;
        check_length(NAME, "sums", sums.len(), gradients.len())?;
        check_length(NAME, "outputs", outputs.len(), gradients.len())?;
        let mut partial = vec![0.0; rows.div_ceil(ROWS_AT_ONCE) * columns];
        self.for_row_chunk_sums(columns, gradients, &mut partial, |chunk, gradients, partial| {
            let first = chunk * ROWS_AT_ONCE * columns;
            let points = sums[first..].iter().zip(&outputs[first..]);
            if activation != Activation::Identity {
                for (gradient, (&sum, &output)) in gradients.iter_mut().zip(points) {
                    // An infinite gradient of an inactive unit is none.
                    let slope = activation.slope(sum, output);
                    *gradient = if slope == 0.0 { 0.0 } else { *gradient * slope };
                }
            }
            sum_rows_of(gradients, partial);
        });
        sum_rows_of(&partial, bias_gradients);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let (rows, columns) = (2 * ROWS_AT_ONCE + 3, 5);
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
                let (out, bias) = (&mut gradients, &mut bias_gradients);
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
        let (infinity, nan) = (f32::INFINITY, f32::NAN);
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
            let (mut sums, mut outputs) = ([nan], [0.0]);
            device.activate(activation, &[0.0], &mut sums, &mut outputs).unwrap();
            assert!(outputs[0].is_nan(), "{activation:?} hides NaN");
        }
        let (mut gradients, mut bias) = ([infinity], [0.0]);
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
        let (mut gradients, mut bias) = ([1.0; 4], [0.0; 2]);
        let error = device
            .activate_back(relu, &[0.0; 3], &[0.0; 4], &mut gradients, &mut bias)
            .unwrap_err();
        assert_eq!(error.to_string(), "activate_back needs 4 elements of sums, not 3");
        device.activate(relu, &[], &mut [], &mut []).unwrap();
        device.activate_back(relu, &[], &[], &mut [], &mut []).unwrap();
    }
}
