//! Models whose inputs are ids: what is common to them.
//!
//! A model holds no weights, only buffers that it uses again and again, so the weights may lie wherever the
//! caller keeps them. All sums are of `f32` and made in the order of the samples, so that equal
//! arguments give equal results.

mod logistic;
mod network;

use pushpull::Initializer;

pub(crate) use logistic::Logistic;
pub(crate) use network::Network;

/// A model of `N` dense tensors, and a table that has a row for each id.
pub(crate) trait Model<const N: usize>: Clone + Send {
    /// The names of the dense tensors.
    const NAMES: [&'static str; N];

    /// Values in a row of the table.
    fn width(&self) -> usize;

    /// What the rows of the table begin with.
    fn rows_initializer(&self) -> Initializer;

    /// The shapes of the dense tensors. One of rank 2 is a layer's matrix and the others are
    /// biases.
    fn shapes(&self) -> [Vec<u64>; N];

    /// For each sample the logit that it is late: the logarithm of its odds. Appends them to
    /// `logits`.
    ///
    /// # Panics
    ///
    /// If a tensor has another length than its shape says, if there are not the same number of places for
    /// each sample, or if a place is beyond the rows.
    fn logits(&mut self, weights: Weights<'_, N>, samples: Samples<'_>, logits: &mut Vec<f32>);

    /// The mean cross entropy of some samples (natural logarithm), and in `gradients` its
    /// derivatives by the dense tensors and by the rows. Whatever `gradients` held before is
    /// overwritten.
    ///
    /// # Panics
    ///
    /// As [`logits`](Model::logits), and if there are no samples.
    fn gradients(
        &mut self,
        weights: Weights<'_, N>,
        samples: Samples<'_>,
        gradients: WeightsMut<'_, N>,
    ) -> f32;
}

/// Labelled samples that lie somewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Samples<'a> {
    /// For each sample and field, which row of the table, or of those in a batch, is its.
    pub(crate) places: &'a [u32],
    /// By sample: whether it is late.
    pub(crate) late: &'a [bool],
}

/// Weights that lie somewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights<'a, const N: usize> {
    /// The dense tensors, row by row.
    pub(crate) dense: [&'a [f32]; N],
    /// Rows of the table, one after another.
    pub(crate) rows: &'a [f32],
}

/// Gradients of [`Weights`], to be written.
#[derive(Debug)]
pub(crate) struct WeightsMut<'a, const N: usize> {
    /// Those of the dense tensors.
    pub(crate) dense: [&'a mut [f32]; N],
    /// Those of the rows.
    pub(crate) rows: &'a mut [f32],
}

/// The derivative of the cross entropy by a logit: how much more likely than it is "late" was said
/// to be.
fn slope(logit: f32, late: bool) -> f32 {
    // An exponential that overflows makes a probability of 0, as it should.
    let probability = 1.0 / (1.0 + (-logit).exp());
    probability - f32::from(u8::from(late))
}

#[cfg(test)]
mod tests {
    use pushpull::Shape;

    use super::*;
    use crate::metrics::log_loss;

    const FIELDS: usize = 3;
    const ROWS: usize = 6;
    const LATE: [bool; 4] = [true, false, false, true];
    /// Row 3 is in no sample, row 1 is in one twice and in another.
    const PLACES: [u32; 4 * FIELDS] = [0, 1, 1, 2, 4, 1, 5, 4, 2, 0, 4, 5];

    const SAMPLES: Samples<'static> = Samples { places: &PLACES, late: &LATE };

    /// Weights within 0.7 of zero, the table last.
    fn random<M: Model<N>, const N: usize>(model: &M) -> Vec<Vec<f32>> {
        let table = vec![ROWS as u64, model.width() as u64];
        let shapes = model.shapes().into_iter().chain([table]);
        let uniform = Initializer::Uniform { low: -0.7, high: 0.7 };
        shapes
            .enumerate()
            .map(|(tensor, extents)| {
                let shape = Shape::new(extents).unwrap();
                let mut values = vec![0.0; shape.elements() as usize];
                uniform.fill(11, &tensor.to_string(), &shape, 0, &mut values);
                values
            })
            .collect()
    }

    fn views<const N: usize>(weights: &[Vec<f32>]) -> Weights<'_, N> {
        Weights { dense: std::array::from_fn(|tensor| &weights[tensor][..]), rows: &weights[N] }
    }

    /// What a model computes, but in double precision and by definition.
    type Reference = fn(&[Vec<f64>], &[u32]) -> f64;

    fn reference_loss(weights: &[Vec<f64>], logit: Reference) -> f64 {
        let logits = PLACES.chunks(FIELDS).map(|places| logit(weights, places));
        let losses = logits.zip(LATE).map(|(logit, late)| {
            let odds = if late { -logit } else { logit };
            odds.exp().ln_1p()
        });
        losses.sum::<f64>() / LATE.len() as f64
    }

    /// Compares loss, logits and all gradients with those of a reference.
    fn agrees<M: Model<N>, const N: usize>(mut model: M, logit: Reference) {
        let weights = random(&model);
        let mut gradients: Vec<_> =
            weights.iter().map(|tensor| vec![f32::NAN; tensor.len()]).collect();
        let (rows, dense) = gradients.split_last_mut().unwrap();
        let mut dense = dense.iter_mut();
        let dense = std::array::from_fn(|_| &mut dense.next().unwrap()[..]);
        let loss = model.gradients(views(&weights), SAMPLES, WeightsMut { dense, rows });

        let mut wide: Vec<Vec<f64>> = weights
            .iter()
            .map(|tensor| tensor.iter().map(|&value| value.into()).collect())
            .collect();
        let mut logits = vec![-1.0];
        model.logits(views(&weights), SAMPLES, &mut logits);
        let expected = PLACES.chunks(FIELDS).map(|places| logit(&wide, places));
        for (logit, expected) in logits[1..].iter().zip(expected) {
            assert!((f64::from(*logit) - expected).abs() < 1e-5, "{logit} {expected}");
        }
        let expected = reference_loss(&wide, logit);
        assert!((f64::from(loss) - expected).abs() < 1e-5, "{loss} {expected}");
        assert!((log_loss(&logits[1..], &LATE) - expected).abs() < 1e-5);

        for tensor in 0..=N {
            assert!(gradients[tensor].iter().any(|gradient| gradient.abs() > 1e-3));
            for index in 0..wide[tensor].len() {
                let value = wide[tensor][index];
                let mut loss_at = |value| {
                    wide[tensor][index] = value;
                    reference_loss(&wide, logit)
                };
                let difference = (loss_at(value + 1e-5) - loss_at(value - 1e-5)) / 2e-5;
                loss_at(value);
                let gradient = f64::from(gradients[tensor][index]);
                assert!(
                    (gradient - difference).abs() < 1e-5 + 1e-4 * difference.abs(),
                    "tensor {tensor} [{index}]: {gradient} {difference}"
                );
            }
        }
        let unused = 3 * model.width()..4 * model.width();
        assert!(gradients[N][unused].iter().all(|&gradient| gradient == 0.0));
    }

    #[test]
    fn the_logistic_regression_agrees_with_central_differences() {
        agrees(Logistic::new(FIELDS), |weights, places| {
            let [bias, rows] = weights else { panic!("two tensors") };
            bias[0] + places.iter().map(|&place| rows[place as usize]).sum::<f64>()
        });
    }

    #[test]
    fn the_network_agrees_with_central_differences() {
        agrees(Network::new(FIELDS, 2, 5), |weights, places| {
            let [w1, b1, w2, b2, rows] = weights else { panic!("five tensors") };
            let inputs: Vec<f64> = places
                .iter()
                .flat_map(|&place| rows[place as usize * 2..][..2].iter().copied())
                .collect();
            let unit = |unit: usize| {
                let column = w1.iter().skip(unit).step_by(5);
                let sum: f64 =
                    inputs.iter().zip(column).map(|(input, weight)| input * weight).sum();
                (b1[unit] + sum).max(0.0) * w2[unit]
            };
            b2[0] + (0..5).map(unit).sum::<f64>()
        });
    }

    #[test]
    fn great_logits_do_not_overflow_and_nan_is_not_hidden() {
        assert_eq!(slope(0.0, true), -0.5);
        assert_eq!((slope(1e4, true), slope(1e4, false)), (0.0, 1.0));
        assert_eq!((slope(-1e4, true), slope(-1e4, false)), (-1.0, 0.0));
        assert!(slope(f32::NAN, true).is_nan());

        let mut network = Network::new(FIELDS, 2, 5);
        let mut weights = random(&network);
        weights[0][0] = f32::NAN;
        let mut logits = Vec::new();
        network.logits(views(&weights), SAMPLES, &mut logits);
        assert!(logits.iter().all(|logit| logit.is_nan()));
    }
}
