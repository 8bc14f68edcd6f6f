//! [`Logistic`]: logistic regression.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::gemm::Matrix;

/// Logistic regression: the probability of one event, with cross entropy as its loss.
///
/// The parameters are the weights, one for each input, and one bias.
#[derive(Clone, Debug)]
pub struct Logistic {
    device: Device,
    inputs: usize,
    logits: Vec<f32>,
}

const NAME: &str = "Logistic";

impl Logistic {
    /// Creates a model for samples of `inputs` values.
    pub fn new(device: Device, inputs: usize) -> Logistic {
        Logistic { device, inputs, logits: Vec::new() }
    }

    /// Returns the shapes of the weights and of the bias.
    pub fn shapes(&self) -> [Vec<u64>; 2] {
        [vec![self.inputs as u64], vec![1]]
    }

    /// Returns the mean loss over a batch (natural logarithm), and overwrites `gradients` with its
    /// derivatives by the weights and by the bias. `targets` are the probabilities that the model
    /// should give, 0 or 1 for what has been seen.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without targets; [`ComputeError::Length`] if `features` does not
    /// have a row for each target, or if a tensor does not have the length of its shape.
    pub fn gradients(
        &mut self,
        params: [&[f32]; 2],
        features: &[f32],
        targets: &[f32],
        gradients: [&mut [f32]; 2],
    ) -> Result<f64, ComputeError> {
        let rows = targets.len();
        let [by_weights, by_bias] = gradients;
        check_length(NAME, "the gradient by the weights", by_weights.len(), self.inputs)?;
        check_length(NAME, "the gradient by the bias", by_bias.len(), 1)?;
        self.forward(params, features, rows)?;
        let loss = self.device.sigmoid_cross_entropy(&mut self.logits, targets)?;
        let features = Matrix::new(features, rows, self.inputs)?;
        let by_logits = Matrix::new(&self.logits, rows, 1)?;
        self.device.multiply(features.transposed(), by_logits, 0.0, by_weights)?;
        by_bias[0] = self.device.sum(&self.logits) as f32;
        Ok(loss)
    }

    /// Returns the logit of each sample: the logarithm of the odds.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `features` is not rows of the number of inputs, or if a tensor
    /// does not have the length of its shape.
    pub fn logits(
        &mut self,
        params: [&[f32]; 2],
        features: &[f32],
    ) -> Result<&[f32], ComputeError> {
        let rows = features.len().checked_div(self.inputs).unwrap_or(0);
        self.forward(params, features, rows)?;
        Ok(&self.logits)
    }

    fn forward(
        &mut self,
        [weights, bias]: [&[f32]; 2],
        features: &[f32],
        rows: usize,
    ) -> Result<(), ComputeError> {
        check_length(NAME, "features", features.len(), rows.saturating_mul(self.inputs))?;
        check_length(NAME, "weights", weights.len(), self.inputs)?;
        check_length(NAME, "the bias", bias.len(), 1)?;
        self.logits.clear();
        self.logits.resize(rows, bias[0]);
        let features = Matrix::new(features, rows, self.inputs)?;
        let weights = Matrix::new(weights, self.inputs, 1)?;
        self.device.multiply(features, weights, 1.0, &mut self.logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    #[test]
    fn gradients_are_the_derivatives_of_the_loss() {
        let (rows, inputs) = (150, 7);
        let mut model = Logistic::new(Device::cpu_threads(2).unwrap(), inputs);
        let (features, weights, bias) = (random(1, rows * inputs), random(2, inputs), random(3, 1));
        let targets: Vec<f32> = (0..rows).map(|row| (row * row % 3 == 0).into()).collect();
        let loss_of = |weights: &[f64], bias: f64| {
            let losses = features.chunks(inputs).zip(&targets).map(|(row, &target)| {
                let products = row.iter().zip(weights).map(|(&x, weight)| f64::from(x) * weight);
                let logit = products.sum::<f64>() + bias;
                logit.exp().ln_1p() - f64::from(target) * logit
            });
            losses.sum::<f64>() / rows as f64
        };
        let (mut by_weights, mut by_bias) = (vec![f32::NAN; inputs], [f32::NAN]);
        let params = [weights.as_slice(), &bias];
        let loss =
            model.gradients(params, &features, &targets, [&mut by_weights, &mut by_bias]).unwrap();
        let exact: Vec<f64> = weights.iter().map(|&weight| weight.into()).collect();
        assert_close(loss, loss_of(&exact, bias[0].into()), 1e-6);
        assert_gradients(&by_weights, &weights, |weights| loss_of(weights, bias[0].into()));
        assert_gradients(&by_bias, &bias, |bias| loss_of(&exact, bias[0]));
        assert_eq!(model.logits(params, &features).unwrap().len(), rows);
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let mut model = Logistic::new(Device::cpu_threads(1).unwrap(), 2);
        let [mut by_weights, mut by_bias] = [[7.0; 2], [7.0; 2]];
        let mut error = |weights: &[f32], bias: &[f32], features: &[f32], targets: &[f32]| {
            let gradients = [&mut by_weights[..], &mut by_bias[..1]];
            let result = model.gradients([weights, bias], features, targets, gradients);
            result.unwrap_err().to_string()
        };
        let (two, one) = ([0.0; 2], [0.0; 1]);
        assert_eq!(error(&two, &one, &one, &one), "Logistic needs 2 elements of features, not 1");
        assert_eq!(error(&one, &one, &two, &one), "Logistic needs 2 elements of weights, not 1");
        assert_eq!(error(&two, &two, &two, &one), "Logistic needs 1 elements of the bias, not 2");
        let empty = "sigmoid_cross_entropy has no samples to average over";
        assert_eq!(error(&two, &one, &[], &[]), empty);
        assert_eq!((by_weights, by_bias), ([7.0; 2], [7.0; 2]));
    }
}
