//! The trainer of the classic documents: one program for the tasks of both jobs.
//!
//! Without flags all tasks run in this process:
//!
//! ```sh
//! cargo run --example trainer
//! ```
//!
//! With flags each task is a process, with the flags of the classic trainer. Start them in any
//! order:
//!
//! ```sh
//! trainer="cargo run --quiet --example trainer -- \
//!   --ps_hosts=127.0.0.1:2222,127.0.0.1:2223 --worker_hosts=127.0.0.1:2224,127.0.0.1:2225"
//! $trainer --job_name=ps --task_index=0 &
//! $trainer --job_name=ps --task_index=1 &
//! $trainer --job_name=worker --task_index=0 &
//! $trainer --job_name=worker --task_index=1
//! ```
//!
//! With `--checkpoint_dir=DIR` on each command, and one DIR for all ps tasks, the servers save
//! checkpoints and the same commands resume the training. With `--exit_with_parent=1` a task ends
//! with the process that started it, also if that is killed. The model is a line through points. The
//! last line of a worker is its result.

use std::error::Error;
use std::thread;
use std::time::Duration;

use pushpull::blocking::TrainingSession;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::optim::Adagrad;
use pushpull::server::PsListener;
use pushpull::training::{FinishedStep, Flow, Hook, HookError, TrainingConfig, TrainingEnd, hooks};
use pushpull::{ClusterSpec, Params, Ps, PsConfig, TaskId, VariableSpec, WorkerConfig};

use exit_with_parent::ExitWithParent;

#[path = "../src/bin/options/exit_with_parent.rs"]
mod exit_with_parent;

/// An error of any thread.
pub(crate) type TrainerError = Box<dyn Error + Send + Sync>;

const LAST_STEP: u64 = 2_000;

/// A hook of one's own: ends the training once the loss is low for a while.
struct LowLoss {
    steps: u32,
}

impl Hook for LowLoss {
    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        let is_low = step.scalars.get("loss").is_some_and(|loss| loss < 1e-7);
        self.steps = if is_low { self.steps + 1 } else { 0 };
        Ok(if self.steps < 20 { Flow::Continue } else { Flow::Stop("the loss is low".into()) })
    }
}

/// A ps task: holds variables until all workers have left.
pub(crate) fn serve(
    cluster: ClusterSpec,
    task: TaskId,
    listener: PsListener,
    checkpoints: Option<String>,
) -> Result<(), TrainerError> {
    let mut config = PsConfig::new(cluster, task, Adagrad::new(0.5))
        .last_step(LAST_STEP)
        .exit_when_done(Duration::from_millis(200));
    if let Some(directory) = checkpoints {
        config = config.checkpoints(Checkpoints::new(LocalDirectory::create(directory)?));
    }
    Ok(block_on(listener.start(config)?.serve(std::future::pending()))??)
}

/// A worker task: computes gradients until the training ends.
fn train(cluster: ClusterSpec, task: TaskId, saves: bool) -> Result<TrainingEnd, TrainerError> {
    let name = task.to_string();
    let mut config = TrainingConfig::new(WorkerConfig::new(cluster, task))
        .variables([VariableSpec::f32("slope", [1])?, VariableSpec::f32("height", [1])?])
        .hook(hooks::StepCounter::every_steps(200))
        .hook(hooks::StopAtStep::last(LAST_STEP))
        .hook(hooks::NanGuard::fail())
        .hook(LowLoss { steps: 0 })
        .hook(hooks::Log::every_steps(500, move |line| eprintln!("{name}: {line}")));
    if saves {
        config = config.checkpoint_every(Duration::from_secs(600));
    }
    let mut session = TrainingSession::start(config)?;
    while let Some(mut step) = session.step()? {
        let (params, gradients) = step.parts();
        let (loss, [slope, height]) = loss(params)?;
        gradients.view_mut("slope")?.copy_from_slice(&[slope]);
        gradients.view_mut("height")?.copy_from_slice(&[height]);
        step.scalar("loss", loss);
        step.push()?;
    }
    Ok(session.close()?)
}

/// Returns the mean squared error of a line through the points, and its gradient.
fn loss(params: &Params) -> Result<(f32, [f32; 2]), TrainerError> {
    let slope = params.view::<f32>("slope")?[0];
    let height = params.view::<f32>("height")?[0];
    let points = (0..32_u8).map(|point| f32::from(point) / 16.0 - 1.0);
    let mut loss = 0.0;
    let mut gradient = [0.0; 2];
    for x in points {
        let error = slope * x + height - (3.0 * x - 1.0);
        loss += error * error / 32.0;
        gradient[0] += 2.0 * error * x / 32.0;
        gradient[1] += 2.0 * error / 32.0;
    }
    Ok((loss, gradient))
}

/// All tasks in this process, on ports that the system chooses.
pub(crate) fn train_in_one_process() -> Result<Vec<TrainingEnd>, TrainerError> {
    let listeners = [block_on(Ps::listen("127.0.0.1:0"))??, block_on(Ps::listen("127.0.0.1:0"))??];
    let cluster = ClusterSpec::builder()
        .job("ps", listeners.each_ref().map(PsListener::address))
        .job("worker", ["127.0.0.1:1", "127.0.0.1:2"]) // workers accept no connections
        .build()?;
    let mut servers = Vec::new();
    for (index, listener) in (0..).zip(listeners) {
        let cluster = cluster.clone();
        servers.push(thread::spawn(move || serve(cluster, TaskId::ps(index), listener, None)));
    }
    let workers = [0, 1].map(|index| {
        let cluster = cluster.clone();
        thread::spawn(move || train(cluster, TaskId::worker(index), false))
    });
    let ends = workers.map(|worker| worker.join().map_err(|_| "a worker has panicked")?);
    let ends = ends.into_iter().collect::<Result<Vec<_>, TrainerError>>()?;
    for server in servers {
        server.join().map_err(|_| "a server has panicked")??;
    }
    Ok(ends)
}

fn block_on<F: Future>(future: F) -> Result<F::Output, TrainerError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

/// The flags, each as `--name=value`.
const FLAGS: [&str; 6] =
    ["ps_hosts", "worker_hosts", "job_name", "task_index", "checkpoint_dir", "exit_with_parent"];

/// Refuses every argument that is none of the flags.
fn check_arguments() -> Result<(), TrainerError> {
    let name =
        |argument: &String| argument.strip_prefix("--")?.split_once('=').map(|it| it.0.to_owned());
    let is_flag = |argument: &String| name(argument).is_some_and(|name| FLAGS.contains(&&*name));
    match std::env::args().skip(1).find(|argument| !is_flag(argument)) {
        Some(argument) => Err(format!("{argument:?} is none of --{}=", FLAGS.join("=, --")).into()),
        None => Ok(()),
    }
}

fn main() -> Result<(), TrainerError> {
    check_arguments()?;
    let flag = |name: &str| {
        let prefix = format!("--{name}=");
        std::env::args().find_map(|argument| argument.strip_prefix(&prefix).map(str::to_owned))
    };
    let Some(job) = flag("job_name") else {
        if std::env::args().len() > 1 {
            return Err("--job_name is missing".into());
        }
        for end in train_in_one_process()? {
            println!("ended at step {}: {}", end.step, end.reason);
        }
        return Ok(());
    };
    match flag("exit_with_parent").as_deref() {
        None | Some("0") => {}
        Some("1") => ExitWithParent { exit_with_parent: true }.apply()?,
        Some(value) => return Err(format!("--exit_with_parent={value}: give 0 or 1").into()),
    }
    let hosts = |name| flag(name).ok_or_else(|| format!("--{name} is missing"));
    let ps = hosts("ps_hosts")?;
    let workers = hosts("worker_hosts")?;
    let cluster = ClusterSpec::builder()
        .job("ps", ps.split(','))
        .job("worker", workers.split(','))
        .build()?;
    let index = hosts("task_index")?.parse()?;
    let checkpoints = flag("checkpoint_dir");
    if job != "ps" && job != "worker" {
        return Err(format!("--job_name={job}: the jobs are ps and worker").into());
    }
    if job == "ps" {
        let listener = block_on(Ps::listen(cluster.task_address("ps", index)?))??;
        return serve(cluster, TaskId::ps(index), listener, checkpoints);
    }
    let end = train(cluster, TaskId::worker(index), checkpoints.is_some())?;
    println!("ended at step {}: {}", end.step, end.reason);
    Ok(())
}
