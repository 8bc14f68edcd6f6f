//! A coordinator, as in TensorFlow 2: one program schedules calls, and the workers that are free
//! run them. Each counts once, also if workers or the coordinator are killed.
//!
//! Each call adds 1 to two variables on two parameter servers. Without flags all tasks run in this
//! process:
//!
//! ```sh
//! cargo run --example coordinator -- --calls 1000
//! ```
//!
//! With flags each task is a process. Start them in any order, and kill any of them as you like;
//! start them again with the same flags. A parameter server continues if it has a state directory:
//!
//! ```sh
//! program="cargo run --quiet --example coordinator --"
//! hosts="--ps_hosts=127.0.0.1:2222,127.0.0.1:2223 --worker_hosts=127.0.0.1:2224,127.0.0.1:2225"
//! $program $hosts --job_name=ps --task_index=0 --state-dir=/dev/shm/count-0 &
//! $program $hosts --job_name=ps --task_index=1 --state-dir=/dev/shm/count-1 &
//! $program $hosts --job_name=worker --task_index=0 &
//! $program $hosts --job_name=worker --task_index=1 &
//! $program $hosts --job_name=chief --calls 1000
//! ```
//!
//! The last line is the value of both variables: the number of calls. With `--job_name=client`
//! another program prints them while the calls run.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser};
use pushpull::error::Chain;
use pushpull::services::{
    Call, Coordinator, CoordinatorConfig, FunctionClient, FunctionClientConfig, FunctionServer,
    FunctionServerConfig, Functions,
};
use pushpull::{
    ClusterSpec, Ps, PsConfig, Reader, Sgd, Storage, TaskId, VariableSpec, WorkerConfig,
};
use tokio::signal::unix::{SignalKind, signal};

#[path = "../src/bin/options/mod.rs"]
mod classic;

/// An error of any task.
pub(crate) type ExampleError = Box<dyn Error + Send + Sync>;

/// The variables, one on each parameter server.
const VARIABLES: [&str; 2] = ["left", "right"];

/// Count to a number with calls that a coordinator schedules.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    tasks: classic::TaskOptions,
    /// Number of calls
    #[arg(long, value_name = "N", default_value_t = 1000)]
    calls: u64,
    /// How long each call takes
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0)]
    call_ms: u64,
    /// Directory of the state of a parameter server [default: memory]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    parent: classic::ExitWithParent,
}

/// Runs the process of a command line until it is done or `stop` completes.
pub(crate) async fn run(
    line: impl IntoIterator<Item = String>,
    stop: impl Future<Output = ()>,
) -> Result<(), ExampleError> {
    let command = Options::command().mut_args(classic::accepts_underscores);
    let parsed = command.try_get_matches_from(line);
    let options = parsed.and_then(|matches| Options::from_arg_matches(&matches));
    let options = options.unwrap_or_else(|error| error.exit());
    options.parent.apply()?;
    let index = options.tasks.index();
    let pause = Duration::from_millis(options.call_ms);
    let Some(job) = options.tasks.job_name.as_deref() else {
        return tokio::select! {
            done = count_in_one_process(options.calls, pause) => done,
            () = stop => Ok(()),
        };
    };
    let cluster = options.tasks.cluster().map_err(|(flag, error)| format!("{flag}: {error}"))?;
    match job {
        "ps" => {
            let listener = Ps::listen(cluster.task_address("ps", index)?).await?;
            let config = ps_config(&cluster, index);
            let state = options.state_dir.iter();
            let config = state.fold(config, |it, dir| it.storage(Storage::directory(dir)));
            Ok(listener.start(config)?.serve(stop).await?)
        }
        "worker" => {
            let listener = FunctionServer::listen(cluster.task_address("worker", index)?)?;
            let server = listener.start(worker_config(&cluster, index, pause))?;
            server.serve(stop).await;
            Ok(())
        }
        "client" => tokio::select! {
            ended = watch(&cluster) => ended,
            () = stop => Ok(()),
        },
        _ => tokio::select! {
            done = count(&cluster, options.calls) => done,
            () = stop => Ok(()),
        },
    }
}

fn ps_config(cluster: &ClusterSpec, index: u32) -> PsConfig {
    // A gradient of -1 adds 1.
    PsConfig::new(cluster.clone(), TaskId::ps(index), Sgd::new(1.0))
}

fn worker_config(cluster: &ClusterSpec, index: u32, pause: Duration) -> FunctionServerConfig {
    let functions = Functions::new()
        .add("increment", move |call| {
            let mut gradients = call.gradients()?;
            for name in VARIABLES {
                gradients.view_mut::<f32>(name)?.fill(-1.0);
            }
            std::thread::sleep(pause);
            call.push(gradients)
        })
        .add("read", |call| Ok(call.values()?.views::<f32, 2>(VARIABLES)?[0][0]));
    FunctionServerConfig::new(cluster.clone(), TaskId::worker(index), functions)
}

/// All tasks in this process, on ports that the system chooses.
async fn count_in_one_process(calls: u64, pause: Duration) -> Result<(), ExampleError> {
    let ps = [Ps::listen("127.0.0.1:0").await?, Ps::listen("127.0.0.1:0").await?];
    let workers = [FunctionServer::listen("127.0.0.1:0")?, FunctionServer::listen("127.0.0.1:0")?];
    let cluster = ClusterSpec::builder()
        .job("ps", ps.each_ref().map(|ps| ps.address()))
        .job("worker", workers.each_ref().map(|worker| worker.address()))
        .build()?;
    let mut servers = Vec::new();
    let mut functions = Vec::new();
    for (index, ps) in (0..).zip(ps) {
        servers.push(ps.start(ps_config(&cluster, index))?);
    }
    for (index, worker) in (0..).zip(workers) {
        functions.push(worker.start(worker_config(&cluster, index, pause))?);
    }
    count(&cluster, calls).await
}

/// The coordinator: schedules the calls, and prints what the variables are in the end.
async fn count(cluster: &ClusterSpec, calls: u64) -> Result<(), ExampleError> {
    let client = connect(cluster).await?;
    let variables = [
        VariableSpec::f32(VARIABLES[0], [1])?.device("/job:ps/task:0".parse()?),
        VariableSpec::f32(VARIABLES[1], [1])?.device("/job:ps/task:1".parse()?),
    ];
    client.declare(&variables, |_| ()).await?;
    let coordinator = Coordinator::resume(client, "count", CoordinatorConfig::new()).await?;
    println!("{} calls have ended before", coordinator.settled());
    // The same calls in the same order, however often the program runs.
    for number in 0..calls {
        let _ = coordinator.schedule(Call::new("increment").feed("number", number as i64)).await?;
    }
    coordinator.join().await?;
    let reader = TaskId::new("reader", 0);
    let mut reader = Reader::connect(WorkerConfig::new(cluster.clone(), reader)).await?;
    let mut params = reader.params();
    reader.pull(&mut params).await?;
    let [left, right] = params.views::<f32, 2>(VARIABLES)?;
    println!("{} {}", left[0], right[0]);
    Ok(())
}

/// Attaches to the first worker that answers.
async fn connect(cluster: &ClusterSpec) -> Result<FunctionClient, ExampleError> {
    let mut targets = cluster.job_tasks("worker")?.into_iter().flatten();
    let first = FunctionClientConfig::new(targets.next().ok_or("the cluster has no worker")?);
    Ok(FunctionClient::connect(targets.fold(first, FunctionClientConfig::or)).await?)
}

/// Another client: prints a variable again and again, until Ctrl-C.
async fn watch(cluster: &ClusterSpec) -> Result<(), ExampleError> {
    let client = connect(cluster).await?;
    loop {
        match client.call(Call::new("read")).await {
            Ok(value) => println!("{} calls have counted", value.element::<f32>()?),
            // Tasks may be stopping, or come back.
            Err(error) => eprintln!("{}", Chain(&error)),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns a future of the first Ctrl-C or SIGTERM. Both are handled from this call on.
pub(crate) fn stop_signal() -> Result<impl Future<Output = ()>, ExampleError> {
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
async fn main() -> Result<(), ExampleError> {
    run(std::env::args(), stop_signal()?).await
}
