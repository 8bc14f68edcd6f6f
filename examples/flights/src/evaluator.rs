//! [`Evaluator`]: scores the model that the servers hold.

use std::time::{Duration, Instant};

use pushpull::blocking::Reader;
use pushpull::{Params, WorkerConfig};

use super::data::FlightData;
use super::model::{FlightModel, Weights};
use super::score::Score;
use super::task::TaskError;
use super::variables::{FINISHED_COUNT, ModelVariables, TABLE};

/// Reads the values without taking part in training.
#[derive(Debug)]
pub(crate) struct Evaluator<M> {
    reader: Reader,
    params: Params,
    model: M,
    /// The whole table, and the ids of its rows.
    table: Vec<f32>,
    ids: Vec<u64>,
}

impl<M> Evaluator<M> {
    /// Connects to servers whose variables are initialized.
    pub(crate) fn connect<const N: usize>(
        config: WorkerConfig,
        model: M,
        variables: &ModelVariables<N>,
    ) -> Result<Evaluator<M>, TaskError> {
        let reader = Reader::connect(config)?;
        let shape = variables.table.shape();
        Ok(Evaluator {
            params: reader.params(),
            reader,
            model,
            table: vec![0.0; shape.elements() as usize],
            ids: (0..shape.rows()).collect(),
        })
    }

    /// Returns the current score of the model.
    pub(crate) fn score<const N: usize>(
        &mut self,
        dataset: &FlightData,
    ) -> Result<Option<Score>, TaskError>
    where
        M: FlightModel<N>,
    {
        self.reader.pull(&mut self.params)?;
        self.reader.pull_rows(TABLE, &self.ids, &mut self.table)?;
        let weights = Weights { dense: self.params.views(M::NAMES)?, rows: &self.table };
        Ok(Score::of(&mut self.model, weights, dataset))
    }

    /// Waits until `workers` workers have trained on their shares, and returns the global step.
    /// Continues without the rest once no step has been made for a minute.
    pub(crate) fn await_finished(&mut self, workers: usize) -> Result<u64, TaskError> {
        let (mut last_step, mut last_progress) = (0, Instant::now());
        loop {
            let step = self.reader.pull(&mut self.params)?;
            let [finished] = *self.params.view::<i64>(FINISHED_COUNT)? else {
                return Err("the count of workers is not a scalar".into());
            };
            if step > last_step {
                (last_step, last_progress) = (step, Instant::now());
            }
            if finished >= workers as i64 || last_progress.elapsed() >= Duration::from_secs(60) {
                return Ok(step);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
