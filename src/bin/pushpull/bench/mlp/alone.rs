//! The ceilings: the same computation without a parameter server.

use pushpull::variable::{Initializer, Shape};

use super::data::Data;
use super::model::gemm::{Matrix, multiply};
use super::model::{Mlp, NAMES};
use super::{BATCH_ROWS, CLASSES, HIDDEN, INPUTS, ThreadError, WORKERS};
use crate::bench::ceiling::{PayloadDirection, RoundTrip};
use crate::bench::{BenchError, Transport};

/// Returns the initial values of the network, the same for every replica.
pub(super) fn initial_values() -> [Vec<f32>; 4] {
    let mut names = NAMES.into_iter();
    Mlp::new(INPUTS, HIDDEN, CLASSES).shapes().map(|extents| {
        let name = names.next().unwrap_or_default();
        let mut values = vec![0.0; extents.iter().product()];
        let extents: Vec<u64> = extents.into_iter().map(|extent| extent as u64).collect();
        if let (Ok(shape), 2) = (Shape::new(extents.clone()), extents.len()) {
            Initializer::GlorotUniform.fill(1, name, &shape, 0, &mut values);
        }
        values
    })
}

/// A copy of the network that never changes, and buffers for what is computed from it.
pub(super) struct FrozenNetwork<'a> {
    model: Mlp,
    data: &'a Data,
    next: usize,
    params: [Vec<f32>; 4],
    gradients: [Vec<f32>; 4],
    activations: Vec<f32>,
    logits: Vec<f32>,
    hidden_gradients: Vec<f32>,
}

impl<'a> FrozenNetwork<'a> {
    /// Creates the replica of a worker, which takes every [`WORKERS`]th batch.
    pub(super) fn new(data: &'a Data, worker: usize) -> FrozenNetwork<'a> {
        let params = initial_values();
        FrozenNetwork {
            model: Mlp::new(INPUTS, HIDDEN, CLASSES),
            data,
            next: worker,
            gradients: params.clone(),
            params,
            activations: vec![0.0; BATCH_ROWS * HIDDEN],
            logits: vec![0.0; BATCH_ROWS * CLASSES],
            hidden_gradients: vec![0.0; BATCH_ROWS * HIDDEN],
        }
    }

    /// Computes the gradients of the next batch.
    pub(super) fn compute(&mut self) -> Result<(), ThreadError> {
        let batch = self.data.batch(self.next);
        let params = self.params.each_ref().map(Vec::as_slice);
        self.model.gradients(params, batch, self.gradients.each_mut().map(Vec::as_mut_slice));
        self.next += WORKERS;
        Ok(())
    }

    /// Computes only the five matrix products of [`compute`](Replica::compute), in the same shapes.
    pub(super) fn products(&mut self) -> Result<(), ThreadError> {
        let batch = self.data.batch(self.next);
        let [w1, _, w2, _] = &self.params;
        let [g_w1, _, g_w2, _] = &mut self.gradients;
        let features = Matrix::new(batch.features, BATCH_ROWS, INPUTS);
        let (w1, w2) = (Matrix::new(w1, INPUTS, HIDDEN), Matrix::new(w2, HIDDEN, CLASSES));
        multiply(features, w1, 0.0, &mut self.activations);
        let activations = Matrix::new(&self.activations, BATCH_ROWS, HIDDEN);
        multiply(activations, w2, 0.0, &mut self.logits);
        let logits = Matrix::new(&self.logits, BATCH_ROWS, CLASSES);
        multiply(activations.transposed(), logits, 0.0, g_w2);
        multiply(logits, w2.transposed(), 0.0, &mut self.hidden_gradients);
        let hidden_gradients = Matrix::new(&self.hidden_gradients, BATCH_ROWS, HIDDEN);
        multiply(features.transposed(), hidden_gradients, 0.0, g_w1);
        self.next += WORKERS;
        Ok(())
    }
}

/// A replica that also moves as many bytes as training does, over a connection of its own to a
/// thread that applies them in place: an upper bound for training over this transport.
pub(super) struct Exchange<'a> {
    replica: FrozenNetwork<'a>,
    pull: RoundTrip,
    push: RoundTrip,
}

impl<'a> Exchange<'a> {
    pub(super) fn start(
        replica: FrozenNetwork<'a>,
        transport: Transport,
    ) -> Result<Exchange<'a>, BenchError> {
        let bytes = 4 * replica.params.iter().map(Vec::len).sum::<usize>();
        let start = |direction| RoundTrip::start(transport, direction, bytes);
        Ok(Exchange {
            replica,
            pull: start(PayloadDirection::Pull)?,
            push: start(PayloadDirection::Push)?,
        })
    }

    /// Pulls, computes the gradients of a batch, and pushes.
    pub(super) fn step(&mut self) -> Result<(), ThreadError> {
        self.pull.once()?;
        self.replica.compute()?;
        self.push.once()?;
        Ok(())
    }
}
