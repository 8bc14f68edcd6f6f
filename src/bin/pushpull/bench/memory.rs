//! What a daemon takes of memory: at rest and while it is busy, and for a connection that says
//! nothing.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use pushpull::blocking::Worker;
use pushpull::common::protocol::message::Role;
use pushpull::{Params, ShardId, TaskId, VariableSpec, WorkerConfig};

use super::Failure;
use super::daemon::Daemons;
use super::probe::Line as Connection;
use super::report::{Line, Report, Unit};

/// The daemon's settings, which the formula knows: plain gradient descent has no slots.
const SETTINGS: &[&str] = &["--optimizer", "sgd", "--learning-rate", "0.5", "--inbox-pushes", "2"];
const INBOX_PUSHES: u64 = 2;

/// Workers that pull and push at once, and how often each does.
const WORKERS: u32 = 2;
const STEPS: u64 = 30;

/// Connections that say nothing.
const CONNECTIONS: usize = 1000;

/// Measures a daemon with variables of so many bytes together.
pub(crate) fn run(bytes: usize, report: &mut Report) -> Result<(), Failure> {
    let daemons = Daemons::new("memory", SETTINGS)?;
    let daemon = daemons.start()?;
    let rows = 1 << 10;
    let columns = (bytes as u64 / 4 / 8 / rows).max(1);
    let spec = |name| VariableSpec::f32(format!("w{name}"), [rows, columns]);
    let variables = (0..8).map(spec).collect::<Result<Vec<_>, _>>()?;
    let bytes = 8 * rows * columns * 4;
    let mut workers = Vec::new();
    for task in 0..WORKERS {
        let config = WorkerConfig::new(daemons.cluster.clone(), TaskId::worker(task));
        let mut worker = Worker::connect(config)?;
        let params = worker.join(&variables, |_| ())?;
        workers.push((worker, params));
    }
    // The state, the new values of the largest push, the rooms of the inbox, and the values that
    // pulls may hold on to: the bounds of the configuration, all at once.
    let formula = bytes * (1 + 1 + INBOX_PUSHES + 1);
    let taken = || taken(daemon.id(), &daemons.state());
    let mut figure = |name: &str, taken: u64| -> Result<(), Failure> {
        let (unit, beside) = (Unit::Memory, "state, largest push, inbox and pins");
        let (ours, ceiling) = (taken as f64 / 1024.0, Some(formula as f64 / 1024.0));
        let name = name.to_owned();
        report.line(Line { name, unit, ours, ceiling, p99: None, beside, rounds: 1 })?;
        Ok(())
    };
    figure("memory_overhead_idle", taken()?)?;
    let done = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let variables = &variables;
        let train = |(worker, params)| {
            scope.spawn(move || train(worker, params, variables).map_err(|error| error.to_string()))
        };
        let workers: Vec<_> = workers.into_iter().map(train).collect();
        let watch = scope.spawn(|| -> std::io::Result<u64> {
            let mut most = 0;
            while !done.load(Ordering::Acquire) {
                most = most.max(taken()?);
                std::thread::yield_now();
            }
            Ok(most)
        });
        let ended = workers.into_iter().map(|worker| {
            worker.join().unwrap_or_else(|_| Err("a worker has panicked".to_owned()))
        });
        let ended = ended.collect::<Vec<_>>();
        done.store(true, Ordering::Release);
        let most = watch.join().unwrap_or_else(|_| Err(std::io::Error::other("it panicked")));
        ended.into_iter().collect::<Result<Vec<()>, String>>().map(|_| most)
    })??;
    check(&daemons)?;
    figure("memory_overhead", most)?;

    let before = anonymous(daemon.id())?;
    let idle = (0..CONNECTIONS).map(|_| {
        let connection = Connection::open(&daemons.cluster, ShardId::default(), Role::Reader {})?;
        connection.ok_or_else(|| Failure::from("the daemon does not welcome a reader"))
    });
    let idle = idle.collect::<Result<Vec<_>, _>>()?;
    let each = anonymous(daemon.id())?.saturating_sub(before) as f64 / idle.len() as f64;
    let (name, unit) = ("memory_idle_connection".to_owned(), Unit::Memory);
    let (ours, beside) = (each / 1024.0, "");
    report.line(Line { name, unit, ours, ceiling: None, p99: None, beside, rounds: 1 })?;
    Ok(())
}

/// Pulls and pushes ones.
fn train(
    mut worker: Worker,
    mut params: Params,
    variables: &[VariableSpec],
) -> Result<(), Failure> {
    for _ in 0..STEPS {
        let token = worker.token()?.ok_or("the training has ended")?;
        worker.pull(&token, &mut params)?;
        let mut gradients = worker.gradients();
        for variable in variables {
            gradients.view_mut::<f32>(variable.name())?.fill(1.0);
        }
        worker.push(token, gradients)?;
    }
    Ok(worker.leave()?)
}

/// The values must be what the pushes add up to.
fn check(daemons: &Daemons) -> Result<(), Failure> {
    let config = WorkerConfig::new(daemons.cluster.clone(), TaskId::worker(0));
    let mut reader = pushpull::blocking::Reader::connect(config)?;
    let mut params = reader.params();
    let step = reader.pull(&mut params)?;
    let (value, pushes) = (params.view::<f32>("w0")?[0], STEPS * u64::from(WORKERS));
    let expected = -0.5 * pushes as f32;
    match (step, value) == (pushes, expected) {
        true => Ok(()),
        false => Err(format!("step {step} has {value}, not {expected} at {pushes}").into()),
    }
}

/// The bytes that a process takes: its own, and the files of its state, which lie in memory.
pub(crate) fn taken(process: u32, state: &Path) -> std::io::Result<u64> {
    Ok(anonymous(process)? + files(state)?)
}

/// The memory of a process that no file holds.
fn anonymous(process: u32) -> std::io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib = kib.and_then(|kib| kib.parse::<u64>().ok());
    let missing = || std::io::Error::other("the system does not say what a process takes");
    kib.map(|kib| kib << 10).ok_or_else(missing)
}

/// The memory, or disk, of all files of a directory.
fn files(directory: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // A file that is replaced may have gone since.
        let Ok(what) = entry.metadata() else { continue };
        bytes += if what.is_dir() { files(&entry.path())? } else { what.blocks() * 512 };
    }
    Ok(bytes)
}
