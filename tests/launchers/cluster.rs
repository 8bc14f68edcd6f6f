//! A parameter server and its workers, which find each other by the variables of a launcher, at a
//! rendezvous or by flags.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use pushpull::blocking::{Reader, Worker};
use pushpull::cluster::rendezvous::TaskRegistration;
use pushpull::cluster::resolve::{Known, Resolver, resolve};
use pushpull::error::Chain;
use pushpull::job::Job;
use pushpull::server::enter_private_folder;
use pushpull::{ClusterSpec, VariableSpec, WorkerConfig};
use serde_json::{Value, json};

use super::marked_job::MarkedJob;

/// The first argument of a process that is a worker. The others are [`Flags`].
pub(crate) const WORKER: &str = "worker";

/// After how many pushes a worker with `--wait-for` says so and slows down.
pub(crate) const PUSHES_UNTIL_SLOW: u64 = 300;

/// The flags of a worker.
#[derive(Parser)]
struct Flags {
    /// Addresses of the ps tasks, if no launcher tells them
    #[arg(long)]
    ps_hosts: Option<String>,
    /// Index of the worker, if no launcher tells it
    #[arg(long)]
    task_index: Option<u32>,
    /// Address of the rendezvous of several hosts
    #[arg(long)]
    rendezvous: Option<String>,
    /// Job file with the launcher and the mode
    #[arg(long, conflicts_with_all = ["ps_hosts", "task_index"])]
    job: Option<PathBuf>,
    /// File that lets a slow worker go on at full speed
    #[arg(long)]
    wait_for: Option<PathBuf>,
}

/// Runs a worker. Its last line says how often it has pushed.
pub(crate) fn worker(arguments: &[String]) -> ExitCode {
    match train(&Flags::parse_from(arguments)) {
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}", Chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn train(flags: &Flags) -> Result<Value, Box<dyn std::error::Error>> {
    let job = flags.job.as_ref().map(Job::read).transpose()?;
    let mut known = match &job {
        Some(job) => job.known()?,
        None => Known::default(),
    };
    known.num_ps.get_or_insert(1);
    known.socket_folder = Some(std::env::temp_dir());
    known.parent_process = Some(std::os::unix::process::parent_id());
    known.rendezvous = flags.rendezvous.clone();
    if let Some(hosts) = &flags.ps_hosts {
        known.jobs.push(("--ps-hosts", format!("ps={hosts}").parse()?));
    }
    if let Some(index) = flags.task_index {
        known.jobs.push(("--task-index", ClusterSpec::builder().workers(index + 1).build()?));
        known.job = Some("worker".to_owned());
        known.index = Some(index);
    }
    let lookup = |name: &str| std::env::var(name).ok();
    let resolver = job.as_ref().map(Job::resolver).transpose()?.flatten();
    let mut resolution = resolve(resolver.unwrap_or(Resolver::Auto), &lookup, &known)?;
    let registration = resolution.rendezvous.as_ref().and_then(TaskRegistration::new);
    if let Some(mut registration) = registration {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let wait = registration.register(Duration::from_secs(60), |text| eprintln!("{text}"));
        let registered = runtime.block_on(wait)?;
        resolution = resolution.gathered(registered.cluster, registered.index);
    }
    let (_, server) = resolution.cluster.ps_tasks().next().ok_or("the cluster has no server")?;
    if let Some(folder) = server.strip_prefix("unix:").and_then(|path| Path::new(path).parent()) {
        enter_private_folder(folder)?;
    }
    let task = resolution.task.ok_or("the launcher tells no task")?;
    let config = match job {
        Some(job) => job.with_cluster(resolution.cluster).worker_config(task.clone())?,
        None => WorkerConfig::new(resolution.cluster, task.clone()),
    };
    let mut worker = Worker::connect(config.clone())?;
    let mut params = worker.join(&[VariableSpec::f32("w", [4])?], |_| ())?;
    let mut pushes = 0;
    while let Some(token) = worker.token()? {
        worker.pull(&token, &mut params)?;
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w")?.fill(1.0);
        worker.push(token, gradients)?;
        pushes += 1;
        let Some(file) = &flags.wait_for else { continue };
        if pushes == PUSHES_UNTIL_SLOW {
            eprintln!("{}", slow_line(task.index));
        }
        if pushes >= PUSHES_UNTIL_SLOW && !file.exists() {
            // Someone kills this process, or what it needs, in the time of these gradients.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Reader::connect(config)?.pull(&mut params)?;
    let value = params.view::<f32>("w")?[0];
    worker.leave()?;
    let source = resolution.source.name();
    Ok(json!({"source": source, "task": task.to_string(), "pushes": pushes, "value": value}))
}

/// The line of a worker that becomes slow.
pub(crate) fn slow_line(index: u32) -> String {
    format!("worker {index} has pushed {PUSHES_UNTIL_SLOW} times")
}

/// Returns the command of the server, with more flags. Each push with a gradient of 1 takes 1 from a
/// value that is 0 at first.
pub(crate) fn server(last_step: u64, flags: &[&str]) -> Vec<String> {
    let last_step = last_step.to_string();
    let common = [SERVER, "--last-step", &*last_step, "--learning-rate", "1"];
    let end = ["--exit-when-done", "--exit-grace-ms", "3000", "--no-functions"];
    common.iter().chain(&end).chain(flags).map(|&part| part.to_owned()).collect()
}

/// The program of the server.
pub(crate) const SERVER: &str = env!("CARGO_BIN_EXE_pushpull-ps");

/// The flags by which a server finds its cluster by its launcher.
pub(crate) const BY_LAUNCHER: [&str; 4] = ["--resolve", "auto", "--num-ps", "1"];

/// Returns the command of a worker with these flags.
pub(crate) fn worker_command(flags: &[&str]) -> Vec<String> {
    let own = std::env::current_exe().expect("this test has a path").display().to_string();
    let flags = flags.iter().map(|&flag| flag.to_owned());
    [own, WORKER.to_owned()].into_iter().chain(flags).collect()
}

/// Runs a command under which one server and three workers train, and checks the pushes of all.
pub(crate) fn check(command: Command, source: &str, last_step: u64) -> Result<Value, String> {
    let mut job = MarkedJob::start(command);
    let pushes = finish(&mut job, source, 0..3, last_step)?;
    match pushes == last_step {
        true => Ok(json!({"source": source, "workers": 3, "pushes": pushes})),
        false => Err(format!("{pushes} pushes, not {last_step}")),
    }
}

/// Waits until a training ends. Checks what its workers print: their tasks, where they have found
/// them, and the value, of which each step has taken 1. Returns the sum of their pushes.
pub(crate) fn finish(
    job: &mut MarkedJob,
    source: &str,
    workers: Range<u32>,
    last_step: u64,
) -> Result<u64, String> {
    let status = job.wait()?;
    let (output, errors) = (job.output(), job.errors());
    let fault = |reason: String| Err(format!("{reason}\n{output}\n{errors}"));
    if !status.success() {
        return fault(format!("ended with {status}"));
    }
    let results: Vec<Value> =
        output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut tasks: Vec<_> = results.iter().map(|result| result["task"].to_string()).collect();
    tasks.sort();
    let expected: Vec<_> = workers.map(|index| format!("\"/job:worker/task:{index}\"")).collect();
    if tasks != expected {
        return fault(format!("results of {tasks:?}"));
    }
    for result in &results {
        if result["source"] != source || result["value"].as_f64() != Some(-(last_step as f64)) {
            return fault(format!("{result}, not of {source} and {last_step} steps"));
        }
    }
    Ok(results.iter().filter_map(|result| result["pushes"].as_u64()).sum())
}
