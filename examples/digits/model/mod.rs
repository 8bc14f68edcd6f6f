//! A classifier with one hidden layer: its loss, its gradients and its accuracy.

mod gemm;

use crate::data::{Batch, Dataset};
#[cfg(test)]
use crate::random::SplitMix64;
use gemm::{Matrix, multiply};

/// The names of the four tensors, in the order in which parameters and gradients are passed:
/// weights and biases of the hidden layer, weights and biases of the output layer.
pub(crate) const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];

/// A perceptron with one hidden layer of rectified linear units and a softmax over the classes,
/// trained by cross entropy. It holds no parameters, only buffers that it reuses, so the
/// parameters may lie wherever the caller keeps them.
#[derive(Clone, Debug)]
pub(crate) struct Mlp {
    inputs: usize,
    hidden: usize,
    classes: usize,
    /// Outputs of the hidden layer, one row for each sample.
    activations: Vec<f32>,
    /// Outputs of the last layer; then probabilities; then their gradients.
    logits: Vec<f32>,
    /// Gradients of the hidden layer's sums.
    hidden_gradients: Vec<f32>,
}

impl Mlp {
    /// A network for samples of `inputs` values, with `hidden` units and `classes` outputs.
    pub(crate) fn new(inputs: usize, hidden: usize, classes: usize) -> Mlp {
        let (activations, logits, hidden_gradients) = (Vec::new(), Vec::new(), Vec::new());
        Mlp { inputs, hidden, classes, activations, logits, hidden_gradients }
    }

    /// The shapes of the tensors, in the order of [`NAMES`]: `[inputs, hidden]`, `[hidden]`,
    /// `[hidden, classes]` and `[classes]`, stored row by row.
    pub(crate) fn shapes(&self) -> [Vec<usize>; 4] {
        let Mlp { inputs, hidden, classes, .. } = *self;
        [vec![inputs, hidden], vec![hidden], vec![hidden, classes], vec![classes]]
    }

    /// Initial values in the order of [`NAMES`]: weights drawn uniformly within
    /// `sqrt(6 / (inputs + outputs))` of zero (Glorot and Bengio, 2010), biases zero.
    #[cfg(test)]
    pub(crate) fn initialize(&self, seed: u64) -> [Vec<f32>; 4] {
        let weights = |index, inputs: usize, outputs: usize| {
            let limit = (6.0 / (inputs + outputs) as f32).sqrt();
            let mut random = SplitMix64::stream(seed, index);
            (0..inputs * outputs).map(|_| random.symmetric(limit)).collect()
        };
        [
            weights(0, self.inputs, self.hidden),
            vec![0.0; self.hidden],
            weights(2, self.hidden, self.classes),
            vec![0.0; self.classes],
        ]
    }

    /// The mean loss over `batch` (natural logarithm), and in `gradients` its derivatives by each
    /// parameter. Whatever `gradients` held before is overwritten. Costs six floating point
    /// operations for each weight and sample.
    ///
    /// # Panics
    ///
    /// If a tensor has not the length that its shape in [`shapes`](Mlp::shapes) says, if the batch
    /// is empty or of another width, or if a label is no class.
    pub(crate) fn gradients(
        &mut self,
        params: [&[f32]; 4],
        batch: &Batch,
        gradients: [&mut [f32]; 4],
    ) -> f32 {
        let rows = batch.rows();
        let [_, _, w2, _] = params;
        let [g_w1, g_b1, g_w2, g_b2] = gradients;
        self.forward(params, &batch.features, rows);

        let loss = self.softmax_cross_entropy(&batch.labels);
        let logits = Matrix::new(&self.logits, rows, self.classes);
        let activations = Matrix::new(&self.activations, rows, self.hidden);
        multiply(activations.transposed(), logits, 0.0, g_w2);
        sum_rows(&self.logits, g_b2);

        self.hidden_gradients.resize(rows * self.hidden, 0.0);
        let w2 = Matrix::new(w2, self.hidden, self.classes);
        multiply(logits, w2.transposed(), 0.0, &mut self.hidden_gradients);
        for (gradient, &activation) in self.hidden_gradients.iter_mut().zip(&self.activations) {
            // Only a unit that was switched on passes anything back.
            if activation <= 0.0 {
                *gradient = 0.0;
            }
        }
        let features = Matrix::new(&batch.features, rows, self.inputs);
        let hidden_gradients = Matrix::new(&self.hidden_gradients, rows, self.hidden);
        multiply(features.transposed(), hidden_gradients, 0.0, g_w1);
        sum_rows(&self.hidden_gradients, g_b1);
        loss
    }

    /// The share of samples for whose label the output is greater than for any other class; a
    /// tie and NaN count as wrong. Zero for an empty dataset.
    ///
    /// # Panics
    ///
    /// As [`gradients`](Mlp::gradients).
    pub(crate) fn accuracy(&mut self, params: [&[f32]; 4], dataset: &Dataset) -> f64 {
        let mut correct = 0;
        let features = dataset.features.chunks(ROWS_AT_ONCE * self.inputs);
        for (features, labels) in features.zip(dataset.labels.chunks(ROWS_AT_ONCE)) {
            self.forward(params, features, labels.len());
            let outputs = self.logits.chunks_exact(self.classes);
            correct += outputs.zip(labels).filter(|(logits, label)| wins(logits, **label)).count();
        }
        correct as f64 / dataset.rows().max(1) as f64
    }

    /// Fills `activations` and `logits`.
    fn forward(&mut self, params: [&[f32]; 4], features: &[f32], rows: usize) {
        let [w1, b1, w2, b2] = params;
        fill_rows(&mut self.activations, rows, b1);
        let features = Matrix::new(features, rows, self.inputs);
        let w1 = Matrix::new(w1, self.inputs, self.hidden);
        multiply(features, w1, 1.0, &mut self.activations);
        for activation in &mut self.activations {
            // Not `max`, which would turn NaN into 0 and hide that training has diverged.
            if *activation < 0.0 {
                *activation = 0.0;
            }
        }
        fill_rows(&mut self.logits, rows, b2);
        let activations = Matrix::new(&self.activations, rows, self.hidden);
        multiply(activations, Matrix::new(w2, self.hidden, self.classes), 1.0, &mut self.logits);
    }

    /// The mean loss; `logits` become its derivatives by them.
    fn softmax_cross_entropy(&mut self, labels: &[u8]) -> f32 {
        assert!(!labels.is_empty(), "the mean loss of no samples");
        let scale = 1.0 / labels.len() as f32;
        let mut loss = 0.0;
        for (logits, &label) in self.logits.chunks_exact_mut(self.classes).zip(labels) {
            let label = usize::from(label);
            // The greatest exponent becomes 0, so no exponential overflows and their sum is at
            // least 1.
            let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let label_logit = logits[label] - greatest;
            let mut sum = 0.0;
            for logit in logits.iter_mut() {
                *logit = (*logit - greatest).exp();
                sum += *logit;
            }
            loss += f64::from(sum.ln() - label_logit);
            for probability in logits.iter_mut() {
                *probability *= scale / sum;
            }
            logits[label] -= scale;
        }
        (loss / labels.len() as f64) as f32
    }
}

/// Makes `buffer` a matrix whose rows all equal `row`.
fn fill_rows(buffer: &mut Vec<f32>, rows: usize, row: &[f32]) {
    buffer.clear();
    for _ in 0..rows {
        buffer.extend_from_slice(row);
    }
}

/// Writes the sum of all rows of `matrix` to `sum`, whose length is the width of a row.
fn sum_rows(matrix: &[f32], sum: &mut [f32]) {
    sum.fill(0.0);
    for row in matrix.chunks_exact(sum.len()) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += value;
        }
    }
}

fn wins(logits: &[f32], label: u8) -> bool {
    let label = usize::from(label);
    let others = logits.iter().enumerate().filter(|(class, _)| *class != label);
    others.into_iter().all(|(_, logit)| *logit < logits[label])
}

/// Samples that are classified together, so that the buffers stay small.
const ROWS_AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Batches, Split};

    fn views(params: &[Vec<f32>; 4]) -> [&[f32]; 4] {
        params.each_ref().map(Vec::as_slice)
    }

    fn views_mut(params: &mut [Vec<f32>; 4]) -> [&mut [f32]; 4] {
        params.each_mut().map(Vec::as_mut_slice)
    }

    fn zeros(mlp: &Mlp) -> [Vec<f32>; 4] {
        mlp.shapes().map(|shape| vec![0.0; shape.iter().product()])
    }

    fn random_batch(rows: usize, width: usize, classes: usize) -> Batch {
        let mut random = SplitMix64::new(11);
        Batch {
            features: (0..rows * width).map(|_| random.symmetric(1.0)).collect(),
            labels: (0..rows).map(|_| random.below(classes) as u8).collect(),
        }
    }

    /// The loss by its definition, in double precision and without any of the code above.
    fn reference_loss(params: &[Vec<f64>; 4], batch: &Batch) -> f64 {
        let [w1, b1, w2, b2] = params;
        let layer = |inputs: &[f64], weights: &[f64], biases: &[f64]| -> Vec<f64> {
            let sum = |output: usize| -> f64 {
                let weights = weights.iter().skip(output).step_by(biases.len());
                inputs.iter().zip(weights).map(|(input, weight)| input * weight).sum()
            };
            biases.iter().enumerate().map(|(output, bias)| bias + sum(output)).collect()
        };
        let mut loss = 0.0;
        let width = batch.features.len() / batch.rows();
        for (features, &label) in batch.features.chunks(width).zip(&batch.labels) {
            let features: Vec<f64> = features.iter().map(|&value| f64::from(value)).collect();
            let hidden: Vec<f64> =
                layer(&features, w1, b1).into_iter().map(|sum| sum.max(0.0)).collect();
            let logits = layer(&hidden, w2, b2);
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            loss += sum.ln() - logits[usize::from(label)];
        }
        loss / batch.rows() as f64
    }

    #[test]
    fn gradients_agree_with_central_differences() {
        let mut mlp = Mlp::new(5, 7, 4);
        let batch = random_batch(6, 5, 4);
        let mut params = mlp.initialize(3);
        let mut random = SplitMix64::new(9);
        for tensor in [1, 3] {
            params[tensor].fill_with(|| random.symmetric(0.3));
        }
        let mut gradients = zeros(&mlp).map(|tensor| vec![f32::NAN; tensor.len()]);
        let loss = mlp.gradients(views(&params), &batch, views_mut(&mut gradients));

        let mut wide = params.map(|tensor| tensor.into_iter().map(f64::from).collect::<Vec<_>>());
        let expected = reference_loss(&wide, &batch);
        assert!((f64::from(loss) - expected).abs() < 1e-5, "{loss} {expected}");
        for tensor in 0..4 {
            assert!(gradients[tensor].iter().any(|gradient| gradient.abs() > 1e-3));
            for index in 0..wide[tensor].len() {
                let value = wide[tensor][index];
                let mut loss_at = |value| {
                    wide[tensor][index] = value;
                    reference_loss(&wide, &batch)
                };
                let difference = (loss_at(value + 1e-5) - loss_at(value - 1e-5)) / 2e-5;
                loss_at(value);
                let gradient = f64::from(gradients[tensor][index]);
                assert!(
                    (gradient - difference).abs() < 1e-5 + 1e-4 * difference.abs(),
                    "{} [{index}]: {gradient} {difference}",
                    NAMES[tensor]
                );
            }
        }
    }

    #[test]
    fn knowing_nothing_costs_the_logarithm_of_the_classes() {
        let mut mlp = Mlp::new(5, 7, 4);
        let (params, mut gradients) = (zeros(&mlp), zeros(&mlp));
        let batch = random_batch(6, 5, 4);
        let loss = mlp.gradients(views(&params), &batch, views_mut(&mut gradients));
        assert!((loss - 4f32.ln()).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn great_outputs_do_not_overflow_and_nan_is_not_hidden() {
        let mut mlp = Mlp::new(5, 7, 4);
        let mut params = zeros(&mlp);
        let mut gradients = zeros(&mlp);
        let mut batch = random_batch(1, 5, 4);
        batch.labels[0] = 1;
        params[3] = vec![1e4, -1e4, 0.0, 1e4];
        let loss = mlp.gradients(views(&params), &batch, views_mut(&mut gradients));
        assert!((loss - 2e4).abs() < 1.0, "{loss}");
        assert_eq!(gradients[3], [0.5, -1.0, 0.0, 0.5]);

        params[0][0] = f32::NAN;
        assert!(mlp.gradients(views(&params), &batch, views_mut(&mut gradients)).is_nan());
        assert!(gradients[3][0].is_nan());
    }

    #[test]
    fn accuracy_counts_ties_and_nan_as_wrong() {
        let mut mlp = Mlp::new(1, 1, 2);
        let dataset = Dataset {
            features: vec![1.0; 600],
            width: 1,
            labels: (0..600).map(|row| u8::from(row % 3 == 0)).collect(),
            classes: 2,
        };
        let mut params = zeros(&mlp);
        assert_eq!(mlp.accuracy(views(&params), &dataset), 0.0);
        params[3] = vec![0.0, 1.0];
        assert_eq!(mlp.accuracy(views(&params), &dataset), 1.0 / 3.0);
        params[3] = vec![0.0, f32::NAN];
        assert_eq!(mlp.accuracy(views(&params), &dataset), 0.0);
    }

    #[test]
    fn initial_weights_stay_within_the_limit_of_glorot() {
        let mlp = Mlp::new(64, 32, 10);
        let [w1, b1, w2, b2] = mlp.initialize(1);
        for (weights, sides) in [(&w1, 96.0), (&w2, 42.0)] {
            let limit = (6.0f32 / sides).sqrt();
            let greatest = weights.iter().fold(0f32, |greatest, weight| greatest.max(weight.abs()));
            assert!(greatest <= limit && greatest > 0.9 * limit, "{greatest} {limit}");
        }
        assert!(b1.iter().chain(&b2).all(|&bias| bias == 0.0));
        assert_ne!(w1, mlp.initialize(2)[0]);
    }

    #[test]
    fn descending_the_gradient_learns_the_digits() {
        let Split { train, test } = Split::digits();
        let mut mlp = Mlp::new(train.width, 64, train.classes);
        let (mut params, mut gradients) = (mlp.initialize(1), zeros(&mlp));
        let mut batches = Batches::new(train.rows(), 0, 1, 32, 1).unwrap();
        let mut batch = Batch::default();
        let mut loss = f32::NAN;
        for _ in 0..600 {
            batches.next_into(&train, &mut batch);
            loss = mlp.gradients(views(&params), &batch, views_mut(&mut gradients));
            for (param, gradient) in params.iter_mut().flatten().zip(gradients.iter().flatten()) {
                *param -= 0.3 * gradient;
            }
        }
        let accuracy = mlp.accuracy(views(&params), &test);
        assert!(accuracy >= 0.95, "accuracy {accuracy}, last loss {loss}");
    }
}
