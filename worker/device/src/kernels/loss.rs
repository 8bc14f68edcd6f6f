//! Losses: the mean over a batch, and its derivatives by the outputs.

use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{View, ViewMut};

impl Device {
    /// Returns the mean cross entropy of the softmax of each row of `logits` with its label
    /// (natural logarithm), and replaces `logits` by the derivatives.
    ///
    /// The rows are as long as there are classes.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without labels; [`ComputeError::Length`] if there are not
    /// `labels.len() * classes` logits; [`ComputeError::Label`].
    #[doc(alias = "softmax_cross_entropy_with_logits")]
    #[doc(alias = "sparse_softmax_cross_entropy_with_logits")]
    pub fn softmax_cross_entropy<'a>(
        &self,
        logits: impl Into<ViewMut<'a, f32>>,
        classes: usize,
        labels: &[u32],
    ) -> Result<f64, ComputeError> {
        const NAME: &str = "softmax_cross_entropy";
        let logits = logits.into();
        let samples = labels.len();
        check_samples(NAME, samples)?;
        let expected = samples.saturating_mul(classes);
        check_length(NAME, "logits", logits.len(), expected)?;
        let unknown = labels.iter().position(|&label| label as usize >= classes);
        if let Some(sample) = unknown {
            return Err(ComputeError::Label { sample, label: labels[sample], classes });
        }
        let sum = match self.backend() {
            Backend::Cpu(pool) => {
                pool.softmax_cross_entropy(logits.host(NAME, "logits")?, classes, labels)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let logits = logits.cuda(cuda, NAME, "logits")?;
                cuda.softmax_cross_entropy(logits, classes, labels)?
            }
        };
        Ok(sum / samples as f64)
    }

    /// Returns the mean cross entropy of the sigmoid of each logit with its target (natural
    /// logarithm), and replaces `logits` by the derivatives. Targets are probabilities.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without targets; [`ComputeError::Length`] if there are not as many
    /// logits.
    #[doc(alias = "sigmoid_cross_entropy_with_logits")]
    pub fn sigmoid_cross_entropy<'a>(
        &self,
        logits: impl Into<ViewMut<'a, f32>>,
        targets: impl Into<View<'a, f32>>,
    ) -> Result<f64, ComputeError> {
        const NAME: &str = "sigmoid_cross_entropy";
        let logits = logits.into();
        let targets = targets.into();
        check_samples(NAME, targets.len())?;
        check_length(NAME, "outputs", logits.len(), targets.len())?;
        let sum = match self.backend() {
            Backend::Cpu(pool) => {
                let targets = targets.host(NAME, "targets")?;
                pool.sigmoid_cross_entropy(logits.host(NAME, "logits")?, targets)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let targets = targets.cuda(cuda, NAME, "targets")?;
                cuda.sum_of_losses(NAME, logits.cuda(cuda, NAME, "logits")?, targets)?
            }
        };
        Ok(sum / targets.len() as f64)
    }

    /// Returns the mean of the squared errors, and replaces `outputs` by the derivatives.
    ///
    /// # Errors
    /// [`ComputeError::Empty`] without targets; [`ComputeError::Length`] if there are not as many
    /// outputs.
    pub fn mean_squared_error<'a>(
        &self,
        outputs: impl Into<ViewMut<'a, f32>>,
        targets: impl Into<View<'a, f32>>,
    ) -> Result<f64, ComputeError> {
        const NAME: &str = "mean_squared_error";
        let outputs = outputs.into();
        let targets = targets.into();
        check_samples(NAME, targets.len())?;
        check_length(NAME, "outputs", outputs.len(), targets.len())?;
        let sum = match self.backend() {
            Backend::Cpu(pool) => {
                let targets = targets.host(NAME, "targets")?;
                pool.mean_squared_error(outputs.host(NAME, "outputs")?, targets)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let targets = targets.cuda(cuda, NAME, "targets")?;
                cuda.sum_of_losses(NAME, outputs.cuda(cuda, NAME, "outputs")?, targets)?
            }
        };
        Ok(sum / targets.len() as f64)
    }
}

fn check_samples(kernel: &'static str, samples: usize) -> Result<(), ComputeError> {
    match samples {
        0 => Err(ComputeError::Empty { kernel }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::elementwise::ROWS_AT_ONCE;
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
        let outputs = random(7, SAMPLES);
        let targets = random(8, SAMPLES);
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
