//! [`Mlp`]: a classifier of fully connected layers.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::activation::Activation;
use crate::kernels::gemm::Matrix;
use crate::memory::{View, ViewMut};
use crate::networks::Network;
use crate::networks::classes::{self, ROWS_AT_ONCE};
use crate::networks::scratch_buffer::ScratchBuffer;

/// Borrowed labelled samples, in the processor's memory.
#[derive(Clone, Copy, Debug)]
pub struct Samples<'a> {
    /// The samples one after another, row by row.
    pub features: &'a [f32],
    /// The class of each sample.
    pub labels: &'a [u32],
}

/// A classifier of fully connected layers, with a softmax over the classes and cross entropy as its
/// loss.
///
/// The parameters are two tensors for each layer: the weights of shape `[inputs, outputs]`, and the
/// biases of shape `[outputs]`. [`Network::shapes`] gives their order. They lie in the memory of
/// the device.
///
/// ```
/// use pushpull_device::{Device, Mlp, Network, Samples};
///
/// let mut mlp = Mlp::new(Device::cpu()?, &[2, 3]);
/// let (weights, biases) = ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.0; 3]);
/// let (mut by_weights, mut by_biases) = ([0.0; 6], [0.0; 3]);
/// let batch = Samples { features: &[1.0, -1.0], labels: &[2] };
/// let gradients = vec![(&mut by_weights).into(), (&mut by_biases).into()];
/// let loss = mlp.gradients(&[(&weights).into(), (&biases).into()], batch, gradients)?;
/// assert!((loss - 3_f64.ln()).abs() < 1e-6, "all classes are equally likely");
/// # Ok::<(), pushpull_device::ComputeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mlp {
    device: Device,
    /// The number of inputs, then the number of outputs of each layer.
    sizes: Vec<usize>,
    activation: Activation,
    layers: Vec<LayerActivations>,
    /// The gradients by the outputs of a layer. `gradients_below` has those of the layer below it.
    gradients: ScratchBuffer,
    gradients_below: ScratchBuffer,
}

/// The sums and outputs of a layer for the last batch, one row per sample.
#[derive(Clone, Debug, Default)]
struct LayerActivations {
    sums: ScratchBuffer,
    outputs: ScratchBuffer,
}

const NAME: &str = "Mlp";

impl Mlp {
    /// Creates a network. `sizes` are the number of inputs, of the units of each hidden layer, and
    /// of classes. The hidden layers have rectified linear units.
    ///
    /// # Panics
    /// If there are fewer than two sizes.
    pub fn new(device: Device, sizes: &[usize]) -> Mlp {
        assert!(sizes.len() >= 2, "a network has inputs and classes, not {sizes:?}");
        Mlp {
            device,
            sizes: sizes.to_vec(),
            activation: Activation::Relu,
            layers: vec![LayerActivations::default(); sizes.len() - 1],
            gradients: ScratchBuffer::default(),
            gradients_below: ScratchBuffer::default(),
        }
    }

    /// Sets the activation of the hidden layers.
    pub fn activation(mut self, activation: Activation) -> Mlp {
        self.activation = activation;
        self
    }

    /// Returns the logits of each sample: one row per sample, one column per class.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `features` is not rows of the number of inputs, or if a tensor
    /// does not have the length of its shape.
    pub fn logits(
        &mut self,
        params: &[View<'_, f32>],
        features: &[f32],
    ) -> Result<View<'_, f32>, ComputeError> {
        let rows = features.len().checked_div(self.sizes[0]).unwrap_or(0);
        let device = self.device.clone();
        self.forward(params, device.resident(features)?.view(), rows)?;
        Ok(self.layers.last().map_or(View::from(&[]), |layer| layer.outputs.view()))
    }

    /// Returns the share of samples whose label has the single greatest logit. Ties and NaN count
    /// as wrong. The share of no samples is zero.
    ///
    /// # Errors
    /// The errors of [`Mlp::logits`]; [`ComputeError::Length`] if there are not as many labels as
    /// samples.
    pub fn accuracy(
        &mut self,
        params: &[View<'_, f32>],
        samples: Samples<'_>,
    ) -> Result<f64, ComputeError> {
        let Samples { features, labels } = samples;
        let inputs = self.sizes[0];
        check_length(NAME, "features", features.len(), labels.len().saturating_mul(inputs))?;
        let device = self.device.clone();
        let mut correct = 0;
        for (chunk, labels) in labels.chunks(ROWS_AT_ONCE).enumerate() {
            let features = &features[chunk * ROWS_AT_ONCE * inputs..][..labels.len() * inputs];
            correct += classes::correct(&device, self.logits(params, features)?, labels)?;
        }
        Ok(correct as f64 / labels.len().max(1) as f64)
    }

    /// Fills the sums and the outputs of all layers.
    fn forward(
        &mut self,
        params: &[View<'_, f32>],
        features: View<'_, f32>,
        rows: usize,
    ) -> Result<(), ComputeError> {
        check_length(NAME, "parameters", params.len(), 2 * self.layers.len())?;
        check_length(NAME, "features", features.len(), rows.saturating_mul(self.sizes[0]))?;
        let last = self.layers.len() - 1;
        for index in 0..=last {
            let [inputs, outputs] = [self.sizes[index], self.sizes[index + 1]];
            let (before, layers) = self.layers.split_at_mut(index);
            let LayerActivations { sums, outputs: values } = &mut layers[0];
            let below = before.last().map_or(features, |layer| layer.outputs.view());
            let weights = params[2 * index];
            let biases = params[2 * index + 1];
            check_length(NAME, "biases", biases.len(), outputs)?;
            sums.fit(&self.device, rows * outputs)?;
            values.fit(&self.device, rows * outputs)?;
            let below = Matrix::new(below, rows, inputs)?;
            let weights = Matrix::new(weights, inputs, outputs)?;
            self.device.multiply(below, weights, 0.0, sums.view_mut())?;
            let activation = if index == last { Activation::Identity } else { self.activation };
            self.device.activate(activation, biases, sums.view_mut(), values.view_mut())?;
        }
        Ok(())
    }
}

/// Natural logarithms. Costs six floating point operations per weight and sample.
///
/// The shapes are those of the weights and biases of the first layer, then those of the next.
/// Errors are also [`ComputeError::Empty`] without labels, [`ComputeError::Length`] if `features`
/// does not have a row for each label, and [`ComputeError::Label`].
impl Network<Samples<'_>> for Mlp {
    fn device(&self) -> &Device {
        &self.device
    }

    fn shapes(&self) -> Vec<Vec<u64>> {
        let layers = self.sizes.windows(2);
        layers
            .flat_map(|sizes| {
                let [inputs, outputs] = [sizes[0] as u64, sizes[1] as u64];
                [vec![inputs, outputs], vec![outputs]]
            })
            .collect()
    }

    fn gradients(
        &mut self,
        params: &[View<'_, f32>],
        batch: Samples<'_>,
        mut gradients: Vec<ViewMut<'_, f32>>,
    ) -> Result<f64, ComputeError> {
        let Samples { features, labels } = batch;
        let rows = labels.len();
        check_length(NAME, "gradients", gradients.len(), params.len())?;
        for (gradient, param) in gradients.iter().zip(params) {
            check_length(NAME, "a gradient", gradient.len(), param.len())?;
        }
        let device = self.device.clone();
        let features = device.resident(features)?;
        self.forward(params, features.view(), rows)?;
        let Mlp { sizes, layers, .. } = self;
        let last = layers.len() - 1;
        let logits = layers[last].outputs.view();
        self.gradients.fit(&device, logits.len())?;
        device.copy(logits, self.gradients.view_mut())?;
        let logits = self.gradients.view_mut();
        let loss = device.softmax_cross_entropy(logits, sizes[last + 1], labels)?;
        for layer in (0..=last).rev() {
            let [inputs, outputs] = [sizes[layer], sizes[layer + 1]];
            let activation = if layer == last { Activation::Identity } else { self.activation };
            let LayerActivations { sums, outputs: values } = &layers[layer];
            let (by_weights, by_biases) = pair_mut(&mut gradients, layer);
            let by_outputs = self.gradients.view_mut();
            device.activate_back(activation, sums.view(), values.view(), by_outputs, by_biases)?;
            let below = layer.checked_sub(1).map(|below| layers[below].outputs.view());
            let below = Matrix::new(below.unwrap_or(features.view()), rows, inputs)?;
            let by_sums = Matrix::new(self.gradients.view(), rows, outputs)?;
            device.multiply(below.transposed(), by_sums, 0.0, by_weights)?;
            if layer > 0 {
                let weights = Matrix::new(params[2 * layer], inputs, outputs)?;
                self.gradients_below.fit(&device, rows * inputs)?;
                let by_below = self.gradients_below.view_mut();
                device.multiply(by_sums, weights.transposed(), 0.0, by_below)?;
                std::mem::swap(&mut self.gradients, &mut self.gradients_below);
            }
        }
        Ok(loss)
    }
}

/// Returns the gradients by the weights and by the biases of a layer.
fn pair_mut<'a>(
    gradients: &'a mut [ViewMut<'_, f32>],
    layer: usize,
) -> (ViewMut<'a, f32>, ViewMut<'a, f32>) {
    let (weights, biases) = gradients[2 * layer..].split_at_mut(1);
    (weights[0].reborrow(), biases[0].reborrow())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    fn mlp(sizes: &[usize]) -> Mlp {
        Mlp::new(Device::cpu_threads(2).unwrap(), sizes)
    }

    fn random_params(mlp: &Mlp) -> Vec<Vec<f32>> {
        let shapes = mlp.shapes().into_iter().zip(1..);
        shapes.map(|(shape, seed)| random(seed, shape.iter().product::<u64>() as usize)).collect()
    }

    fn views(params: &[Vec<f32>]) -> Vec<View<'_, f32>> {
        params.iter().map(View::from).collect()
    }

    /// Computes the gradients into poisoned buffers.
    fn gradients(
        mlp: &mut Mlp,
        params: &[Vec<f32>],
        features: &[f32],
        labels: &[u32],
    ) -> Result<(f64, Vec<Vec<f32>>), ComputeError> {
        let mut gradients: Vec<Vec<f32>> =
            params.iter().map(|param| vec![f32::NAN; param.len()]).collect();
        let out = gradients.iter_mut().map(ViewMut::from).collect();
        let loss = mlp.gradients(&views(params), Samples { features, labels }, out)?;
        Ok((loss, gradients))
    }

    /// The loss in `f64`, sample by sample and layer by layer.
    fn reference(
        sizes: &[usize],
        activation: fn(f64) -> f64,
        params: &[Vec<f64>],
        features: &[f32],
        labels: &[u32],
    ) -> f64 {
        let mut losses = 0.0;
        for (features, &label) in features.chunks(sizes[0]).zip(labels) {
            let mut values: Vec<f64> = features.iter().map(|&x| x.into()).collect();
            for (layer, outputs) in sizes[1..].iter().enumerate() {
                let weights = &params[2 * layer];
                let biases = &params[2 * layer + 1];
                let sum = |output: usize| {
                    let products =
                        values.iter().enumerate().map(|(i, x)| x * weights[i * outputs + output]);
                    products.sum::<f64>() + biases[output]
                };
                let is_last = layer + 2 == sizes.len();
                let sums = (0..*outputs).map(sum);
                values = sums.map(|x| if is_last { x } else { activation(x) }).collect();
            }
            let total: f64 = values.iter().map(|logit| logit.exp()).sum();
            losses += total.ln() - values[label as usize];
        }
        losses / labels.len() as f64
    }

    #[test]
    fn gradients_are_the_derivatives_of_the_loss() {
        let relu: fn(f64) -> f64 = |x| x.max(0.0);
        let cases = [
            (vec![5, 3], Activation::Relu, relu),
            (vec![4, 7, 3], Activation::Relu, relu),
            (vec![3, 5, 4, 2], Activation::Tanh, f64::tanh),
        ];
        for (sizes, activation, function) in cases {
            let mut mlp = mlp(&sizes).activation(activation);
            let params = random_params(&mlp);
            let rows = 9;
            let features = random(7, rows * sizes[0]);
            let classes = sizes[sizes.len() - 1] as u32;
            let labels: Vec<u32> = (0..rows as u32).map(|row| row * row % classes).collect();
            // A larger batch first: what it leaves in the buffers must not show.
            let more = random(8, 2 * rows * sizes[0]);
            gradients(&mut mlp, &params, &more, &labels.repeat(2)).unwrap();
            let (loss, found) = gradients(&mut mlp, &params, &features, &labels).unwrap();
            let exact: Vec<Vec<f64>> =
                params.iter().map(|param| param.iter().map(|&x| x.into()).collect()).collect();
            let loss_of =
                |params: &[Vec<f64>]| reference(&sizes, function, params, &features, &labels);
            assert_close(loss, loss_of(&exact), 1e-6);
            for tensor in 0..params.len() {
                assert_gradients(&found[tensor], &params[tensor], |values| {
                    let mut changed = exact.clone();
                    changed[tensor] = values.to_vec();
                    loss_of(&changed)
                });
            }
        }
    }

    #[test]
    fn large_gradients_do_not_depend_on_the_number_of_threads() {
        let on = |threads| {
            let device = Device::cpu_threads(threads).unwrap();
            let mut mlp = Mlp::new(device, &[200, 300, 10]);
            let params = random_params(&mlp);
            let labels: Vec<u32> = (0..130).map(|row| row % 10).collect();
            gradients(&mut mlp, &params, &random(9, 130 * 200), &labels).unwrap()
        };
        assert!((2..=3).all(|threads| on(threads) == on(1)));
    }

    #[test]
    fn accuracy_counts_single_greatest_logits() {
        let mut mlp = mlp(&[2, 2]);
        let params = [vec![1.0, 0.0, 0.0, 1.0], vec![0.0, 0.0]];
        let mut accuracy = |features: &[f32], labels: &[u32]| {
            mlp.accuracy(&views(&params), Samples { features, labels }).unwrap()
        };
        let features = [3.0, 1.0, 1.0, 3.0, 2.0, 2.0, f32::NAN, 0.0];
        assert_eq!(
            accuracy(&features, &[0; 4]),
            0.25,
            "one is right, one wrong, one a tie, one NaN"
        );
        assert_eq!(accuracy(&[], &[]), 0.0);
        // More samples than are classified at once.
        let rows = 2 * ROWS_AT_ONCE + 1;
        let features = [1.0, 0.0].repeat(rows);
        assert_eq!(accuracy(&features, &vec![0; rows]), 1.0);
        assert_eq!(accuracy(&features, &vec![9; rows]), 0.0);
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let mut mlp = mlp(&[2, 3, 2]);
        let params = random_params(&mlp);
        let error = |mlp: &mut Mlp, params: &[Vec<f32>], features: &[f32], labels: &[u32]| {
            gradients(mlp, params, features, labels).unwrap_err().to_string()
        };
        assert_eq!(
            error(&mut mlp, &params, &[0.0; 3], &[0]),
            "Mlp needs 2 elements of features, not 3"
        );
        let found = error(&mut mlp, &params[..2], &[0.0; 2], &[0]);
        assert_eq!(found, "Mlp needs 4 elements of parameters, not 2");
        let found = error(&mut mlp, &params, &[0.0; 2], &[2]);
        assert_eq!(found, "label 2 of sample 0 is not below the 2 classes");
        let found = error(&mut mlp, &params, &[], &[]);
        assert_eq!(found, "softmax_cross_entropy has no samples to average over");
        let mut short = params.clone();
        short[2].pop();
        let found = error(&mut mlp, &short, &[0.0; 2], &[0]);
        assert_eq!(found, "multiply needs 6 elements of a matrix, not 5");
        let mut short = params.clone();
        short[1].pop();
        assert_eq!(
            error(&mut mlp, &short, &[0.0; 2], &[0]),
            "Mlp needs 3 elements of biases, not 2"
        );
        let found = mlp
            .accuracy(&views(&params), Samples { features: &[0.0; 3], labels: &[0] })
            .unwrap_err();
        assert_eq!(found.to_string(), "Mlp needs 2 elements of features, not 3");
    }
}
