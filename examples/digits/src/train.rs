//! The training loop of one worker.

use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::variable::{DType, Initializer, Shape};
use pushpull::{ClusterSpec, Push, TaskId, VariableSpec, WorkerConfig};

use super::data::{Batch, Batches, Split};
use super::model::{Mlp, NAMES};
use super::options::DigitsOptions;
use super::output::{print_error, print_line};
use super::progress::Progress;
use super::task::TaskError;

/// The result of a training, reported by the chief.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Global step at the end.
    pub(crate) steps: u64,
    /// Share of held-out rows that are classified correctly.
    pub(crate) accuracy: f64,
    /// The chief's losses: global step and mean loss.
    pub(crate) losses: Vec<(u64, f32)>,
}

/// Trains until the last step. Returns the outcome if this worker is the chief.
pub(crate) fn run(
    options: &DigitsOptions,
    cluster: &ClusterSpec,
    task: TaskId,
    split: &Split,
) -> Result<Option<Outcome>, TaskError> {
    let config = WorkerConfig::new(cluster.clone(), task.clone())
        .on_progress(Duration::from_secs(5), |shards| {
            print_error(format_args!("waiting for {shards}"))
        });
    let encoded = match options.codec {
        Some(codec) => config.clone().codec("*", codec),
        None => config.clone(),
    };
    let mut worker = Worker::connect(encoded)?;
    let mut model = Mlp::new(split.train.width, options.hidden, split.train.classes);
    let mut params = worker.join(&variables(&model, options.seed)?, |_| ())?;

    let workers = cluster.num_tasks("worker")?;
    worker.assign_add(ARRIVAL_COUNT, &[1_i64])?;
    wait_for_all(&config, workers)?;
    let place = cluster.task_indices("worker")?.iter().position(|&index| index == task.index);
    let place = place.ok_or("the cluster does not list this worker")?;
    let rows = split.train.rows();
    let mut batches = Batches::new(rows, place, workers, options.rows(), options.seed)?;
    let mut batch = Batch::default();

    let is_chief = worker.is_chief();
    if is_chief && let Some(placement) = worker.placement() {
        print_line(format_args!("{}", placement.table()))?;
    }
    let progress = is_chief.then(|| Progress::new(options.steps));
    let mut losses = Vec::new();
    while let Some(token) = worker.token()? {
        if worker.pull(&token, &mut params)?.is_stale() {
            continue;
        }
        batches.next_into(&split.train, &mut batch);
        let mut gradients = worker.gradients();
        let loss =
            model.gradients(params.views(NAMES)?, batch.samples(), gradients.views_mut(NAMES)?);
        let step = match worker.push(token, gradients)? {
            Push::Applied { step, .. } | Push::Accepted { step } => step,
            // Other replicas were faster. Take another token.
            _ => continue,
        };
        losses.push((step, loss));
        if let Some(progress) = &progress {
            progress.at(step, loss);
        }
    }
    let outcome = match progress {
        None => None,
        Some(progress) => {
            progress.finish();
            let mut reader = Reader::connect(config)?;
            let steps = reader.pull(&mut params)?;
            let accuracy = model.accuracy(params.views(NAMES)?, split.test.samples());
            Some(Outcome { steps, accuracy, losses })
        }
    };
    worker.leave()?;
    Ok(outcome)
}

/// Waits until every worker has arrived, so that commands typed in several terminals train
/// together. Continues without the rest after a minute.
fn wait_for_all(config: &WorkerConfig, workers: usize) -> Result<(), TaskError> {
    let mut reader = Reader::connect(config.clone())?;
    let mut values = reader.params();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        reader.pull(&mut values)?;
        let [arrived] = *values.view::<i64>(ARRIVAL_COUNT)? else {
            return Err("the count of workers is not a scalar".into());
        };
        if arrived >= workers as i64 || Instant::now() >= deadline {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Name of a plain variable that counts the workers that have arrived.
const ARRIVAL_COUNT: &str = "workers_arrived";

/// Returns the variables: Glorot weights, zero biases, and the count of workers.
fn variables(model: &Mlp, seed: u64) -> Result<Vec<VariableSpec>, pushpull::error::VariableError> {
    let shapes = NAMES.into_iter().zip(model.shapes());
    let arrived = VariableSpec::new(ARRIVAL_COUNT, DType::I64, Shape::scalar());
    shapes
        .map(|(name, shape)| {
            let extents: Vec<u64> = shape.into_iter().map(|extent| extent as u64).collect();
            let spec = VariableSpec::f32(name, extents)?.seed(seed);
            Ok(match spec.shape().rank() {
                2 => spec.initializer(Initializer::GlorotUniform),
                _ => spec,
            })
        })
        .chain([arrived])
        .collect()
}
