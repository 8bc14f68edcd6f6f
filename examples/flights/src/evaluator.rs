//! [`Evaluator`]: scores the model that the servers hold.

use std::time::{Duration, Instant};

use pushpull::blocking::Reader;
use pushpull::{Params, TaskId, WorkerConfig};

use super::data::FlightData;
use super::model::{FlightModel, Weights};
use super::score::Score;
use super::task::TaskError;
use super::variables::{FINISHED, ModelVariables, TABLE};

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

    /// Waits until the workers with these indices have trained on their shares, and returns the
    /// global step. Prints the workers that it waits for. Continues without them once no step has
    /// been made for [`PATIENCE`].
    pub(crate) fn await_finished(&mut self, workers: &[u32]) -> Result<u64, TaskError> {
        let mut last_step = 0;
        let mut last_progress = Instant::now();
        let mut awaited = Vec::new();
        loop {
            let step = self.reader.pull(&mut self.params)?;
            let finished = self.params.view::<i64>(FINISHED)?;
            let unfinished = workers.iter().zip(finished).filter(|(_, finished)| **finished == 0);
            let unfinished: Vec<u32> = unfinished.map(|(&index, _)| index).collect();
            if step > last_step {
                last_step = step;
                last_progress = Instant::now();
            }
            if unfinished.is_empty() {
                return Ok(step);
            }
            let names = names(&unfinished);
            if last_progress.elapsed() >= PATIENCE {
                eprintln!("goes on without {names}: no step was made for {PATIENCE:?}");
                return Ok(step);
            }
            if unfinished != awaited {
                eprintln!("waits for {names}, until no step is made for {PATIENCE:?}");
                awaited = unfinished;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns the names of the workers with these indices.
fn names(workers: &[u32]) -> String {
    let names: Vec<String> =
        workers.iter().map(|&index| TaskId::worker(index).to_string()).collect();
    names.join(", ")
}

/// The longest wait of the chief for a step of the workers that have not finished.
const PATIENCE: Duration = Duration::from_secs(60);
