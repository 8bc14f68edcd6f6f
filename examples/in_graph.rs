//! In-graph computation, as the classic documents have it: one client, variables on a ps task, and
//! each operation on a worker task of its own.
//!
//! `w` is a 2x2 matrix of 2 and `b` one of 5, both on `/job:ps/task:0`. In one call of
//! [`FunctionClient::run`], worker 0 computes `w + b`, worker 1 `w * b` and worker 2 `w / b`. The
//! values go from the ps to the workers, and the results from the workers to the client.
//!
//! Without flags all tasks run in this process:
//!
//! ```sh
//! cargo run --example in_graph
//! ```
//!
//! With flags each task is a process. Start them in any order:
//!
//! ```sh
//! program="cargo run --quiet --example in_graph --"
//! hosts="--ps_hosts=127.0.0.1:2222 --worker_hosts=127.0.0.1:2223,127.0.0.1:2224,127.0.0.1:2225"
//! $program $hosts --job_name=ps --task_index=0 &
//! $program $hosts --job_name=worker --task_index=0 &
//! $program $hosts --job_name=worker --task_index=1 &
//! $program $hosts --job_name=worker --task_index=2 &
//! $program $hosts --job_name=client
//! ```
//!
//! In place of the first four, `pushpull-ps` with the same flags serves the same functions. The
//! client attaches to worker 0, or with `--target=ADDRESS` to any other task, and then needs no
//! hosts. With `--forever` it computes once a second until Ctrl-C, and reports failures.
//!
//! With `--two-layers` one process trains the classic network of two layers: each layer on a ps
//! task of its own, and a client that attaches to worker 7 of 8. The last line is the largest
//! difference between its weights and those of a run without servers.

use std::error::Error;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser};
use pushpull::error::Chain;
use pushpull::services::{
    Call, FunctionClient, FunctionServer, FunctionServerConfig, Functions, Outputs,
};
use pushpull::variable::Initializer;
use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, TaskId, VariableSpec};
use tokio::signal::unix::{SignalKind, signal};

#[path = "../src/bin/options/mod.rs"]
mod classic;
#[path = "in_graph/two_layers.rs"]
pub(crate) mod two_layers;

/// An error of any task.
pub(crate) type GraphError = Box<dyn Error + Send + Sync>;

/// Compute w + b, w * b and w / b on three workers.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    tasks: classic::TaskOptions,
    /// Address of the task that the client attaches to [default: worker 0]
    #[arg(long, value_name = "ADDRESS")]
    target: Option<String>,
    /// Compute again and again, until Ctrl-C
    #[arg(long)]
    forever: bool,
    /// Train a network of two layers in this process
    #[arg(long, conflicts_with_all = ["target", "forever", "job_name"])]
    two_layers: bool,
    /// Number of steps of `--two-layers`
    #[arg(long, value_name = "N", default_value_t = 10_000, requires = "two_layers")]
    steps: u64,
    #[command(flatten)]
    parent: classic::ExitWithParent,
}

/// Runs the process of a command line until it is done or `stop` completes.
pub(crate) async fn run(
    line: impl IntoIterator<Item = String>,
    stop: impl Future<Output = ()>,
) -> Result<(), GraphError> {
    let command = Options::command().mut_args(classic::accepts_underscores);
    let parsed = command.try_get_matches_from(line);
    let options = parsed.and_then(|matches| Options::from_arg_matches(&matches));
    let options = options.unwrap_or_else(|error| error.exit());
    options.parent.apply()?;
    let index = options.tasks.index();
    let cluster = || options.tasks.cluster().map_err(|(flag, error)| format!("{flag}: {error}"));
    let client = async {
        match (&options.tasks.job_name, &options.target) {
            (None, None) if options.two_layers => train_two_layers(options.steps).await,
            (None, None) => compute_in_one_process(options.forever).await,
            (_, Some(target)) => compute(target, options.forever).await,
            (_, None) => {
                let cluster = cluster()?;
                compute(cluster.task_address("worker", 0)?, options.forever).await
            }
        }
    };
    match options.tasks.job_name.as_deref() {
        None | Some("client") => tokio::select! {
            done = client => done,
            () = stop => Ok(()),
        },
        Some("ps") => serve_variables(cluster()?, TaskId::ps(index), stop).await,
        Some(job) => serve_functions(cluster()?, TaskId::new(job, index), stop).await,
    }
}

/// A ps task: holds variables until `stop`.
async fn serve_variables(
    cluster: ClusterSpec,
    task: TaskId,
    stop: impl Future<Output = ()>,
) -> Result<(), GraphError> {
    let listener = Ps::listen(cluster.task_address("ps", task.index)?).await?;
    println!("{task} serves on {}", listener.address());
    Ok(listener.start(PsConfig::new(cluster, task, Sgd::new(0.1)))?.serve(stop).await?)
}

/// A worker task: computes for clients until `stop`.
async fn serve_functions(
    cluster: ClusterSpec,
    task: TaskId,
    stop: impl Future<Output = ()>,
) -> Result<(), GraphError> {
    let listener = FunctionServer::listen(cluster.task_address(&task.job, task.index)?)?;
    println!("{task} serves on {}", listener.address());
    let functions = Functions::new().elementwise();
    let server = listener.start(FunctionServerConfig::new(cluster, task, functions))?;
    server.serve(stop).await;
    Ok(())
}

/// All tasks in this process, on ports that the system chooses.
async fn compute_in_one_process(forever: bool) -> Result<(), GraphError> {
    let ps = Ps::listen("127.0.0.1:0").await?;
    let workers =
        (0..3).map(|_| FunctionServer::listen("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
    let cluster = ClusterSpec::builder()
        .job("ps", [ps.address()])
        .job("worker", workers.iter().map(|worker| worker.address()))
        .build()?;
    let _ps = ps.start(PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(0.1)))?;
    let mut servers = Vec::new();
    for (index, worker) in (0..).zip(workers) {
        let functions = Functions::new().elementwise();
        let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(index), functions);
        servers.push(worker.start(config)?);
    }
    compute(servers[0].target(), forever).await
}

/// Trains the network of two layers, and prints how it ended.
async fn train_two_layers(steps: u64) -> Result<(), GraphError> {
    let trained = two_layers::train(steps).await?;
    println!("loss {:.4}, then {:.4}", trained.first_loss, trained.last_loss);
    println!("{steps} steps, largest difference from a local run: {:e}", trained.difference);
    Ok(())
}

/// The client: attaches to the task at an address, and prints the three matrices.
async fn compute(target: &str, forever: bool) -> Result<(), GraphError> {
    let client = FunctionClient::connect(target).await?;
    declare_variables(&client).await?;
    loop {
        match compute_once(&client).await {
            Ok([sum, product, quotient]) => {
                println!("w + b = {sum}\nw * b = {product}\nw / b = {quotient}");
            }
            // The tasks may be stopping, or come back.
            Err(error) if forever => eprintln!("{}", Chain(&*error)),
            Err(error) => return Err(error),
        }
        if !forever {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Declares the variables on `/job:ps/task:0` and initializes them.
///
/// If they have values already, they keep those.
async fn declare_variables(client: &FunctionClient) -> Result<(), GraphError> {
    let matrix = |name, value| -> Result<VariableSpec, GraphError> {
        let matrix = VariableSpec::f32(name, [2, 2])?.device("/job:ps/task:0".parse()?);
        Ok(matrix.initializer(Initializer::Constant(value)))
    };
    Ok(client.declare(&[matrix("w", 2.0)?, matrix("b", 5.0)?], |_| ()).await?)
}

/// Computes the three matrices, each on its own worker, in one call.
pub(crate) async fn compute_once(client: &FunctionClient) -> Result<[String; 3], GraphError> {
    let of_variables = |function: &str, device: &str| {
        Call::new(function).on(device).variable("a", "w").variable("b", "b")
    };
    let [sum, product, quotient] = client
        .run([
            of_variables("add", "/job:worker/task:0/cpu:0"),
            of_variables("mul", "/job:worker/task:1/cpu:0"),
            of_variables("div", "/job:worker/task:2/cpu:0"),
        ])
        .await?;
    Ok([matrix_text(&sum)?, matrix_text(&product)?, matrix_text(&quotient)?])
}

/// Returns a matrix as text, such as `[[1, 2], [3, 4]]`.
fn matrix_text(outputs: &Outputs) -> Result<String, GraphError> {
    let matrix = outputs.value()?;
    let columns = matrix.shape().extents().last().copied().unwrap_or(1) as usize;
    let rows = matrix.view::<f32>()?.chunks(columns).map(|row| format!("{row:?}"));
    Ok(format!("[{}]", rows.collect::<Vec<_>>().join(", ")))
}

/// Returns a future of the first Ctrl-C or SIGTERM. Both are handled from this call on.
pub(crate) fn stop_signal() -> Result<impl Future<Output = ()>, GraphError> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupts.recv() => {}
            _ = terminations.recv() => {}
        }
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), GraphError> {
    run(std::env::args(), stop_signal()?).await
}
