//! [`Mlp`]: a classifier of fully connected layers.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::activation::Activation;
use crate::kernels::gemm::Matrix;

/// Borrowed labelled samples.
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
/// biases of shape `[outputs]`. [`Mlp::shapes`] gives their order.
///
/// ```
/// use pushpull_device::{Device, Mlp, Samples};
///
/// let mut mlp = Mlp::new(Device::cpu()?, &[2, 3]);
/// let (weights, biases) = ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.0; 3]);
/// let (mut by_weights, mut by_biases) = ([0.0; 6], [0.0; 3]);
/// let batch = Samples { features: &[1.0, -1.0], labels: &[2] };
/// let gradients: &mut [&mut [f32]] = &mut [&mut by_weights, &mut by_biases];
/// let loss = mlp.gradients(&[&weights, &biases], batch, gradients)?;
/// assert!((loss - 3_f64.ln()).abs() < 1e-6, "all classes are equally likely");
/// # Ok::<(), pushpull_device::ComputeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mlp {
    device: Device,
    /// The number of inputs, then that of the outputs of each layer.
    sizes: Vec<usize>,
    activation: Activation,
    layers: Vec<Layer>,
    /// The gradients by the outputs of a layer, and by those of the layer below it.
    gradients: Vec<f32>,
    gradients_below: Vec<f32>,
}

/// What a layer computed for the last batch, one row per sample.
#[derive(Clone, Debug, Default)]
struct Layer {
    sums: Vec<f32>,
    outputs: Vec<f32>,
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
            layers: vec![Layer::default(); sizes.len() - 1],
            gradients: Vec::new(),
            gradients_below: Vec::new(),
        }
    }

    /// Sets the activation of the hidden layers.
    pub fn activation(mut self, activation: Activation) -> Mlp {
        self.activation = activation;
        self
    }

    /// Returns the shapes of the parameters: weights and biases of the first layer, then those of
    /// the next. All are stored row by row.
    pub fn shapes(&self) -> Vec<Vec<u64>> {
        let layers = self.sizes.windows(2);
        layers
            .flat_map(|sizes| {
                let [inputs, outputs] = [sizes[0] as u64, sizes[1] as u64];
                [vec![inputs, outputs], vec![outputs]]
            })
            .collect()
    }

    /// Returns the mean loss over a batch (natural logarithm), and overwrites `gradients` with its
    /// derivatives by each parameter. Costs six floating point operations per weight and sample.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without labels; [`ComputeError::Length`] if `features` does not have
    /// a row for each label, or if a tensor does not have the length of its shape;
    /// [`ComputeError::Label`].
    pub fn gradients(
        &mut self,
        params: &[&[f32]],
        batch: Samples<'_>,
        gradients: &mut [&mut [f32]],
    ) -> Result<f64, ComputeError> {
        let Samples { features, labels } = batch;
        let rows = labels.len();
        check_length(NAME, "gradients", gradients.len(), params.len())?;
        for (gradient, param) in gradients.iter().zip(params) {
            check_length(NAME, "a gradient", gradient.len(), param.len())?;
        }
        self.forward(params, features, rows)?;
        let Mlp { device, sizes, layers, .. } = self;
        let last = layers.len() - 1;
        self.gradients.clone_from(&layers[last].outputs);
        let loss = device.softmax_cross_entropy(&mut self.gradients, sizes[last + 1], labels)?;
        for layer in (0..=last).rev() {
            let [inputs, outputs] = [sizes[layer], sizes[layer + 1]];
            let activation = if layer == last { Activation::Identity } else { self.activation };
            let Layer { sums, outputs: values } = &layers[layer];
            let (by_weights, by_biases) = pair_mut(gradients, layer);
            device.activate_back(activation, sums, values, &mut self.gradients, by_biases)?;
            let below = layer.checked_sub(1).map_or(features, |below| &layers[below].outputs);
            let below = Matrix::new(below, rows, inputs)?;
            let by_sums = Matrix::new(&self.gradients, rows, outputs)?;
            device.multiply(below.transposed(), by_sums, 0.0, by_weights)?;
            if layer > 0 {
                let weights = Matrix::new(params[2 * layer], inputs, outputs)?;
                self.gradients_below.resize(rows * inputs, 0.0);
                device.multiply(by_sums, weights.transposed(), 0.0, &mut self.gradients_below)?;
                std::mem::swap(&mut self.gradients, &mut self.gradients_below);
            }
        }
        Ok(loss)
    }

    /// Returns the logits of each sample: one row per sample, one column per class.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if `features` is not rows of the number of inputs, or if a tensor
    /// does not have the length of its shape.
    pub fn logits(&mut self, params: &[&[f32]], features: &[f32]) -> Result<&[f32], ComputeError> {
        let rows = features.len().checked_div(self.sizes[0]).unwrap_or(0);
        self.forward(params, features, rows)?;
        Ok(self.layers.last().map_or(&[], |layer| &layer.outputs))
    }

    /// Returns the share of samples whose label has the single greatest logit. Ties and NaN count
    /// as wrong. Zero for no samples.
    ///
    /// # Errors
    /// Those of [`Mlp::logits`]; [`ComputeError::Length`] if there are not as many labels as
    /// samples.
    pub fn accuracy(
        &mut self,
        params: &[&[f32]],
        samples: Samples<'_>,
    ) -> Result<f64, ComputeError> {
        let Samples { features, labels } = samples;
        let (inputs, classes) = (self.sizes[0], self.sizes[self.sizes.len() - 1]);
        check_length(NAME, "features", features.len(), labels.len().saturating_mul(inputs))?;
        let mut correct = 0;
        for (chunk, labels) in labels.chunks(ROWS_AT_ONCE).enumerate() {
            let features = &features[chunk * ROWS_AT_ONCE * inputs..][..labels.len() * inputs];
            let logits = self.logits(params, features)?.chunks_exact(classes.max(1));
            correct += logits.zip(labels).filter(|(logits, label)| wins(logits, **label)).count();
        }
        Ok(correct as f64 / labels.len().max(1) as f64)
    }

    /// Fills the sums and the outputs of all layers.
    fn forward(
        &mut self,
        params: &[&[f32]],
        features: &[f32],
        rows: usize,
    ) -> Result<(), ComputeError> {
        check_length(NAME, "parameters", params.len(), 2 * self.layers.len())?;
        check_length(NAME, "features", features.len(), rows.saturating_mul(self.sizes[0]))?;
        let last = self.layers.len() - 1;
        for index in 0..=last {
            let [inputs, outputs] = [self.sizes[index], self.sizes[index + 1]];
            let (before, layers) = self.layers.split_at_mut(index);
            let Layer { sums, outputs: values } = &mut layers[0];
            let below = before.last().map_or(features, |layer| &layer.outputs);
            let (weights, biases) = (params[2 * index], params[2 * index + 1]);
            check_length(NAME, "biases", biases.len(), outputs)?;
            sums.resize(rows * outputs, 0.0);
            values.resize(rows * outputs, 0.0);
            let (below, weights) =
                (Matrix::new(below, rows, inputs)?, Matrix::new(weights, inputs, outputs)?);
            self.device.multiply(below, weights, 0.0, sums)?;
            let activation = if index == last { Activation::Identity } else { self.activation };
            self.device.activate(activation, biases, sums, values)?;
        }
        Ok(())
    }
}

/// Returns the gradients by the weights and by the biases of a layer.
fn pair_mut<'a>(gradients: &'a mut [&mut [f32]], layer: usize) -> (&'a mut [f32], &'a mut [f32]) {
    let (weights, biases) = gradients[2 * layer..].split_at_mut(1);
    (&mut *weights[0], &mut *biases[0])
}

fn wins(logits: &[f32], label: u32) -> bool {
    let Some(logit) = logits.get(label as usize) else { return false };
    let others = logits.iter().enumerate().filter(|(class, _)| *class != label as usize);
    others.into_iter().all(|(_, other)| other < logit)
}

/// Number of samples classified at once, which bounds the buffers.
const ROWS_AT_ONCE: usize = 256;

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

    fn views(params: &[Vec<f32>]) -> Vec<&[f32]> {
        params.iter().map(Vec::as_slice).collect()
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
        let mut out: Vec<&mut [f32]> = gradients.iter_mut().map(Vec::as_mut_slice).collect();
        let loss = mlp.gradients(&views(params), Samples { features, labels }, &mut out)?;
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
                let (weights, biases) = (&params[2 * layer], &params[2 * layer + 1]);
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
