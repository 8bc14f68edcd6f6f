//! Trains a small network on handwritten digits over a parameter server.
//!
//! Without flags, two parameter servers and two workers run in this process; with `--synchronous
//! A/R`, R workers; with `--towers K`, one client with K towers. With `--job-name` and
//! `--task-index`, one task of a cluster runs, as in the classic trainers; see the README.
//! `train.rs` is the trainer.

mod batches;
mod codec_table;
mod data;
mod data_origin;
mod ledger;
mod options;
mod output;
mod picture;
#[path = "../../../src/bin/options/place.rs"]
mod place;
mod presence;
mod progress;
mod random;
mod sample_table;
#[path = "../../task/mod.rs"]
mod task;
mod towers;
mod train;

use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pushpull::error::Chain;
use pushpull::local::Cluster;
use pushpull::worker::Interrupt;
use pushpull::{ClusterSpec, TaskId};
use rustix::process::getppid;

use data::Split;
use data_origin::DataOrigin;
use options::DigitsOptions;
use output::{print_error, print_line};
use place::Place;
use task::{EndSignals, Replicas, Role, TaskError};
use train::Outcome;

fn main() -> ExitCode {
    let parsed = DigitsOptions::parse_with_role(std::env::args_os());
    let result = parsed.and_then(|(options, role)| match &role {
        None => all_in_one(&options),
        Some(role @ Role::Ps(task, cluster)) => {
            let checkpoints = options.checkpoints()?;
            options.process.serve(options.server(cluster, task.clone(), checkpoints), role)
        }
        Some(Role::Worker(task, cluster)) => work(&options, task.clone(), cluster.clone()),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(format_args!("digits: {}", Chain(&*error)));
            ExitCode::FAILURE
        }
    }
}

/// Runs the whole cluster in this process, once or with each codec.
fn all_in_one(options: &DigitsOptions) -> Result<(), TaskError> {
    let split = load(options)?;
    if options.print_samples {
        return sample_table::print(&split);
    }
    match (&options.codec_table, options.towers) {
        (Some(path), _) => codec_table::write(options, &split, path),
        (None, Some(towers)) => {
            report(options, &split, Some(towers::train(options, &split, towers)?))
        }
        (None, None) => report(options, &split, train_here(options, &split, &on_signal(options)?)?),
    }
}

/// The result of a training.
struct TrainingRun {
    outcome: Outcome,
    workers: usize,
    servers: usize,
    elapsed: Duration,
    /// Bytes of gradients that the servers received, as encoded.
    push_bytes: u64,
}

/// Trains with servers and workers in this process. Returns nothing if it is interrupted before it
/// has values.
fn train_here(
    options: &DigitsOptions,
    split: &Split,
    interrupt: &Interrupt,
) -> Result<Option<TrainingRun>, TaskError> {
    let checkpoints = options.checkpoints()?;
    let cluster = Cluster::start(2, options.workers(), |cluster, task| {
        options.server(&cluster, task, checkpoints.clone())
    })?;
    let start = Instant::now();
    let first_error = Mutex::new(None);
    let outcome = std::thread::scope(|scope| {
        let spec = cluster.spec();
        let first_error = &first_error;
        let run = move |index| {
            let outcome = train::run(options, spec, TaskId::worker(index), split, interrupt);
            outcome.unwrap_or_else(|error| {
                // The others may wait for this worker, until they fail because of it.
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                interrupt.raise();
                None
            })
        };
        let others: Vec<_> =
            (1..options.workers()).map(|index| scope.spawn(move || run(index))).collect();
        let outcome = run(0);
        let all_ended = others.into_iter().all(|other| other.join().is_ok());
        all_ended.then_some(outcome).ok_or("a worker panicked")
    })?;
    if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let elapsed = start.elapsed();
    let push_bytes = cluster.handles().iter().map(|server| server.metrics().push_bytes).sum();
    let run = TrainingRun::new(outcome, cluster.spec(), elapsed, push_bytes)?;
    cluster.stop()?;
    Ok(run)
}

impl TrainingRun {
    fn new(
        outcome: Option<Outcome>,
        cluster: &ClusterSpec,
        elapsed: Duration,
        push_bytes: u64,
    ) -> Result<Option<TrainingRun>, TaskError> {
        let workers = cluster.num_tasks("worker")?;
        let servers = cluster.num_tasks("ps")?;
        let run = |outcome| TrainingRun { outcome, workers, servers, elapsed, push_bytes };
        Ok(outcome.map(run))
    }
}

/// Runs one worker of a cluster.
fn work(options: &DigitsOptions, task: TaskId, cluster: ClusterSpec) -> Result<(), TaskError> {
    let split = load(options)?;
    let start = Instant::now();
    let outcome = train::run(options, &cluster, task, &split, &on_signal(options)?)?;
    // The servers run in other processes, so their byte counts are not known here.
    report(options, &split, TrainingRun::new(outcome, &cluster, start.elapsed(), 0)?)
}

/// Returns an interrupt that the signals which end a process raise: Ctrl-C, SIGTERM and SIGHUP. A second
/// signal ends the process at once. So does the end of its parent, [`ORPHAN_MAX`] later, if the process
/// follows it.
fn on_signal(options: &DigitsOptions) -> Result<Interrupt, TaskError> {
    let interrupt = Interrupt::new();
    let raised = interrupt.clone();
    let follows_parent = options.process.follows_parent();
    let parent = getppid();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = runtime.block_on(async { EndSignals::watch() })?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            signals.any().await;
            raised.raise();
            // A chief whose servers are lost waits for them, to save its checkpoint.
            match follows_parent && getppid() != parent {
                true => _ = tokio::time::timeout(ORPHAN_MAX, signals.any()).await,
                false => signals.any().await,
            }
        });
        print_error(format_args!("digits: ended at once, without a last checkpoint"));
        std::process::exit(1);
    });
    Ok(interrupt)
}

/// The time that a process has for its end when the one that started it has ended.
const ORPHAN_MAX: Duration = Duration::from_secs(5);

fn load(options: &DigitsOptions) -> Result<Split, TaskError> {
    Ok(match &options.data {
        Some(DataOrigin::Files(Place::Directory(directory))) => Split::open(directory)?,
        Some(DataOrigin::Files(Place::Url(url))) => Split::open_url(url)?,
        Some(DataOrigin::Stream(address)) => Split::of_stream(address)?,
        None => Split::digits()?,
    })
}

/// Prints the loss curve and, as the last line, one JSON object.
fn report(
    options: &DigitsOptions,
    split: &Split,
    run: Option<TrainingRun>,
) -> Result<(), TaskError> {
    let Some(run) = run else { return Ok(()) };
    let outcome = &run.outcome;
    print_line(format_args!("{}", picture::curve(&outcome.losses, 60, 10)))?;
    let mode = match options.synchronous {
        None if options.towers.is_some() => "\"towers\"".to_owned(),
        None => "\"asynchronous\"".to_owned(),
        Some(Replicas { aggregate, .. }) => {
            format!("\"synchronous\",\"replicas_to_aggregate\":{aggregate}")
        }
    };
    print_line(format_args!(
        "{{\"example\":\"digits\",\"mode\":{mode},\"workers\":{},\"ps\":{},\
         \"from_step\":{},\"steps\":{},\"test\":{},\"accuracy\":{:.4},\"seconds\":{:.2}}}",
        run.workers,
        run.servers,
        outcome.from_step,
        outcome.steps,
        split.test.rows(),
        outcome.accuracy,
        run.elapsed.as_secs_f64(),
    ))?;
    Ok(())
}

#[cfg(test)]
mod tests;
