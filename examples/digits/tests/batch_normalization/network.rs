//! [`Network`]: a classifier with one hidden layer, whose sums are normalized over the batch.

/// The trained tensors, in the order of parameters and gradients.
pub(crate) const TRAINED: [&str; 5] = ["w1", "gamma", "beta", "w2", "b2"];

/// The running statistics: mean and variance of each hidden unit.
pub(crate) const STATISTICS: [&str; 2] = ["running_mean", "running_variance"];

/// The share of the running statistics that a batch leaves as it is.
const MOMENTUM: f32 = 0.9;

const EPSILON: f32 = 1e-5;

/// The sizes of the layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network {
    pub(crate) inputs: usize,
    pub(crate) hidden: usize,
    pub(crate) classes: usize,
}

/// Samples one after another, and their classes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    pub(crate) features: Vec<f32>,
    pub(crate) labels: Vec<usize>,
}

/// The hidden layer of a batch, as the backward pass needs it.
struct HiddenLayer {
    /// The sums less their mean, over their standard deviation; one row for each sample.
    normalized: Vec<f32>,
    /// The outputs of the rectified linear units.
    outputs: Vec<f32>,
}

impl Network {
    /// Returns the shapes of the trained tensors.
    pub(crate) fn shapes(&self) -> [Vec<u64>; 5] {
        let [inputs, hidden, classes] =
            [self.inputs, self.hidden, self.classes].map(|size| size as u64);
        [vec![inputs, hidden], vec![hidden], vec![hidden], vec![hidden, classes], vec![classes]]
    }

    /// Returns the mean loss over a batch, overwrites `gradients` with its derivatives, and moves
    /// the running statistics towards those of the batch.
    pub(crate) fn train(
        &self,
        params: [&[f32]; 5],
        batch: &Samples,
        gradients: [&mut [f32]; 5],
        statistics: [&mut [f32]; 2],
    ) -> f32 {
        let Network { hidden, classes, .. } = *self;
        let [_, gamma, _, w2, _] = params;
        let [g_w1, g_gamma, g_beta, g_w2, g_b2] = gradients;
        let rows = batch.labels.len();
        let sums = self.sums(params, batch);
        let mut batch_statistics = [vec![0.0; hidden], vec![0.0; hidden]];
        let [mean, variance] = &mut batch_statistics;
        let share = 1.0 / rows as f32;
        each(&sums, hidden, |_, unit, sum| mean[unit] += share * sum);
        each(&sums, hidden, |_, unit, sum| {
            variance[unit] += share * (sum - mean[unit]) * (sum - mean[unit]);
        });
        let layer = self.hidden(params, &sums, [&mean[..], &variance[..]]);
        let (loss, logits) = self.loss(params, &layer.outputs, &batch.labels);

        let mut errors = vec![0.0; rows * hidden];
        [&mut *g_w1, g_gamma, g_beta, g_w2, g_b2].into_iter().for_each(|it| it.fill(0.0));
        each(&logits, classes, |row, class, error| {
            g_b2[class] += error;
            for unit in 0..hidden {
                let output = layer.outputs[row * hidden + unit];
                g_w2[unit * classes + class] += output * error;
                if output > 0.0 {
                    errors[row * hidden + unit] += w2[unit * classes + class] * error;
                }
            }
        });
        each(&errors, hidden, |row, unit, error| {
            g_beta[unit] += error;
            g_gamma[unit] += error * layer.normalized[row * hidden + unit];
        });
        each(&errors, hidden, |row, unit, error| {
            let normalized = layer.normalized[row * hidden + unit];
            let centred = error - share * (g_beta[unit] + normalized * g_gamma[unit]);
            let error = gamma[unit] * centred / (variance[unit] + EPSILON).sqrt();
            for (input, feature) in self.row(batch, row).iter().enumerate() {
                g_w1[input * hidden + unit] += feature * error;
            }
        });
        for (running, batch) in statistics.into_iter().zip(&batch_statistics) {
            for (running, batch) in running.iter_mut().zip(batch) {
                *running = MOMENTUM * *running + (1.0 - MOMENTUM) * batch;
            }
        }
        loss
    }

    /// Returns the share of samples whose class has the greatest output, with the running
    /// statistics in place of those of a batch.
    pub(crate) fn accuracy(
        &self,
        params: [&[f32]; 5],
        statistics: [&[f32]; 2],
        samples: &Samples,
    ) -> f64 {
        let layer = self.hidden(params, &self.sums(params, samples), statistics);
        let logits = self.logits(params, &layer.outputs);
        let rows = logits.chunks_exact(self.classes).zip(&samples.labels);
        let is_right = |(logits, label): &(&[f32], &usize)| {
            logits.iter().enumerate().all(|(class, it)| class == **label || *it < logits[**label])
        };
        rows.filter(is_right).count() as f64 / samples.labels.len() as f64
    }

    fn row<'a>(&self, samples: &'a Samples, row: usize) -> &'a [f32] {
        &samples.features[row * self.inputs..(row + 1) * self.inputs]
    }

    /// Returns the sums of the hidden layer before the normalization.
    fn sums(&self, [w1, ..]: [&[f32]; 5], samples: &Samples) -> Vec<f32> {
        let mut sums = vec![0.0; samples.labels.len() * self.hidden];
        for (row, sums) in sums.chunks_exact_mut(self.hidden).enumerate() {
            for (feature, weights) in
                self.row(samples, row).iter().zip(w1.chunks_exact(self.hidden))
            {
                sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += feature * weight);
            }
        }
        sums
    }

    fn hidden(
        &self,
        [_, gamma, beta, ..]: [&[f32]; 5],
        sums: &[f32],
        [mean, variance]: [&[f32]; 2],
    ) -> HiddenLayer {
        let mut normalized = sums.to_vec();
        let mut outputs = sums.to_vec();
        each(sums, self.hidden, |row, unit, sum| {
            let at = row * self.hidden + unit;
            normalized[at] = (sum - mean[unit]) / (variance[unit] + EPSILON).sqrt();
            outputs[at] = (gamma[unit] * normalized[at] + beta[unit]).max(0.0);
        });
        HiddenLayer { normalized, outputs }
    }

    fn logits(&self, [_, _, _, w2, b2]: [&[f32]; 5], outputs: &[f32]) -> Vec<f32> {
        let rows = outputs.chunks_exact(self.hidden);
        let mut logits = Vec::with_capacity(rows.len() * self.classes);
        for outputs in rows {
            let first = logits.len();
            logits.extend_from_slice(b2);
            for (output, weights) in outputs.iter().zip(w2.chunks_exact(self.classes)) {
                let logits = logits[first..].iter_mut().zip(weights);
                logits.for_each(|(logit, weight)| *logit += output * weight);
            }
        }
        logits
    }

    /// Returns the mean cross entropy, and its derivatives by the logits.
    fn loss(&self, params: [&[f32]; 5], outputs: &[f32], labels: &[usize]) -> (f32, Vec<f32>) {
        let mut loss = 0.0;
        let mut logits = self.logits(params, outputs);
        for (logits, &label) in logits.chunks_exact_mut(self.classes).zip(labels) {
            let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            loss += greatest - logits[label];
            logits.iter_mut().for_each(|logit| *logit = (*logit - greatest).exp());
            let sum: f32 = logits.iter().sum();
            loss += sum.ln();
            let share = 1.0 / (sum * labels.len() as f32);
            logits.iter_mut().for_each(|logit| *logit *= share);
            logits[label] -= 1.0 / labels.len() as f32;
        }
        (loss / labels.len() as f32, logits)
    }
}

/// Calls `visit` with the row, the column and the value of each element of a matrix.
fn each(matrix: &[f32], width: usize, mut visit: impl FnMut(usize, usize, f32)) {
    for (at, &value) in matrix.iter().enumerate() {
        visit(at / width, at % width, value);
    }
}
