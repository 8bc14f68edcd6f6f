//! [`Logistic`]: logistic regression, for the probability of one event.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::activation::Activation;
use crate::kernels::gemm::Matrix;
use crate::memory::{View, ViewMut};
use crate::networks::scratch_buffer::ScratchBuffer;
use crate::networks::{Network, tensors, tensors_mut};

/// Logistic regression: the probability of one event, with cross entropy as its loss.
///
/// The parameters are the weights, one for each input, and one bias. They lie in the memory of the
/// device.
#[derive(Clone, Debug)]
pub struct Logistic {
    device: Device,
    inputs: usize,
    sums: ScratchBuffer,
    logits: ScratchBuffer,
}

/// Borrowed samples with the probability of the event, in the processor's memory.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// The samples one after another, row by row.
    pub features: &'a [f32],
    /// The target probability of each sample: 0 or 1 for an observation.
    pub targets: &'a [f32],
}

const NAME: &str = "Logistic";

impl Logistic {
    /// Creates a model for samples of `inputs` values.
    pub fn new(device: Device, inputs: usize) -> Logistic {
        Logistic {
            device,
            inputs,
            sums: ScratchBuffer::default(),
            logits: ScratchBuffer::default(),
        }
    }

    /// Returns the logit of each sample: the logarithm of the odds.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `features` is not rows of the number of inputs, or if a tensor
    /// does not have the length of its shape.
    pub fn logits(
        &mut self,
        params: &[View<'_, f32>],
        features: &[f32],
    ) -> Result<View<'_, f32>, ComputeError> {
        let params = tensors(NAME, params)?;
        let rows = features.len().checked_div(self.inputs).unwrap_or(0);
        let device = self.device.clone();
        self.forward(params, device.resident(features)?.view(), rows)?;
        Ok(self.logits.view())
    }

    fn forward(
        &mut self,
        [weights, bias]: [View<'_, f32>; 2],
        features: View<'_, f32>,
        rows: usize,
    ) -> Result<(), ComputeError> {
        check_length(NAME, "features", features.len(), rows.saturating_mul(self.inputs))?;
        check_length(NAME, "weights", weights.len(), self.inputs)?;
        check_length(NAME, "the bias", bias.len(), 1)?;
        self.sums.fit(&self.device, rows)?;
        self.logits.fit(&self.device, rows)?;
        let features = Matrix::new(features, rows, self.inputs)?;
        let weights = Matrix::new(weights, self.inputs, 1)?;
        self.device.multiply(features, weights, 0.0, self.sums.view_mut())?;
        let sums = self.sums.view_mut();
        let logits = self.logits.view_mut();
        self.device.activate(Activation::Identity, bias, sums, logits)
    }
}

/// Natural logarithms. Errors are also [`ComputeError::Empty`] without targets, and
/// [`ComputeError::Length`] if `features` does not have a row for each target.
impl Network<Targets<'_>> for Logistic {
    fn device(&self) -> &Device {
        &self.device
    }

    fn shapes(&self) -> Vec<Vec<u64>> {
        vec![vec![self.inputs as u64], vec![1]]
    }

    fn gradients(
        &mut self,
        params: &[View<'_, f32>],
        batch: Targets<'_>,
        gradients: Vec<ViewMut<'_, f32>>,
    ) -> Result<f64, ComputeError> {
        let params = tensors(NAME, params)?;
        let gradients = tensors_mut(NAME, gradients)?;
        let [by_weights, by_bias] = gradients;
        let Targets { features, targets } = batch;
        let rows = targets.len();
        check_length(NAME, "the gradient by the weights", by_weights.len(), self.inputs)?;
        check_length(NAME, "the gradient by the bias", by_bias.len(), 1)?;
        let device = self.device.clone();
        let features = device.resident(features)?;
        let targets = device.resident(targets)?;
        self.forward(params, features.view(), rows)?;
        let loss = device.sigmoid_cross_entropy(self.logits.view_mut(), targets.view())?;
        // The activation is the identity, so what it computed does not matter.
        let sums = self.sums.view();
        let by_logits = self.logits.view_mut();
        device.activate_back(Activation::Identity, sums, sums, by_logits, by_bias)?;
        let features = Matrix::new(features.view(), rows, self.inputs)?;
        let by_logits = Matrix::new(self.logits.view(), rows, 1)?;
        device.multiply(features.transposed(), by_logits, 0.0, by_weights)?;
        Ok(loss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    #[test]
    fn gradients_are_the_derivatives_of_the_loss() {
        let rows = 150;
        let inputs = 7;
        let mut model = Logistic::new(Device::cpu_threads(2).unwrap(), inputs);
        let features = random(1, rows * inputs);
        let weights = random(2, inputs);
        let bias = random(3, 1);
        let targets: Vec<f32> = (0..rows).map(|row| (row * row % 3 == 0).into()).collect();
        let loss_of = |weights: &[f64], bias: f64| {
            let losses = features.chunks(inputs).zip(&targets).map(|(row, &target)| {
                let products = row.iter().zip(weights).map(|(&x, weight)| f64::from(x) * weight);
                let logit = products.sum::<f64>() + bias;
                logit.exp().ln_1p() - f64::from(target) * logit
            });
            losses.sum::<f64>() / rows as f64
        };
        let mut by_weights = vec![f32::NAN; inputs];
        let mut by_bias = [f32::NAN];
        let params = [View::from(&weights), View::from(&bias)];
        let gradients = vec![(&mut by_weights).into(), (&mut by_bias).into()];
        let batch = Targets { features: &features, targets: &targets };
        let loss = model.gradients(&params, batch, gradients).unwrap();
        let exact: Vec<f64> = weights.iter().map(|&weight| weight.into()).collect();
        assert_close(loss, loss_of(&exact, bias[0].into()), 1e-6);
        assert_gradients(&by_weights, &weights, |weights| loss_of(weights, bias[0].into()));
        assert_gradients(&by_bias, &bias, |bias| loss_of(&exact, bias[0]));
        assert_eq!(model.logits(&params, &features).unwrap().len(), rows);
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let mut model = Logistic::new(Device::cpu_threads(1).unwrap(), 2);
        let [mut by_weights, mut by_bias] = [[7.0; 2], [7.0; 2]];
        let mut error = |weights: &[f32], bias: &[f32], features: &[f32], targets: &[f32]| {
            let gradients = vec![(&mut by_weights).into(), (&mut by_bias[..1]).into()];
            let params = [weights.into(), bias.into()];
            let result = model.gradients(&params, Targets { features, targets }, gradients);
            result.unwrap_err().to_string()
        };
        let two = [0.0; 2];
        let one = [0.0; 1];
        assert_eq!(error(&two, &one, &one, &one), "Logistic needs 2 elements of features, not 1");
        assert_eq!(error(&one, &one, &two, &one), "Logistic needs 2 elements of weights, not 1");
        assert_eq!(error(&two, &two, &two, &one), "Logistic needs 1 elements of the bias, not 2");
        let empty = "sigmoid_cross_entropy has no samples to average over";
        assert_eq!(error(&two, &one, &[], &[]), empty);
        assert_eq!((by_weights, by_bias), ([7.0; 2], [7.0; 2]));
    }
}
