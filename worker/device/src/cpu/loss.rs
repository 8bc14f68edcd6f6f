//! Losses and their derivatives, on the threads of a pool.

use super::activation::sigmoid;
use super::elementwise::ROWS_AT_ONCE;
use super::pool::ThreadPool;

impl ThreadPool {
    /// Returns the sum of the losses. Each label is below `classes`.
    pub(crate) fn softmax_cross_entropy(
        &self,
        logits: &mut [f32],
        classes: usize,
        labels: &[u32],
    ) -> f64 {
        let scale = 1.0 / labels.len() as f32;
        self.sum_of_losses(logits, classes, |first, rows| {
            let labels = &labels[first..];
            let losses = rows
                .chunks_exact_mut(classes)
                .zip(labels)
                .map(|(row, &label)| softmax_cross_entropy_of(row, label as usize, scale));
            losses.sum()
        })
    }

    /// Returns the sum of the losses.
    pub(crate) fn sigmoid_cross_entropy(&self, logits: &mut [f32], targets: &[f32]) -> f64 {
        self.sum_of_single_losses(logits, targets, |x, target| {
            // log(1 + exp(x)) - target * x, with an exponent that is never above 0.
            let loss = x.max(0.0) - x * target + (-x.abs()).exp().ln_1p();
            (loss, sigmoid(x) - target)
        })
    }

    /// Returns the sum of the squared errors.
    pub(crate) fn mean_squared_error(&self, outputs: &mut [f32], targets: &[f32]) -> f64 {
        self.sum_of_single_losses(outputs, targets, |x, target| {
            let error = x - target;
            (error * error, 2.0 * error)
        })
    }

    /// Adds up a loss of each output by itself. `loss` returns it with its slope.
    fn sum_of_single_losses(
        &self,
        outputs: &mut [f32],
        targets: &[f32],
        loss: impl Fn(f32, f32) -> (f32, f32) + Sync,
    ) -> f64 {
        let scale = 1.0 / targets.len() as f32;
        self.sum_of_losses(outputs, 1, |first, outputs| {
            let mut sum = 0.0;
            for (output, &target) in outputs.iter_mut().zip(&targets[first..]) {
                let (loss, slope) = loss(*output, target);
                sum += f64::from(loss);
                *output = scale * slope;
            }
            sum
        })
    }

    /// Adds up the losses of all chunks of rows. `losses` gets each chunk with the index of its
    /// first row.
    fn sum_of_losses(
        &self,
        outputs: &mut [f32],
        columns: usize,
        losses: impl Fn(usize, &mut [f32]) -> f64 + Sync,
    ) -> f64 {
        let length = ROWS_AT_ONCE * columns;
        let mut partial = vec![0.0; outputs.len().div_ceil(length.max(1))];
        self.for_pairs(length, outputs, 1, &mut partial, |chunk, outputs, partial| {
            partial[0] = losses(chunk * ROWS_AT_ONCE, outputs);
        });
        partial.iter().sum()
    }
}

/// Returns the loss of one row, and replaces the row by `scale` times the derivatives.
fn softmax_cross_entropy_of(row: &mut [f32], label: usize, scale: f32) -> f64 {
    // The greatest exponent becomes 0: no exponential overflows, and their sum is at least 1.
    let greatest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let label_logit = row[label] - greatest;
    let mut sum = 0.0;
    for logit in row.iter_mut() {
        *logit = (*logit - greatest).exp();
        sum += *logit;
    }
    for probability in row.iter_mut() {
        *probability *= scale / sum;
    }
    row[label] -= scale;
    f64::from(sum.ln() - label_logit)
}
