//! A small network over embeddings.

use pushpull::variable::Initializer;

use super::{FlightModel, FlightSamples, Weights, WeightsMut, slope};
use crate::metrics::cross_entropy;

/// A network with one hidden layer over embeddings.
///
/// Each id has an embedding, a row of the table. The embeddings of a sample, concatenated, are the
/// inputs of one hidden layer of rectified linear units. The logit is a weighted sum of its
/// outputs.
#[derive(Clone, Debug)]
pub(crate) struct EmbeddingNetwork {
    fields: usize,
    width: usize,
    hidden: usize,
    /// Embeddings of one sample, then the derivatives by them.
    inputs: Vec<f32>,
    /// Outputs of its hidden layer, then the derivatives by its sums.
    units: Vec<f32>,
}

impl EmbeddingNetwork {
    /// Creates a network for samples of `fields` ids, with embeddings of `width` values and
    /// `hidden` units.
    pub(crate) fn new(fields: usize, width: usize, hidden: usize) -> EmbeddingNetwork {
        let inputs = vec![0.0; fields * width];
        let units = vec![0.0; hidden];
        EmbeddingNetwork { fields, width, hidden, inputs, units }
    }

    /// Returns the logit of one sample, and fills `inputs` and `units`.
    fn forward(&mut self, weights: Weights<'_, 4>, places: &[u32]) -> f32 {
        let [w1, b1, w2, b2] = weights.dense;
        for (input, &place) in self.inputs.chunks_exact_mut(self.width).zip(places) {
            input.copy_from_slice(&weights.rows[place as usize * self.width..][..self.width]);
        }
        self.units.copy_from_slice(b1);
        for (&input, row) in self.inputs.iter().zip(w1.chunks_exact(self.hidden)) {
            add_scaled(&mut self.units, input, row);
        }
        for unit in &mut self.units {
            // `max` would turn NaN into 0 and hide that training has diverged.
            *unit = if *unit < 0.0 { 0.0 } else { *unit };
        }
        self.units.iter().zip(w2).fold(b2[0], |sum, (unit, weight)| sum + unit * weight)
    }
}

impl FlightModel<4> for EmbeddingNetwork {
    const NAMES: [&'static str; 4] = ["w1", "b1", "w2", "b2"];

    fn width(&self) -> usize {
        self.width
    }

    fn rows_initializer(&self) -> Initializer {
        Initializer::Uniform { low: -0.05, high: 0.05 }
    }

    fn shapes(&self) -> [Vec<u64>; 4] {
        let inputs = self.inputs.len() as u64;
        let hidden = self.hidden as u64;
        [vec![inputs, hidden], vec![hidden], vec![hidden, 1], vec![1]]
    }

    fn logits(
        &mut self,
        weights: Weights<'_, 4>,
        samples: FlightSamples<'_>,
        logits: &mut Vec<f32>,
    ) {
        for places in samples.places.chunks_exact(self.fields) {
            logits.push(self.forward(weights, places));
        }
    }

    fn gradients(
        &mut self,
        weights: Weights<'_, 4>,
        samples: FlightSamples<'_>,
        gradients: WeightsMut<'_, 4>,
    ) -> f32 {
        let [w1, _, w2, _] = weights.dense;
        let WeightsMut { dense: [g_w1, g_b1, g_w2, g_b2], rows: g_rows } = gradients;
        for gradient in [&mut *g_w1, &mut *g_b1, &mut *g_w2, &mut *g_b2, &mut *g_rows] {
            gradient.fill(0.0);
        }
        let scale = 1.0 / samples.late.len() as f32;
        let mut loss = 0.0;
        for (places, &late) in samples.places.chunks_exact(self.fields).zip(samples.late) {
            let logit = self.forward(weights, places);
            loss += cross_entropy(logit, late);
            let slope = slope(logit, late) * scale;
            g_b2[0] += slope;
            add_scaled(g_w2, slope, &self.units);
            for (unit, weight) in self.units.iter_mut().zip(w2) {
                // Only active units propagate a gradient.
                *unit = if *unit <= 0.0 { 0.0 } else { slope * weight };
            }
            add_scaled(g_b1, 1.0, &self.units);
            let layer = w1.chunks_exact(self.hidden).zip(g_w1.chunks_exact_mut(self.hidden));
            for (input, (row, g_row)) in self.inputs.iter_mut().zip(layer) {
                add_scaled(g_row, *input, &self.units);
                *input = row.iter().zip(&self.units).fold(0.0, |sum, (w, unit)| sum + w * unit);
            }
            for (input, &place) in self.inputs.chunks_exact(self.width).zip(places) {
                add_scaled(&mut g_rows[place as usize * self.width..][..self.width], 1.0, input);
            }
        }
        (loss / samples.late.len() as f64) as f32
    }
}

/// Computes `sums += scale * values`.
fn add_scaled(sums: &mut [f32], scale: f32, values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += scale * value;
    }
}
