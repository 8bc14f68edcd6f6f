//! Suite `memory`: the memory of a daemon while idle and while busy, and of an idle connection.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use pushpull::blocking::Worker;
use pushpull::cluster::ShardId;
use pushpull::error::Chain;
use pushpull::protocol::message::Role;
use pushpull::{Params, TaskId, VariableSpec, WorkerConfig};

use super::daemon::BenchDaemons;
use super::probe::ProbeConnection;
use crate::bench::BenchError;
use crate::bench::report::{Report, ReportLine, Unit};

/// Settings of the daemon that the formula relies on. Plain gradient descent has no slots.
const SETTINGS: &[&str] = &["--optimizer", "sgd", "--learning-rate", "0.5", "--inbox-pushes", "2"];
const INBOX_PUSHES: u64 = 2;

/// Number of concurrent workers, and of the steps of each.
const WORKERS: u32 = 2;
const STEPS: u64 = 30;

/// Number of idle connections.
const CONNECTIONS: usize = 1000;

/// Measures a daemon whose variables have `bytes` bytes in total.
pub(crate) fn run(bytes: usize, report: &mut Report) -> Result<(), BenchError> {
    let daemons = BenchDaemons::new("memory", SETTINGS)?;
    let daemon = daemons.start()?;
    let variables = variables(bytes)?;
    let bytes = bytes_of(&variables);
    let mut workers = Vec::new();
    for task in 0..WORKERS {
        let config = WorkerConfig::new(daemons.cluster.clone(), TaskId::worker(task));
        let mut worker = Worker::connect(config)?;
        let params = worker.join(&variables, |_| ())?;
        workers.push((worker, params));
    }
    // What has memory at rest: the state, the new values of the largest push, and a push slot. The
    // bounds of the configuration, all at once, have all push slots and the pinned values of pulls.
    let idle = (bytes * (1 + 1 + 1), "state, largest push and a push slot");
    let busy = (bytes * (1 + 1 + INBOX_PUSHES + 1), "state, largest push, inbox and pins");
    let memory_used = || memory_used(daemon.id(), &daemons.state());
    let mut figure = |name: &str, memory_used: u64, of: (u64, _)| -> Result<(), BenchError> {
        let (formula, ceiling_name) = of;
        let unit = Unit::Memory;
        let ours = memory_used as f64 / 1024.0;
        let ceiling = Some(formula as f64 / 1024.0);
        let name = name.to_owned();
        report.line(ReportLine {
            name,
            unit,
            ours,
            ceiling,
            p99: None,
            ceiling_name,
            rounds: 1,
        })?;
        Ok(())
    };
    figure("memory_overhead_idle", memory_used()?, idle)?;
    let done = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let variables = &variables;
        let train = |(worker, params)| {
            scope.spawn(move || {
                train(worker, params, variables).map_err(|error| Chain(&*error).to_string())
            })
        };
        let workers: Vec<_> = workers.into_iter().map(train).collect();
        let watch = scope.spawn(|| -> std::io::Result<u64> {
            let mut most = 0;
            while !done.load(Ordering::Acquire) {
                most = most.max(memory_used()?);
                std::thread::yield_now();
            }
            Ok(most)
        });
        let ended = workers.into_iter().map(|worker| {
            worker.join().unwrap_or_else(|_| Err("a worker thread panicked".to_owned()))
        });
        let ended = ended.collect::<Vec<_>>();
        done.store(true, Ordering::Release);
        let most = watch
            .join()
            .unwrap_or_else(|_| Err(std::io::Error::other("the watching thread panicked")));
        ended.into_iter().collect::<Result<Vec<()>, String>>().map(|_| most)
    })??;
    check(&daemons)?;
    figure("memory_overhead", most, busy)?;

    let before = anonymous(daemon.id())?;
    let idle = (0..CONNECTIONS).map(|_| {
        let connection =
            ProbeConnection::open(&daemons.cluster, ShardId::default(), Role::Reader {})?;
        connection.ok_or_else(|| BenchError::from("the daemon refused a reader"))
    });
    let idle = idle.collect::<Result<Vec<_>, _>>()?;
    let each = anonymous(daemon.id())?.saturating_sub(before) as f64 / idle.len() as f64;
    let name = "memory_idle_connection".to_owned();
    let unit = Unit::Memory;
    let ours = each / 1024.0;
    let ceiling_name = "";
    report.line(ReportLine {
        name,
        unit,
        ours,
        ceiling: None,
        p99: None,
        ceiling_name,
        rounds: 1,
    })?;
    Ok(())
}

/// Pulls, and pushes ones.
fn train(
    mut worker: Worker,
    mut params: Params,
    variables: &[VariableSpec],
) -> Result<(), BenchError> {
    for _ in 0..STEPS {
        step(&mut worker, &mut params, variables)?;
    }
    Ok(worker.leave()?)
}

/// Pulls once, and pushes ones.
pub(crate) fn step(
    worker: &mut Worker,
    params: &mut Params,
    variables: &[VariableSpec],
) -> Result<(), BenchError> {
    let token = worker.token()?.ok_or("the training has ended")?;
    worker.pull(&token, params)?;
    let mut gradients = worker.gradients();
    for variable in variables {
        gradients.view_mut_unfilled::<f32>(variable.name())?.fill(1.0);
    }
    worker.push(token, gradients)?;
    Ok(())
}

/// Returns variables of about `bytes` bytes in total.
pub(crate) fn variables(bytes: usize) -> Result<Vec<VariableSpec>, BenchError> {
    let rows = 1 << 10;
    let columns = (bytes as u64 / 4 / 8 / rows).max(1);
    let spec = |name| VariableSpec::f32(format!("w{name}"), [rows, columns]);
    Ok((0..8).map(spec).collect::<Result<Vec<_>, _>>()?)
}

/// Returns the bytes of f32 variables.
pub(crate) fn bytes_of(variables: &[VariableSpec]) -> u64 {
    variables.iter().map(|variable| 4 * variable.shape().elements()).sum()
}

/// Checks that the values are the sum of the pushes.
fn check(daemons: &BenchDaemons) -> Result<(), BenchError> {
    let config = WorkerConfig::new(daemons.cluster.clone(), TaskId::worker(0));
    let mut reader = pushpull::blocking::Reader::connect(config)?;
    let mut params = reader.params();
    let step = reader.pull(&mut params)?;
    let value = params.view::<f32>("w0")?[0];
    let pushes = STEPS * u64::from(WORKERS);
    let expected = -0.5 * pushes as f32;
    match (step, value) == (pushes, expected) {
        true => Ok(()),
        false => Err(format!("step {step} has {value}, not {expected} at {pushes}").into()),
    }
}

/// Returns the memory in bytes of a process and of its state files, which are in memory as well.
pub(crate) fn memory_used(process: u32, state: &Path) -> std::io::Result<u64> {
    Ok(anonymous(process)? + files(state)?)
}

/// Returns the anonymous memory of a process in bytes.
fn anonymous(process: u32) -> std::io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib = kib.and_then(|kib| kib.parse::<u64>().ok());
    let missing =
        || std::io::Error::other("/proc does not report the anonymous memory of the process");
    kib.map(|kib| kib << 10).ok_or_else(missing)
}

/// Returns the bytes allocated for all files of a directory.
pub(crate) fn files(directory: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // A file may have been replaced and removed meanwhile.
        let Ok(what) = entry.metadata() else { continue };
        bytes += if what.is_dir() { files(&entry.path())? } else { what.blocks() * 512 };
    }
    Ok(bytes)
}
