//! Models whose inputs are ids, and their common interface.
//!
//! A model holds no weights, only reused buffers, so the caller may keep the weights anywhere. All
//! sums are of `f32` in the order of the samples: equal arguments give equal results.

mod logistic;
mod network;

use pushpull::variable::Initializer;

pub(crate) use logistic::Logistic;
pub(crate) use network::EmbeddingNetwork;

/// A model of `N` dense tensors and a table with a row per id.
pub(crate) trait FlightModel<const N: usize>: Clone + Send {
    /// Names of the dense tensors.
    const NAMES: [&'static str; N];

    /// Returns the number of values in a row of the table.
    fn width(&self) -> usize;

    /// Returns the initializer of the table rows.
    fn rows_initializer(&self) -> Initializer;

    /// Returns the shapes of the dense tensors. A tensor of rank 2 is the matrix of a layer; the
    /// others are biases.
    fn shapes(&self) -> [Vec<u64>; N];

    /// Appends to `logits` the logit of each sample that it is late: the logarithm of its odds.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the length of its shape, if samples differ in their number of
    /// places, or if a place is beyond the rows.
    fn logits(
        &mut self,
        weights: Weights<'_, N>,
        samples: FlightSamples<'_>,
        logits: &mut Vec<f32>,
    );

    /// Returns the mean cross entropy of some samples (natural logarithm), and overwrites
    /// `gradients` with its derivatives by the dense tensors and by the rows.
    ///
    /// # Panics
    ///
    /// As [`logits`](Model::logits), and if there are no samples.
    fn gradients(
        &mut self,
        weights: Weights<'_, N>,
        samples: FlightSamples<'_>,
        gradients: WeightsMut<'_, N>,
    ) -> f32;
}

/// Borrowed labelled samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlightSamples<'a> {
    /// Row of each field of each sample, in the table or in the rows of a batch.
    pub(crate) places: &'a [u32],
    /// Whether each sample is late.
    pub(crate) late: &'a [bool],
}

/// Borrowed weights.
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
    /// Gradients of the dense tensors.
    pub(crate) dense: [&'a mut [f32]; N],
    /// Gradients of the rows.
    pub(crate) rows: &'a mut [f32],
}

/// Returns the derivative of the cross entropy by a logit: the predicted probability of "late"
/// minus the label.
fn slope(logit: f32, late: bool) -> f32 {
    // An overflow of the exponential gives a probability of 0, as it should.
    let probability = 1.0 / (1.0 + (-logit).exp());
    probability - f32::from(u8::from(late))
}

#[cfg(test)]
mod tests {
    use pushpull::variable::Shape;

    use super::*;
    use crate::metrics::log_loss;

    const FIELDS: usize = 3;
    const ROWS: usize = 6;
    const LATE: [bool; 4] = [true, false, false, true];
    /// Row 3 is in no sample. Row 1 is twice in one sample and once in another.
    const PLACES: [u32; 4 * FIELDS] = [0, 1, 1, 2, 4, 1, 5, 4, 2, 0, 4, 5];

    const SAMPLES: FlightSamples<'static> = FlightSamples { places: &PLACES, late: &LATE };

    /// Returns weights within 0.7 of zero, the table last.
    fn random<M: FlightModel<N>, const N: usize>(model: &M) -> Vec<Vec<f32>> {
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

    /// The logit of a model by its definition, in double precision.
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
    fn agrees<M: FlightModel<N>, const N: usize>(mut model: M, logit: Reference) {
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
        agrees(EmbeddingNetwork::new(FIELDS, 2, 5), |weights, places| {
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
    fn large_logits_do_not_overflow_and_nan_propagates() {
        assert_eq!(slope(0.0, true), -0.5);
        assert_eq!((slope(1e4, true), slope(1e4, false)), (0.0, 1.0));
        assert_eq!((slope(-1e4, true), slope(-1e4, false)), (-1.0, 0.0));
        assert!(slope(f32::NAN, true).is_nan());

        let mut network = EmbeddingNetwork::new(FIELDS, 2, 5);
        let mut weights = random(&network);
        weights[0][0] = f32::NAN;
        let mut logits = Vec::new();
        network.logits(views(&weights), SAMPLES, &mut logits);
        assert!(logits.iter().all(|logit| logit.is_nan()));
    }
}
