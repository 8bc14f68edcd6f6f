//! Predicts from ids alone which flights will be late. A table has one row per id, which is pulled
//! and pushed by rows.
//!
//! Two parameter servers and two workers run in this process, beside a run of the same model
//! without servers. With `--job-name` and `--task-index`, one task of a cluster runs. The dataset
//! is downloaded by hand; the program prints the command.

mod cluster;
mod data;
mod evaluator;
mod metrics;
mod model;
mod options;
#[path = "../../digits/src/random.rs"]
mod random;
mod reference;
mod replica;
mod score;
#[path = "../../task/mod.rs"]
mod task;
mod variables;
mod worker_task;

use std::process::ExitCode;
use std::time::Instant;

use pushpull::error::Chain;

use cluster::RunningCluster;
use data::{Epoch, FIELDS, FlightSplit};
use model::{EmbeddingNetwork, FlightModel, Logistic};
use options::{FlightsOptions, ModelKind};
use reference::Reference;
use score::Score;
use task::{Role, TaskError};
use variables::ModelVariables;
use worker_task::work;

fn main() -> ExitCode {
    let parsed = FlightsOptions::parse_with_role(std::env::args_os());
    let result = parsed.and_then(|(options, role)| match options.model {
        ModelKind::Logistic => run(&options, role.as_ref(), Logistic::new(FIELDS)),
        ModelKind::Network => {
            let network = EmbeddingNetwork::new(FIELDS, EMBEDDING_WIDTH, HIDDEN_UNITS);
            run(&options, role.as_ref(), network)
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("flights: {}", Chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Runs one task of a cluster, or without a role the whole cluster.
fn run<M: FlightModel<N>, const N: usize>(
    options: &FlightsOptions,
    role: Option<&Role>,
    model: M,
) -> Result<(), TaskError> {
    match role {
        None => compare(options, model),
        Some(role @ Role::Ps(task, cluster)) => {
            options.process.serve(options.server(cluster, task.index), role)
        }
        Some(Role::Worker(task, cluster)) => {
            let split = FlightSplit::open(&options.data)?;
            let Some(report) = work(options, model, &split, task, cluster)? else {
                return Ok(());
            };
            println!(
                "{{\"example\":\"flights\",\"model\":\"{}\",\"workers\":{},\"ps\":{},\"shards\":{},\
                 \"epochs\":{},\"steps\":{},\"auc\":{:.4},\"log_loss\":{:.4},\"seconds\":{:.2}}}",
                options.model.name(),
                cluster.num_tasks("worker")?,
                cluster.num_tasks("ps")?,
                options.shards_of(1),
                options.epochs,
                report.steps,
                report.score.auc,
                report.score.log_loss,
                report.seconds,
            );
            Ok(())
        }
    }
}

/// Trains a model over servers and without, and prints both scores after each epoch and, as the
/// last line, one JSON object.
fn compare<M: FlightModel<N>, const N: usize>(
    options: &FlightsOptions,
    model: M,
) -> Result<(), TaskError> {
    let split = FlightSplit::open(&options.data)?;
    let size = options.size();
    let variables = ModelVariables::of(&model, split.ids, size.parts(), options.seed)?;
    let mut reference = Reference::new(model.clone(), &variables, options.learning_rate);
    let mut cluster =
        RunningCluster::start(model, &variables, size, options.learning_rate, options.codec)?;
    let [mut seconds, mut reference_seconds] = [0.0; 2];
    let (mut ours, mut theirs) = scores(&mut cluster, &mut reference, &split)?;
    println!("        over servers      reference");
    println!("epoch     AUC  log-loss     AUC  log-loss");
    println!("    0  {ours}  {theirs}");
    for index in 0..options.epochs {
        let epoch = Epoch::new(split.train.rows(), options.batch, options.seed, index);
        let start = Instant::now();
        cluster.train(&split.train, &epoch)?;
        seconds += start.elapsed().as_secs_f64();
        let start = Instant::now();
        reference.train(&split.train, &epoch);
        reference_seconds += start.elapsed().as_secs_f64();
        (ours, theirs) = scores(&mut cluster, &mut reference, &split)?;
        println!("{:5}  {ours}  {theirs}", index + 1);
    }
    let push_bytes = cluster.push_bytes();
    cluster.stop()?;
    let difference = (ours.auc - theirs.auc).abs();
    println!(
        "{{\"example\":\"flights\",\"model\":\"{}\",\"workers\":{},\"ps\":{},\"shards\":{},\"epochs\":{},\
         \"codec\":\"{}\",\"push_bytes\":{push_bytes},\
         \"train\":{},\"test\":{},\"ids\":{},\"auc\":{:.4},\"reference_auc\":{:.4},\
         \"difference\":{difference:.6},\"log_loss\":{:.4},\"reference_log_loss\":{:.4},\
         \"seconds\":{seconds:.2},\"reference_seconds\":{reference_seconds:.2}}}",
        options.model.name(),
        size.workers,
        size.servers,
        size.shards,
        options.epochs,
        options.codec.map_or_else(|| "none".to_owned(), |codec| codec.to_string()),
        split.train.rows(),
        split.test.rows(),
        split.ids,
        ours.auc,
        theirs.auc,
        ours.log_loss,
        theirs.log_loss,
    );
    if difference > DIFFERENCE_MAX {
        return Err(
            format!("the AUCs differ by {difference:.6}, more than {DIFFERENCE_MAX}").into()
        );
    }
    Ok(())
}

/// Returns the scores of the model over servers and of the reference.
fn scores<M: FlightModel<N>, const N: usize>(
    cluster: &mut RunningCluster<M, N>,
    reference: &mut Reference<M, N>,
    split: &FlightSplit,
) -> Result<(Score, Score), TaskError> {
    let scores = cluster.score(&split.test)?.zip(reference.score(&split.test));
    Ok(scores.ok_or("training has diverged")?)
}

/// Maximum difference of the areas under the ROC curves.
const DIFFERENCE_MAX: f64 = 0.005;

/// Number of values in an embedding of [`EmbeddingNetwork`].
const EMBEDDING_WIDTH: usize = 8;

/// Number of units in the hidden layer of [`EmbeddingNetwork`].
const HIDDEN_UNITS: usize = 32;

#[cfg(test)]
mod tests;
