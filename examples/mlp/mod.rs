//! A classifier with one hidden layer: loss, gradients and accuracy.
//!
//! The example `digits` trains it, and `pushpull bench --suite mlp` measures it.

pub(crate) mod gemm;

use gemm::{Matrix, multiply};

/// Names of the four tensors, in the order of parameters and gradients: weights and biases of the
/// hidden layer, weights and biases of the output layer.
pub(crate) const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];

/// Borrowed labelled samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Samples<'a> {
    /// The samples one after another.
    pub(crate) features: &'a [f32],
    /// The class of each sample.
    pub(crate) labels: &'a [u8],
}

/// A perceptron with one hidden layer of rectified linear units and a softmax over the classes,
/// trained with cross entropy. It holds no parameters, only reused buffers, so the caller may keep
/// the parameters anywhere.
#[derive(Clone, Debug)]
pub(crate) struct Mlp {
    inputs: usize,
    hidden: usize,
    classes: usize,
    /// Outputs of the hidden layer, one row per sample.
    activations: Vec<f32>,
    /// Outputs of the last layer, then probabilities, then their gradients.
    logits: Vec<f32>,
    /// Gradients by the sums of the hidden layer.
    hidden_gradients: Vec<f32>,
}

impl Mlp {
    /// Creates a network for samples of `inputs` values, with `hidden` units and `classes` outputs.
    pub(crate) fn new(inputs: usize, hidden: usize, classes: usize) -> Mlp {
        let (activations, logits, hidden_gradients) = (Vec::new(), Vec::new(), Vec::new());
        Mlp { inputs, hidden, classes, activations, logits, hidden_gradients }
    }

    /// Returns the shapes of the tensors in the order of [`NAMES`]: `[inputs, hidden]`, `[hidden]`,
    /// `[hidden, classes]` and `[classes]`, stored row by row.
    pub(crate) fn shapes(&self) -> [Vec<usize>; 4] {
        let Mlp { inputs, hidden, classes, .. } = *self;
        [vec![inputs, hidden], vec![hidden], vec![hidden, classes], vec![classes]]
    }

    /// Returns the mean loss over a batch (natural logarithm), and overwrites `gradients` with its
    /// derivatives by each parameter. Costs six floating point operations per weight and sample.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the length of its shape in [`shapes`](Mlp::shapes), if the batch
    /// is empty or has another width, or if a label is not below the number of classes.
    pub(crate) fn gradients(
        &mut self,
        params: [&[f32]; 4],
        batch: Samples<'_>,
        gradients: [&mut [f32]; 4],
    ) -> f32 {
        let rows = batch.labels.len();
        let [_, _, w2, _] = params;
        let [g_w1, g_b1, g_w2, g_b2] = gradients;
        self.forward(params, batch.features, rows);

        let loss = self.softmax_cross_entropy(batch.labels);
        let logits = Matrix::new(&self.logits, rows, self.classes);
        let activations = Matrix::new(&self.activations, rows, self.hidden);
        multiply(activations.transposed(), logits, 0.0, g_w2);
        sum_rows(&self.logits, g_b2);

        self.hidden_gradients.resize(rows * self.hidden, 0.0);
        let w2 = Matrix::new(w2, self.hidden, self.classes);
        multiply(logits, w2.transposed(), 0.0, &mut self.hidden_gradients);
        for (gradient, &activation) in self.hidden_gradients.iter_mut().zip(&self.activations) {
            // Only active units propagate a gradient. The store is unconditional: a branch would be
            // mispredicted for half of the units.
            *gradient = if activation <= 0.0 { 0.0 } else { *gradient };
        }
        let features = Matrix::new(batch.features, rows, self.inputs);
        let hidden_gradients = Matrix::new(&self.hidden_gradients, rows, self.hidden);
        multiply(features.transposed(), hidden_gradients, 0.0, g_w1);
        sum_rows(&self.hidden_gradients, g_b1);
        loss
    }

    /// Returns the share of samples whose label has the single greatest output. Ties and NaN count
    /// as wrong. Zero for no samples.
    ///
    /// # Panics
    ///
    /// As [`gradients`](Mlp::gradients).
    pub(crate) fn accuracy(&mut self, params: [&[f32]; 4], samples: Samples<'_>) -> f64 {
        let mut correct = 0;
        let features = samples.features.chunks(ROWS_AT_ONCE * self.inputs);
        for (features, labels) in features.zip(samples.labels.chunks(ROWS_AT_ONCE)) {
            self.forward(params, features, labels.len());
            let outputs = self.logits.chunks_exact(self.classes);
            correct += outputs.zip(labels).filter(|(logits, label)| wins(logits, **label)).count();
        }
        correct as f64 / samples.labels.len().max(1) as f64
    }

    /// Fills `activations` and `logits`.
    fn forward(&mut self, params: [&[f32]; 4], features: &[f32], rows: usize) {
        let [w1, b1, w2, b2] = params;
        fill_rows(&mut self.activations, rows, b1);
        let features = Matrix::new(features, rows, self.inputs);
        let w1 = Matrix::new(w1, self.inputs, self.hidden);
        multiply(features, w1, 1.0, &mut self.activations);
        for activation in &mut self.activations {
            // `max` would turn NaN into 0 and hide that training has diverged.
            *activation = if *activation < 0.0 { 0.0 } else { *activation };
        }
        fill_rows(&mut self.logits, rows, b2);
        let activations = Matrix::new(&self.activations, rows, self.hidden);
        multiply(activations, Matrix::new(w2, self.hidden, self.classes), 1.0, &mut self.logits);
    }

    /// Returns the mean loss, and replaces `logits` by its derivatives.
    fn softmax_cross_entropy(&mut self, labels: &[u8]) -> f32 {
        assert!(!labels.is_empty(), "the mean loss of no samples");
        let scale = 1.0 / labels.len() as f32;
        let mut loss = 0.0;
        for (logits, &label) in self.logits.chunks_exact_mut(self.classes).zip(labels) {
            let label = usize::from(label);
            // The greatest exponent becomes 0: no exponential overflows, and their sum is at least
            // 1.
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

/// Makes `buffer` a matrix of `rows` copies of `row`.
fn fill_rows(buffer: &mut Vec<f32>, rows: usize, row: &[f32]) {
    buffer.clear();
    for _ in 0..rows {
        buffer.extend_from_slice(row);
    }
}

/// Writes the sum of all rows of `matrix` to `sum`, whose length is the row width.
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

/// Number of samples classified at once, which bounds the buffers.
const ROWS_AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use pushpull::variable::{Initializer, Shape};

    use super::*;

    fn views(params: &[Vec<f32>; 4]) -> [&[f32]; 4] {
        params.each_ref().map(Vec::as_slice)
    }

    fn views_mut(params: &mut [Vec<f32>; 4]) -> [&mut [f32]; 4] {
        params.each_mut().map(Vec::as_mut_slice)
    }

    fn zeros(mlp: &Mlp) -> [Vec<f32>; 4] {
        mlp.shapes().map(|shape| vec![0.0; shape.iter().product()])
    }

    /// Returns values within `limit` of zero.
    fn random(name: &str, count: usize, limit: f64) -> Vec<f32> {
        let mut values = vec![0.0; count];
        let uniform = Initializer::Uniform { low: -limit, high: limit };
        uniform.fill(11, name, &Shape::new([count as u64]).unwrap(), 0, &mut values);
        values
    }

    fn random_params(mlp: &Mlp) -> [Vec<f32>; 4] {
        let mut tensor = 0;
        mlp.shapes().map(|shape| {
            tensor += 1;
            random(NAMES[tensor - 1], shape.iter().product(), 0.7)
        })
    }

    struct MlpBatch {
        features: Vec<f32>,
        labels: Vec<u8>,
    }

    impl MlpBatch {
        fn random(rows: usize, width: usize, classes: usize) -> MlpBatch {
            let class = |row: usize| (row * row % classes) as u8;
            let features = random("features", rows * width, 1.0);
            MlpBatch { features, labels: (0..rows).map(class).collect() }
        }

        fn samples(&self) -> Samples<'_> {
            Samples { features: &self.features, labels: &self.labels }
        }
    }

    /// Computes the loss by its definition, in double precision and without the code above.
    fn reference_loss(params: &[Vec<f64>; 4], batch: &MlpBatch) -> f64 {
        let [w1, b1, w2, b2] = params;
        let layer = |inputs: &[f64], weights: &[f64], biases: &[f64]| -> Vec<f64> {
            let sum = |output: usize| -> f64 {
                let weights = weights.iter().skip(output).step_by(biases.len());
                inputs.iter().zip(weights).map(|(input, weight)| input * weight).sum()
            };
            biases.iter().enumerate().map(|(output, bias)| bias + sum(output)).collect()
        };
        let mut loss = 0.0;
        let width = batch.features.len() / batch.labels.len();
        for (features, &label) in batch.features.chunks(width).zip(&batch.labels) {
            let features: Vec<f64> = features.iter().map(|&value| f64::from(value)).collect();
            let hidden: Vec<f64> =
                layer(&features, w1, b1).into_iter().map(|sum| sum.max(0.0)).collect();
            let logits = layer(&hidden, w2, b2);
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            loss += sum.ln() - logits[usize::from(label)];
        }
        loss / batch.labels.len() as f64
    }

    #[test]
    fn gradients_agree_with_central_differences() {
        let mut mlp = Mlp::new(5, 7, 4);
        let batch = MlpBatch::random(6, 5, 4);
        let params = random_params(&mlp);
        let mut gradients = zeros(&mlp).map(|tensor| vec![f32::NAN; tensor.len()]);
        let loss = mlp.gradients(views(&params), batch.samples(), views_mut(&mut gradients));

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
    fn equal_outputs_have_a_loss_of_the_logarithm_of_the_classes() {
        let mut mlp = Mlp::new(5, 7, 4);
        let (params, mut gradients) = (zeros(&mlp), zeros(&mlp));
        let batch = MlpBatch::random(6, 5, 4);
        let loss = mlp.gradients(views(&params), batch.samples(), views_mut(&mut gradients));
        assert!((loss - 4f32.ln()).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn large_outputs_do_not_overflow_and_nan_propagates() {
        let mut mlp = Mlp::new(5, 7, 4);
        let mut params = zeros(&mlp);
        let mut gradients = zeros(&mlp);
        let mut batch = MlpBatch::random(1, 5, 4);
        batch.labels[0] = 1;
        params[3] = vec![1e4, -1e4, 0.0, 1e4];
        let loss = mlp.gradients(views(&params), batch.samples(), views_mut(&mut gradients));
        assert!((loss - 2e4).abs() < 1.0, "{loss}");
        assert_eq!(gradients[3], [0.5, -1.0, 0.0, 0.5]);

        params[0][0] = f32::NAN;
        assert!(mlp.gradients(views(&params), batch.samples(), views_mut(&mut gradients)).is_nan());
        assert!(gradients[3][0].is_nan());
    }

    #[test]
    fn accuracy_counts_ties_and_nan_as_wrong() {
        let mut mlp = Mlp::new(1, 1, 2);
        let labels = (0..600).map(|row| u8::from(row % 3 == 0)).collect();
        let batch = MlpBatch { features: vec![1.0; 600], labels };
        let mut params = zeros(&mlp);
        assert_eq!(mlp.accuracy(views(&params), batch.samples()), 0.0);
        params[3] = vec![0.0, 1.0];
        assert_eq!(mlp.accuracy(views(&params), batch.samples()), 1.0 / 3.0);
        params[3] = vec![0.0, f32::NAN];
        assert_eq!(mlp.accuracy(views(&params), batch.samples()), 0.0);
    }
}
