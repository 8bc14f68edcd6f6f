//! Losses: the mean over a batch, and its derivatives by the outputs.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::activation::sigmoid;
use crate::kernels::elementwise::ROWS_AT_ONCE;

impl Device {
    /// Returns the mean cross entropy of the softmax of each row of `logits` with its label (natural
    /// logarithm), and replaces `logits` by the derivatives.
    ///
    /// The rows are as long as there are classes.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without labels; [`ComputeError::Length`] if there are not
    /// `labels.len() * classes` logits; [`ComputeError::Label`].
    #[doc(alias = "softmax_cross_entropy_with_logits")]
    #[doc(alias = "sparse_softmax_cross_entropy_with_logits")]
    pub fn softmax_cross_entropy(
        &self,
        logits: &mut [f32],
        classes: usize,
        labels: &[u32],
    ) -> Result<f64, ComputeError> {
        const NAME: &str = "softmax_cross_entropy";
        let samples = labels.len();
        check_samples(NAME, samples)?;
        let expected = samples.saturating_mul(classes);
        check_length(NAME, "logits", logits.len(), expected)?;
        let unknown = labels.iter().position(|&label| label as usize >= classes);
        if let Some(sample) = unknown {
            return Err(ComputeError::Label { sample, label: labels[sample], classes });
        }
        let scale = 1.0 / samples as f32;
        let sum = self.sum_of_losses(logits, classes, |first, rows| {
            let labels = &labels[first..];
            let losses = rows
                .chunks_exact_mut(classes)
                .zip(labels)
                .map(|(row, &label)| softmax_cross_entropy_of(row, label as usize, scale));
            losses.sum()
        });
        Ok(sum / samples as f64)
    }

    /// Returns the mean cross entropy of the sigmoid of each logit with its target (natural
    /// logarithm), and replaces `logits` by the derivatives. Targets are probabilities.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without targets; [`ComputeError::Length`] if there are not as many
    /// logits.
    #[doc(alias = "sigmoid_cross_entropy_with_logits")]
    pub fn sigmoid_cross_entropy(
        &self,
        logits: &mut [f32],
        targets: &[f32],
    ) -> Result<f64, ComputeError> {
        self.mean_loss("sigmoid_cross_entropy", logits, targets, |x, target| {
            // log(1 + exp(x)) - target * x, with an exponent that is never above 0.
            let loss = x.max(0.0) - x * target + (-x.abs()).exp().ln_1p();
            (loss, sigmoid(x) - target)
        })
    }

    /// Returns the mean of the squared errors, and replaces `outputs` by the derivatives.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without targets; [`ComputeError::Length`] if there are not as many
    /// outputs.
    pub fn mean_squared_error(
        &self,
        outputs: &mut [f32],
        targets: &[f32],
    ) -> Result<f64, ComputeError> {
        self.mean_loss("mean_squared_error", outputs, targets, |x, target| {
            let error = x - target;
            (error * error, 2.0 * error)
        })
    }

    /// Returns the mean of a loss of each output by itself. `loss` returns it with its slope.
    fn mean_loss(
        &self,
        kernel: &'static str,
        outputs: &mut [f32],
        targets: &[f32],
        loss: impl Fn(f32, f32) -> (f32, f32) + Sync,
    ) -> Result<f64, ComputeError> {
        check_samples(kernel, targets.len())?;
        check_length(kernel, "outputs", outputs.len(), targets.len())?;
        let scale = 1.0 / targets.len() as f32;
        let sum = self.sum_of_losses(outputs, 1, |first, outputs| {
            let mut sum = 0.0;
            for (output, &target) in outputs.iter_mut().zip(&targets[first..]) {
                let (loss, slope) = loss(*output, target);
                sum += f64::from(loss);
                *output = scale * slope;
            }
            sum
        });
        Ok(sum / targets.len() as f64)
    }

    /// Adds up what `losses` returns for each chunk of rows, which it gets with the index of the
    /// first.
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

fn check_samples(kernel: &'static str, samples: usize) -> Result<(), ComputeError> {
    match samples {
        0 => Err(ComputeError::Empty { kernel }),
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    const SAMPLES: usize = 2 * ROWS_AT_ONCE + 7;

    /// Checks a loss against its reference, on one thread and on more.
    fn check(
        logits: &[f32],
        kernel: impl Fn(&Device, &mut [f32]) -> Result<f64, ComputeError>,
        reference: impl Fn(&[f64]) -> f64,
    ) {
        let on = |threads| {
            let mut gradients = logits.to_vec();
            let loss = kernel(&Device::cpu_threads(threads).unwrap(), &mut gradients).unwrap();
            (loss, gradients)
        };
        let (loss, gradients) = on(1);
        let exact: Vec<f64> = logits.iter().map(|&logit| logit.into()).collect();
        assert_close(loss, reference(&exact), 1e-6);
        assert_gradients(&gradients, logits, reference);
        assert!((2..=4).all(|threads| on(threads) == (loss, gradients.clone())));
    }

    #[test]
    fn softmax_cross_entropy_has_these_gradients() {
        let classes = 3;
        let labels: Vec<u32> = (0..SAMPLES as u32).map(|sample| sample * sample % 3).collect();
        let logits: Vec<f32> = random(4, SAMPLES * classes).iter().map(|x| 8.0 * x).collect();
        let kernel =
            |device: &Device, out: &mut [f32]| device.softmax_cross_entropy(out, classes, &labels);
        check(&logits, kernel, |logits| {
            let losses = logits.chunks(classes).zip(&labels).map(|(row, &label)| {
                row.iter().map(|logit| logit.exp()).sum::<f64>().ln() - row[label as usize]
            });
            losses.sum::<f64>() / SAMPLES as f64
        });
    }

    #[test]
    fn sigmoid_cross_entropy_has_these_gradients() {
        let logits: Vec<f32> = random(5, SAMPLES).iter().map(|x| 8.0 * x).collect();
        let targets: Vec<f32> = random(6, SAMPLES).iter().map(|x| x.abs()).collect();
        let kernel = |device: &Device, out: &mut [f32]| device.sigmoid_cross_entropy(out, &targets);
        check(&logits, kernel, |logits| {
            let losses = logits
                .iter()
                .zip(&targets)
                .map(|(x, &target)| x.exp().ln_1p() - f64::from(target) * x);
            losses.sum::<f64>() / SAMPLES as f64
        });
    }

    #[test]
    fn mean_squared_error_has_these_gradients() {
        let (outputs, targets) = (random(7, SAMPLES), random(8, SAMPLES));
        let kernel = |device: &Device, out: &mut [f32]| device.mean_squared_error(out, &targets);
        check(&outputs, kernel, |outputs| {
            let losses = outputs.iter().zip(&targets).map(|(x, &y)| (x - f64::from(y)).powi(2));
            losses.sum::<f64>() / SAMPLES as f64
        });
    }

    #[test]
    fn great_logits_do_not_overflow() {
        let device = Device::cpu_threads(1).unwrap();
        let mut logits = [1e30, 0.0, -1e30];
        assert_eq!(device.softmax_cross_entropy(&mut logits, 3, &[0]).unwrap(), 0.0);
        assert_eq!(logits, [0.0; 3]);
        let mut logits = [1000.0, -1000.0];
        let loss = device.sigmoid_cross_entropy(&mut logits, &[0.0, 1.0]).unwrap();
        assert_eq!((loss, logits), (1000.0, [0.5, -0.5]));
        let mut logits = [f32::NAN, 0.0];
        assert!(device.softmax_cross_entropy(&mut logits, 2, &[1]).unwrap().is_nan());
    }

    #[test]
    fn samples_that_do_not_fit_are_refused() {
        let device = Device::cpu_threads(1).unwrap();
        let mut logits = [1.0; 6];
        let error = device.softmax_cross_entropy(&mut logits, 3, &[0, 3]).unwrap_err();
        assert_eq!(error.to_string(), "label 3 of sample 1 is not below the 3 classes");
        let error = device.softmax_cross_entropy(&mut logits, 2, &[0, 1]).unwrap_err();
        let expected = "softmax_cross_entropy needs 4 elements of logits, not 6";
        assert_eq!(error.to_string(), expected);
        let error = device.softmax_cross_entropy(&mut logits, 2, &[]).unwrap_err();
        let expected = "softmax_cross_entropy has no samples to average over";
        assert_eq!(error.to_string(), expected);
        let error = device.softmax_cross_entropy(&mut [], 0, &[0]).unwrap_err();
        assert_eq!(error.to_string(), "label 0 of sample 0 is not below the 0 classes");
        let error = device.mean_squared_error(&mut logits, &[1.0]).unwrap_err();
        assert_eq!(error.to_string(), "mean_squared_error needs 1 elements of outputs, not 6");
        assert!(device.sigmoid_cross_entropy(&mut [], &[]).is_err());
        assert_eq!(logits, [1.0; 6]);
    }
}
