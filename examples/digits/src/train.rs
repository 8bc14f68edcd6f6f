//! The training of one worker.

use std::sync::Arc;
use std::time::Duration;

use pushpull::blocking::TrainingSession;
use pushpull::compute::{
    Compute, ComputeError, Device, Mlp, Model, ModelError, Network, Resident, View,
};
use pushpull::training::data::Pipeline;
use pushpull::training::summary::{SummaryConfig, SummaryWriter};
use pushpull::training::{TrainingConfig, hooks};
use pushpull::worker::Interrupt;
use pushpull::{ClusterSpec, TaskId, VariableSpec, Worker, WorkerConfig};

use super::batches::Batches;
use super::data::{CLASSES, Dataset, Sample, Split};
use super::ledger;
use super::options::DigitsOptions;
use super::output::{print_error, print_line};
use super::presence::Presence;
use super::progress::Progress;
use super::task::{Replicas, TaskError};

/// The result of a training, reported by the chief.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Global step at the start: 0, or that of the values which the servers had.
    pub(crate) from_step: u64,
    /// Global step at the end.
    pub(crate) steps: u64,
    /// Share of held-out rows that are classified correctly.
    pub(crate) accuracy: f64,
    /// The chief's losses: global step and mean loss.
    pub(crate) losses: Vec<(u64, f64)>,
}

/// Trains until the last step, the end of the data, or the interrupt. Returns the outcome if this
/// worker is the chief and has joined.
pub(crate) fn run(
    options: &DigitsOptions,
    cluster: &ClusterSpec,
    task: TaskId,
    split: &Split,
    interrupt: &Interrupt,
) -> Result<Option<Outcome>, TaskError> {
    let device = device(options)?;
    let network = Mlp::new(device, &[split.width(), options.hidden, CLASSES]);
    let mut model = Model::new(network, NAMES);
    let mut batches = Batches::new(options, split)?;

    let accuracy = accuracy(model.network().clone(), &split.test);
    let metrics = accuracy.handle();
    let mut worker = worker_config(options, cluster, &task);
    worker = worker.credentials(options.process.credentials(&task)?);
    if let Some(data_set) = batches.declared() {
        worker = worker.data(data_set.clone());
    }
    let is_chief = cluster.chief() == Some(task.clone());
    let mut config = TrainingConfig::new(worker)
        .variables(variables(options, split, &model)?)
        .interrupt(interrupt)
        .hook(hooks::NanGuard::fail())
        .hook(hooks::StepCounter::every_steps(100));
    if options.checkpoint_dir.is_some() {
        config = config.checkpoint_every_steps(options.checkpoint_steps);
    }
    if let Some(directory) = &options.summaries {
        let directory = directory.join(format!("{}-{}", task.job, task.index));
        let writer = SummaryWriter::create(directory, SummaryConfig::new())?;
        config = config.hook(hooks::Summaries::every_steps(10, writer));
    }
    config = match is_chief {
        true => config.hook(Progress::new(options.total_steps(split)?)).hook(accuracy),
        false => config.hook(Presence::new(task)),
    };

    let session = TrainingSession::start(config)?;
    let from_step = session.global_step();
    if is_chief && let Some(placement) = session.worker().and_then(Worker::placement) {
        print_line(format_args!("{}", placement.table()))?;
    }
    let mut losses = Vec::new();
    let ended = session.run(|step| {
        let batch = batches.of_step(step)?;
        let rows = Dataset::of(&batch.samples);
        let loss = step.compute(&mut model, rows.samples())?;
        if options.ledger {
            let (_, gradients) = step.parts();
            ledger::enter(gradients, &batch.indices)?;
            std::thread::sleep(Duration::from_millis(options.step_delay_ms));
        }
        losses.push((step.step(), loss));
        Ok::<(), TaskError>(())
    })?;
    let accuracy = metrics.get().and_then(|metrics| metrics.get(ACCURACY));
    Ok(accuracy.map(|accuracy| Outcome { from_step, steps: ended.step, accuracy, losses }))
}

/// Opens the device that computes. The best one is the processor if there is no CUDA device, and
/// the worker says why.
fn device(options: &DigitsOptions) -> Result<Device, TaskError> {
    if options.device != "auto" {
        return Ok(Device::pick(&options.device)?);
    }
    let (device, reason) = Device::auto()?;
    match reason {
        None | Some(ComputeError::WithoutCuda { .. }) => {}
        Some(reason) => print_error(format_args!("computes on {device}: {reason}")),
    }
    Ok(device)
}

/// Returns the batches that all workers share.
pub(crate) fn pipeline(options: &DigitsOptions, split: &Split) -> Pipeline<Sample> {
    let pipeline = split.train.clone().shuffle(options.seed).batch(options.rows());
    match options.epochs {
        Some(epochs) => pipeline.epochs(epochs),
        None => pipeline.repeat(),
    }
}

/// Returns the settings of this worker.
fn worker_config(options: &DigitsOptions, cluster: &ClusterSpec, task: &TaskId) -> WorkerConfig {
    let config = WorkerConfig::new(cluster.clone(), task.clone())
        .on_progress(Duration::from_secs(5), |shards| {
            print_error(format_args!("waiting for {shards}"))
        });
    let config = match options.synchronous {
        Some(Replicas { aggregate, total }) => config.expect_replicas(aggregate, total),
        None => config.expect_synchronous(false),
    };
    let config = match options.last_step() {
        Some(step) => config.expect_last_step(step),
        None => config.expect_no_last_step(),
    };
    match options.codec {
        Some(codec) => config.codec("*", codec),
        None => config,
    }
}

/// Returns a hook that measures the accuracy of the final values.
fn accuracy(mut model: Mlp, test: &Arc<Dataset>) -> hooks::FinalMetrics {
    let test = test.clone();
    hooks::FinalMetrics::new(move |params, metrics| {
        let device = model.device().clone();
        let values: Result<Vec<Resident<'_, f32>>, ComputeError> =
            params.views(NAMES)?.into_iter().map(|values| device.resident(values)).collect();
        let values = values?;
        let views: Vec<View<'_, f32>> = values.iter().map(Resident::view).collect();
        metrics.set(ACCURACY, model.accuracy(&views, test.samples())?);
        Ok(())
    })
}

/// Returns the variables of the model, and the ledger if there is one.
pub(crate) fn variables(
    options: &DigitsOptions,
    split: &Split,
    model: &Model<Mlp>,
) -> Result<Vec<VariableSpec>, ModelError> {
    let seeded = model.variables()?.into_iter().map(|variable| variable.seed(options.seed));
    let ledger = options.ledger.then(|| ledger::variable(split.train_rows)).transpose()?;
    Ok(seeded.chain(ledger).collect())
}

/// Names of the variables: weights and biases of both layers.
pub(crate) const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];

/// Name of the metric of the final values.
const ACCURACY: &str = "accuracy";
