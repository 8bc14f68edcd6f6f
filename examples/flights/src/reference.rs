//! The reference: the same model and rule in plain loops, without servers.

use pushpull::VariableSpec;
use pushpull::variable::Shape;

use super::data::{Epoch, FlightBatch, FlightData};
use super::model::{FlightModel, Weights, WeightsMut};
use super::score::Score;
use super::variables::ModelVariables;

/// A model with its weights in this process, trained by Adagrad: `a += g^2`, `w -= lr g / sqrt(a)`,
/// where `a` starts at 0.1. Only the table rows of the batch change.
#[derive(Debug)]
pub(crate) struct Reference<M, const N: usize> {
    model: M,
    dense: [TrainedTensor; N],
    table: TrainedTensor,
    learning_rate: f32,
    batch: FlightBatch,
    /// The rows of the batch, and their gradients.
    rows: Vec<f32>,
    row_gradients: Vec<f32>,
    gradients: [Vec<f32>; N],
}

impl<M: FlightModel<N>, const N: usize> Reference<M, N> {
    /// Creates a model with the initial values that servers give these variables.
    pub(crate) fn new(
        model: M,
        variables: &ModelVariables<N>,
        learning_rate: f64,
    ) -> Reference<M, N> {
        let dense = variables.dense.each_ref().map(TrainedTensor::new);
        Reference {
            model,
            gradients: dense.each_ref().map(|tensor| tensor.values.clone()),
            dense,
            table: TrainedTensor::new(&variables.table),
            learning_rate: learning_rate as f32,
            batch: FlightBatch::new(variables.table.shape().rows() as usize),
            rows: Vec::new(),
            row_gradients: Vec::new(),
        }
    }

    /// Trains on all batches of an epoch in order.
    pub(crate) fn train(&mut self, dataset: &FlightData, epoch: &Epoch) {
        for rows in epoch.share(0, 1) {
            self.batch.fill(dataset, rows);
            self.step();
        }
    }

    /// Returns the current score of the model.
    pub(crate) fn score(&mut self, dataset: &FlightData) -> Option<Score> {
        let dense = self.dense.each_ref().map(|tensor| &tensor.values[..]);
        let weights = Weights { dense, rows: &self.table.values };
        Score::of(&mut self.model, weights, dataset)
    }

    fn step(&mut self) {
        let width = self.model.width();
        self.rows.clear();
        for &id in &self.batch.ids {
            self.rows.extend_from_slice(&self.table.values[id as usize * width..][..width]);
        }
        self.row_gradients.resize(self.rows.len(), 0.0);
        let weights = Weights {
            dense: self.dense.each_ref().map(|tensor| &tensor.values[..]),
            rows: &self.rows,
        };
        let gradients = WeightsMut {
            dense: self.gradients.each_mut().map(|gradient| &mut gradient[..]),
            rows: &mut self.row_gradients,
        };
        self.model.gradients(weights, self.batch.samples(), gradients);
        for (tensor, gradient) in self.dense.iter_mut().zip(&self.gradients) {
            tensor.descend(0, gradient, self.learning_rate);
        }
        for (&id, gradient) in self.batch.ids.iter().zip(self.row_gradients.chunks_exact(width)) {
            self.table.descend(id as usize * width, gradient, self.learning_rate);
        }
    }
}

/// A tensor and the sums of squares of its gradients.
#[derive(Debug)]
struct TrainedTensor {
    values: Vec<f32>,
    sums: Vec<f32>,
}

impl TrainedTensor {
    fn new(spec: &VariableSpec) -> TrainedTensor {
        let shape: &Shape = spec.shape();
        let mut values = vec![0.0; shape.elements() as usize];
        spec.initializer.fill(spec.seed, spec.name(), shape, 0, &mut values);
        TrainedTensor { sums: vec![0.1; values.len()], values }
    }

    /// Takes one step for the values from index `first` on.
    fn descend(&mut self, first: usize, gradient: &[f32], learning_rate: f32) {
        let state = self.values[first..].iter_mut().zip(&mut self.sums[first..]);
        for ((value, sum), g) in state.zip(gradient) {
            *sum += g * g;
            *value -= g * learning_rate / sum.sqrt();
        }
    }
}
