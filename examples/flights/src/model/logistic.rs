//! Logistic regression on ids.

use pushpull::variable::Initializer;

use super::{FlightModel, FlightSamples, Weights, WeightsMut, slope};
use crate::metrics::cross_entropy;

/// A model whose logit is a bias plus one weight per id: table rows of one value.
#[derive(Clone, Debug)]
pub(crate) struct Logistic {
    fields: usize,
}

impl Logistic {
    /// Creates a model for samples of this many ids.
    pub(crate) fn new(fields: usize) -> Logistic {
        Logistic { fields }
    }
}

impl FlightModel<1> for Logistic {
    const NAMES: [&'static str; 1] = ["bias"];

    fn width(&self) -> usize {
        1
    }

    fn rows_initializer(&self) -> Initializer {
        Initializer::Zeros
    }

    fn shapes(&self) -> [Vec<u64>; 1] {
        [vec![1]]
    }

    fn logits(
        &mut self,
        weights: Weights<'_, 1>,
        samples: FlightSamples<'_>,
        logits: &mut Vec<f32>,
    ) {
        let each = samples.places.chunks_exact(self.fields);
        logits.extend(each.map(|places| logit(weights, places)));
    }

    fn gradients(
        &mut self,
        weights: Weights<'_, 1>,
        samples: FlightSamples<'_>,
        gradients: WeightsMut<'_, 1>,
    ) -> f32 {
        let WeightsMut { dense: [bias], rows } = gradients;
        bias.fill(0.0);
        rows.fill(0.0);
        let scale = 1.0 / samples.late.len() as f32;
        let mut loss = 0.0;
        for (places, &late) in samples.places.chunks_exact(self.fields).zip(samples.late) {
            let logit = logit(weights, places);
            loss += cross_entropy(logit, late);
            let slope = slope(logit, late) * scale;
            bias[0] += slope;
            for &place in places {
                rows[place as usize] += slope;
            }
        }
        (loss / samples.late.len() as f64) as f32
    }
}

fn logit(weights: Weights<'_, 1>, places: &[u32]) -> f32 {
    let [bias] = weights.dense;
    places.iter().fold(bias[0], |sum, &place| sum + weights.rows[place as usize])
}
