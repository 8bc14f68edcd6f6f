//! Activations, on the threads of a pool.

use super::elementwise::{ROWS_AT_ONCE, sum_rows_of};
use super::pool::ThreadPool;
use crate::kernels::activation::Activation;

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
            Activation::Relu => f32::from(x > 0.0 || x.is_nan()),
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

/// Returns the cumulative normal distribution function at `x`.
fn normal(x: f32) -> f32 {
    0.5 * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2)
}

impl ThreadPool {
    pub(crate) fn activate(
        &self,
        activation: Activation,
        bias: &[f32],
        sums: &mut [f32],
        outputs: &mut [f32],
    ) {
        // A loop for each: one that tells them apart for each element would not be vectorized.
        match activation {
            Activation::Identity => self.activate_by(bias, sums, outputs, |x| x),
            Activation::Relu => {
                self.activate_by(bias, sums, outputs, |x| Activation::Relu.value(x));
            }
            other => self.activate_by(bias, sums, outputs, move |x| other.value(x)),
        }
    }

    fn activate_by(
        &self,
        bias: &[f32],
        sums: &mut [f32],
        outputs: &mut [f32],
        value: impl Fn(f32) -> f32 + Sync,
    ) {
        self.for_row_chunks(bias.len(), sums, outputs, |_, sums, outputs| {
            let rows = sums.chunks_exact_mut(bias.len());
            for (sums, outputs) in rows.zip(outputs.chunks_exact_mut(bias.len())) {
                for ((sum, output), bias) in sums.iter_mut().zip(outputs).zip(bias) {
                    *sum += bias;
                    *output = value(*sum);
                }
            }
        });
    }

    pub(crate) fn activate_back(
        &self,
        activation: Activation,
        sums: &[f32],
        outputs: &[f32],
        gradients: &mut [f32],
        bias_gradients: &mut [f32],
    ) {
        match activation {
            Activation::Identity => {
                self.back_by(sums, outputs, gradients, bias_gradients, |gradient, _, _| gradient);
            }
            Activation::Relu => {
                self.back_by(sums, outputs, gradients, bias_gradients, |gradient, x, _| {
                    if x <= 0.0 { 0.0 } else { gradient }
                });
            }
            other => self.back_by(sums, outputs, gradients, bias_gradients, |gradient, x, y| {
                // An infinite gradient of an inactive unit is none.
                let slope = other.slope(x, y);
                if slope == 0.0 { 0.0 } else { gradient * slope }
            }),
        }
    }

    /// Replaces each gradient by `back` of it, the sum and the output.
    fn back_by(
        &self,
        sums: &[f32],
        outputs: &[f32],
        gradients: &mut [f32],
        bias_gradients: &mut [f32],
        back: impl Fn(f32, f32, f32) -> f32 + Sync,
    ) {
        let columns = bias_gradients.len();
        let rows = gradients.len().checked_div(columns).unwrap_or(0);
        let mut partial = vec![0.0; rows.div_ceil(ROWS_AT_ONCE) * columns];
        self.for_row_chunk_sums(columns, gradients, &mut partial, |chunk, gradients, partial| {
            let first = chunk * ROWS_AT_ONCE * columns;
            let points = sums[first..].iter().zip(&outputs[first..]);
            for (gradient, (&sum, &output)) in gradients.iter_mut().zip(points) {
                *gradient = back(*gradient, sum, output);
            }
            sum_rows_of(gradients, partial);
        });
        sum_rows_of(&partial, bias_gradients);
    }
}
