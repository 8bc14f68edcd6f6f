//! Training as one worker of a cluster of processes.

use std::time::Instant;

use pushpull::{ClusterSpec, TaskId};

use super::data::{Epoch, FlightSplit};
use super::evaluator::Evaluator;
use super::model::FlightModel;
use super::options::FlightsOptions;
use super::replica::TrainingReplica;
use super::score::Score;
use super::task::TaskError;
use super::variables::{FINISHED, ModelVariables};

/// The result of a training, reported by the chief.
#[derive(Debug)]
pub(crate) struct WorkerReport {
    /// The score of the model once all workers had finished.
    pub(crate) score: Score,
    /// The global step at that time.
    pub(crate) steps: u64,
    /// The duration of the training.
    pub(crate) seconds: f64,
}

/// Trains on the share of one worker. Returns a report if this worker is the chief, which waits for
/// the others.
pub(crate) fn work<M: FlightModel<N>, const N: usize>(
    options: &FlightsOptions,
    model: M,
    split: &FlightSplit,
    task: &TaskId,
    cluster: &ClusterSpec,
) -> Result<Option<WorkerReport>, TaskError> {
    let parts = options.shards_of(cluster.num_tasks("ps")?);
    let indices = cluster.task_indices("worker")?;
    let variables = ModelVariables::of(&model, split.ids, parts, options.seed)?;
    let variables = variables.with_tasks(indices.len(), options.epochs, options.batch)?;
    let config = options.worker(cluster, task.index)?;
    let place = indices.iter().position(|&index| index == task.index);
    let place = place.ok_or("the cluster does not list this worker")?;

    let mut replica = TrainingReplica::join(config.clone(), model.clone(), &variables)?;
    let start = Instant::now();
    for index in 0..options.epochs {
        let epoch = Epoch::new(split.train.rows(), options.batch, options.seed, index);
        let mut share = epoch.share(place, indices.len());
        share.try_for_each(|rows| replica.step(&split.train, rows))?;
    }
    let finished: Vec<i64> = (0..indices.len()).map(|other| i64::from(other == place)).collect();
    replica.worker.assign_add(FINISHED, &finished)?;
    let is_chief = replica.worker.is_chief();
    // Synchronous steps go on without this worker only once it has left.
    replica.worker.leave()?;
    if !is_chief {
        return Ok(None);
    }
    let mut evaluator = Evaluator::connect(config, model, &variables)?;
    let steps = evaluator.await_finished(&indices)?;
    let seconds = start.elapsed().as_secs_f64();
    let score = evaluator.score(&split.test)?.ok_or("training has diverged")?;
    Ok(Some(WorkerReport { score, steps, seconds }))
}
