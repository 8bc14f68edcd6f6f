//! The ceilings: the same computation without a parameter server.

use pushpull::compute::{ComputeError, Device, Matrix, Mlp, Network, View, ViewMut};
use pushpull::variable::{Initializer, Shape};

use super::data::Data;
use super::{BATCH_ROWS, CLASSES, HIDDEN, INPUTS, NAMES, ThreadError, WORKERS, network};
use crate::bench::ceiling::{PayloadDirection, RoundTrip};
use crate::bench::{BenchError, Transport};

/// Returns the initial values of the network, the same for every replica.
pub(super) fn initial_values(model: &Mlp) -> Vec<Vec<f32>> {
    let tensors = NAMES.into_iter().zip(model.shapes());
    let values = tensors.map(|(name, extents)| {
        let mut values = vec![0.0; extents.iter().product::<u64>() as usize];
        if let (2, Ok(shape)) = (extents.len(), Shape::new(extents)) {
            Initializer::GlorotUniform.fill(1, name, &shape, 0, &mut values);
        }
        values
    });
    values.collect()
}

/// A copy of the network that never changes, and buffers for what is computed from it.
pub(super) struct FrozenNetwork<'a> {
    device: Device,
    model: Mlp,
    data: &'a Data,
    next: usize,
    params: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    activations: Vec<f32>,
    logits: Vec<f32>,
    hidden_gradients: Vec<f32>,
}

impl<'a> FrozenNetwork<'a> {
    /// Creates the replica of a worker, which takes every [`WORKERS`]th batch.
    pub(super) fn new(data: &'a Data, worker: usize) -> Result<FrozenNetwork<'a>, ComputeError> {
        let model = network()?;
        let params = initial_values(&model);
        Ok(FrozenNetwork {
            device: Device::cpu_threads(1)?,
            model,
            data,
            next: worker,
            gradients: params.clone(),
            params,
            activations: vec![0.0; BATCH_ROWS * HIDDEN],
            logits: vec![0.0; BATCH_ROWS * CLASSES],
            hidden_gradients: vec![0.0; BATCH_ROWS * HIDDEN],
        })
    }

    /// Computes the gradients of the next batch.
    pub(super) fn compute(&mut self) -> Result<(), ThreadError> {
        let batch = self.data.batch(self.next);
        let params: Vec<View<'_, f32>> = self.params.iter().map(View::from).collect();
        let gradients = self.gradients.iter_mut().map(ViewMut::from).collect();
        self.model.gradients(&params, batch, gradients)?;
        self.next += WORKERS;
        Ok(())
    }

    /// Computes only the five matrix products of [`compute`](Replica::compute), in the same shapes.
    pub(super) fn products(&mut self) -> Result<(), ThreadError> {
        let batch = self.data.batch(self.next);
        let device = &self.device;
        let w1 = &self.params[0];
        let w2 = &self.params[2];
        let features = Matrix::new(batch.features, BATCH_ROWS, INPUTS)?;
        let w1 = Matrix::new(w1, INPUTS, HIDDEN)?;
        let w2 = Matrix::new(w2, HIDDEN, CLASSES)?;
        device.multiply(features, w1, 0.0, &mut self.activations)?;
        let activations = Matrix::new(&self.activations, BATCH_ROWS, HIDDEN)?;
        device.multiply(activations, w2, 0.0, &mut self.logits)?;
        let logits = Matrix::new(&self.logits, BATCH_ROWS, CLASSES)?;
        device.multiply(activations.transposed(), logits, 0.0, &mut self.gradients[2])?;
        device.multiply(logits, w2.transposed(), 0.0, &mut self.hidden_gradients)?;
        let hidden_gradients = Matrix::new(&self.hidden_gradients, BATCH_ROWS, HIDDEN)?;
        device.multiply(features.transposed(), hidden_gradients, 0.0, &mut self.gradients[0])?;
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
