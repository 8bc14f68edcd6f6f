//! Suite `footprint`: what a model takes on a server, in its state directory and on a worker, beside
//! the bytes of its values.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pushpull::blocking::Worker;
use pushpull::{ClusterSpec, Params, TaskId, VariableSpec, WorkerConfig};

use super::daemon::{Daemon, program};
use super::memory;
use crate::bench::report::{Report, ReportLine, Unit};
use crate::bench::{BenchError, BenchFolder};

/// A rule of the server, by its arguments.
const RULES: [(&str, &[&str]); 2] = [
    ("sgd", &["--optimizer", "sgd", "--learning-rate", "0.5"]),
    ("adam", &["--optimizer", "adam", "--learning-rate", "0.5"]),
];

/// The steps of the worker.
const STEPS: u64 = 20;

/// The time after which everything that is unused has been returned.
pub(crate) const IDLE: Duration = Duration::from_secs(7);

/// One server and one worker.
struct Setting {
    rule: (&'static str, &'static [&'static str]),
    shares_memory: bool,
    in_place: bool,
    /// Whether the server keeps its state in a directory.
    in_directory: bool,
}

/// The most memory of a server, of its state directory and of a worker, in bytes.
struct Footprint {
    server: u64,
    directory: u64,
    worker: u64,
    /// The memory of the server and of the directory after some idle seconds.
    idle_server: u64,
    idle_directory: u64,
}

/// Measures models of `bytes` bytes. The idle server is measured after `idle`.
pub(crate) fn run(bytes: usize, idle: Duration, report: &mut Report) -> Result<(), BenchError> {
    let variables = memory::variables(bytes)?;
    for shares_memory in [false, true] {
        let transport = if shares_memory { "shm" } else { "tcp" };
        for rule in RULES {
            let of = |in_place, in_directory| {
                let setting = Setting { rule, shares_memory, in_place, in_directory };
                setting.measure(&variables, idle)
            };
            let mut figure = |what: &str, found: u64| {
                report.line(ReportLine {
                    name: format!("memory_{transport}_{}_{what}", rule.0),
                    unit: Unit::Memory,
                    ours: found as f64 / 1024.0,
                    ceiling: Some(memory::bytes_of(&variables) as f64 / 1024.0),
                    p99: None,
                    ceiling_name: "the values",
                    rounds: 1,
                })
            };
            let replaced = of(false, false)?;
            figure("server", replaced.server)?;
            figure("server_idle", replaced.idle_server)?;
            figure("worker", replaced.worker)?;
            figure("worker_in_place", of(true, false)?.worker)?;
            let durable = of(true, true)?;
            figure("directory", durable.directory)?;
            figure("directory_idle", durable.idle_directory)?;
        }
    }
    Ok(())
}

impl Setting {
    fn measure(&self, variables: &[VariableSpec], idle: Duration) -> Result<Footprint, BenchError> {
        let folder = BenchFolder::private("footprint")?;
        let address = match self.shares_memory {
            true => format!("unix:{}/ps.sock", folder.path().display()),
            false => TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string(),
        };
        let state = self.in_directory.then(|| folder.path().join("state"));
        let daemon = self.start(&address, state.as_ref())?;
        let cluster =
            ClusterSpec::builder().job("ps", [&address]).job("worker", ["127.0.0.1:1"]).build()?;
        let config = WorkerConfig::new(cluster, TaskId::worker(0))
            .shared_memory(self.shares_memory)
            .in_place_pulls(self.in_place);
        let own_before = proportional(std::process::id())?;
        let mut worker = Worker::connect(config)?;
        let mut params = worker.join(variables, |_| ())?;
        let sample = || -> std::io::Result<[u64; 3]> {
            let server = proportional(daemon.id())?;
            let worker = proportional(std::process::id())?.saturating_sub(own_before);
            let directory = state.as_deref().map_or(Ok(0), memory::files)?;
            Ok([server, directory, worker])
        };
        let done = AtomicBool::new(false);
        let most = std::thread::scope(|scope| {
            let watch = scope.spawn(|| -> std::io::Result<[u64; 3]> {
                let mut most = [0; 3];
                while !done.load(Ordering::Acquire) {
                    let now = sample()?;
                    most = std::array::from_fn(|index| most[index].max(now[index]));
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(most)
            });
            let trained = train(&mut worker, &mut params, variables);
            done.store(true, Ordering::Release);
            let most =
                watch.join().map_err(|_| BenchError::from("the watching thread panicked"))?;
            trained.and(most.map_err(BenchError::from))
        });
        let [server, directory, of_worker] = most?;
        std::thread::sleep(idle);
        let [idle_server, idle_directory, _] = sample()?;
        worker.leave()?;
        Ok(Footprint { server, directory, worker: of_worker, idle_server, idle_directory })
    }

    fn start(&self, address: &str, state: Option<&PathBuf>) -> Result<Daemon, BenchError> {
        let mut command = Command::new(program()?);
        command.args(["--ps-hosts", address, "--worker-hosts", "127.0.0.1:1"]);
        command.args(["--bytes-max", &(64_u64 << 30).to_string()]);
        command.args(self.rule.1);
        command.args(state.iter().flat_map(|state| [Path::new("--state-dir"), state]));
        Ok(Daemon(command.stdout(Stdio::null()).spawn()?))
    }
}

/// Pulls, and pushes ones.
fn train(
    worker: &mut Worker,
    params: &mut Params,
    variables: &[VariableSpec],
) -> Result<(), BenchError> {
    for _ in 0..STEPS {
        memory::step(worker, params, variables)?;
    }
    let first = params.view::<f32>(variables[0].name())?[0];
    match first < 0.0 && first.is_finite() {
        true => Ok(()),
        false => Err(format!("a value is {first} after {STEPS} steps").into()),
    }
}

/// Returns the memory of a process in bytes, with its share of what others have mapped too.
fn proportional(process: u32) -> std::io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib = kib.and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| std::io::Error::other("smaps_rollup has no Pss"))
}
