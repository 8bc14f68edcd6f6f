//! [`TrainingReplica`]: one worker with its buffers.

use pushpull::blocking::Worker;
use pushpull::{Params, Push, WorkerConfig};

use super::data::{FlightBatch, FlightData};
use super::model::{FlightModel, Weights, WeightsMut};
use super::task::TaskError;
use super::variables::{ModelVariables, TABLE};

/// One worker and its buffers.
#[derive(Debug)]
pub(crate) struct TrainingReplica<M, const N: usize> {
    pub(crate) worker: Worker,
    /// The dense tensors.
    params: Params,
    model: M,
    batch: FlightBatch,
    /// The rows of the batch, and their gradients.
    rows: Vec<f32>,
    row_gradients: Vec<f32>,
}

impl<M: FlightModel<N>, const N: usize> TrainingReplica<M, N> {
    /// Connects and joins with these variables.
    pub(crate) fn join(
        config: WorkerConfig,
        model: M,
        variables: &ModelVariables<N>,
    ) -> Result<TrainingReplica<M, N>, TaskError> {
        let mut worker = Worker::connect(config)?;
        let params = worker.join(&variables.all(), |_| ())?;
        let batch = FlightBatch::new(variables.table.shape().rows() as usize);
        Ok(TrainingReplica {
            worker,
            params,
            model,
            batch,
            rows: Vec::new(),
            row_gradients: Vec::new(),
        })
    }

    /// Pulls the dense tensors and the rows of a batch, and pushes their gradients. If a
    /// synchronous step was made without them, the batch is computed again.
    pub(crate) fn step(&mut self, dataset: &FlightData, rows: &[u32]) -> Result<(), TaskError> {
        self.batch.fill(dataset, rows);
        let values = self.batch.ids.len() * self.model.width();
        self.rows.resize(values, 0.0);
        self.row_gradients.resize(values, 0.0);
        loop {
            let token = self.worker.token()?.ok_or("the training has ended")?;
            if self.worker.pull(&token, &mut self.params)?.is_stale() {
                continue;
            }
            if self.worker.pull_rows(&token, TABLE, &self.batch.ids, &mut self.rows)?.is_stale() {
                continue;
            }
            let mut gradients = self.worker.gradients();
            self.model.gradients(
                Weights { dense: self.params.views(M::NAMES)?, rows: &self.rows },
                self.batch.samples(),
                WeightsMut { dense: gradients.views_mut(M::NAMES)?, rows: &mut self.row_gradients },
            );
            gradients.set_rows(TABLE, &self.batch.ids, &self.row_gradients)?;
            match self.worker.push(token, gradients)? {
                Push::Applied { .. } | Push::Accepted { .. } => return Ok(()),
                Push::Stale { .. } => {}
                other => return Err(format!("a gradient was not applied: {other:?}").into()),
            }
        }
    }
}
