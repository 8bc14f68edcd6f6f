//! Suite `checkpoint`: the time of a save, and the pushes that run meanwhile.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pushpull::blocking::Worker;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::error::Chain;
use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::bench::report::{Report, Row, Unit};
use crate::bench::{BenchError, BenchFolder};

/// Saves a model of `bytes` bytes, alone and while one of its small variables is pushed
/// continuously.
pub(crate) fn run(
    size: &str,
    bytes: usize,
    rounds: usize,
    report: &mut Report,
) -> Result<(), BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let folder = BenchFolder::private("checkpoint")?;
    let address = format!("unix:{}/ps.sock", folder.path().display());
    let listener = runtime.block_on(Ps::listen(&address))?;
    let cluster = ClusterSpec::builder().job("ps", [listener.address()]).workers(1).build()?;
    let storage = LocalDirectory::create(folder.path().join("checkpoints"))?;
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0))
        .checkpoints(Checkpoints::new(storage));
    let server = listener.start(config)?;
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0)))?;
    let small = VariableSpec::f32("small", [1 << 14])?;
    let large = VariableSpec::f32("large", [bytes as u64 / 4])?;
    worker.join(&[small, large], |_| ())?;

    let handle = server.handle();
    let stop = AtomicBool::new(false);
    let mut alone = vec![];
    let mut during = vec![];
    let mut saves = vec![];
    let mut undisturbed = vec![];
    let mut files = vec![];
    let save = || {
        let began = Instant::now();
        let saved = runtime.block_on(handle.save(b""));
        saved.map(|_| began.elapsed()).map_err(|error| Chain(&error).to_string())
    };
    for _ in 0..rounds {
        undisturbed.push(vec![save()?]);
        // A name says at which step a checkpoint was saved, so the next one is of another step.
        alone.push(push_small(&mut worker, Duration::from_millis(300), None)?);
        stop.store(false, Ordering::Release);
        let (pushed, saved) = std::thread::scope(|scope| {
            let saving = scope.spawn(|| {
                let saved = save();
                stop.store(true, Ordering::Release);
                saved
            });
            let pushed = push_small(&mut worker, Duration::MAX, Some(&stop));
            (pushed, saving.join().unwrap_or_else(|_| Err("the saving thread panicked".into())))
        });
        during.push(pushed?);
        saves.push(vec![saved?]);
        files.push(vec![write_and_read(&folder.path().join("file"), bytes)?]);
    }
    for (end, ours) in [("", undisturbed), ("_during_pushes", saves)] {
        let name = format!("checkpoint_{size}{end}");
        let unit = Unit::Throughput;
        let amount = bytes as u64;
        let ceiling = files.clone();
        let ceiling_name = "a file written, flushed and read";
        report.row(Row { name, unit, amount, ours, ceiling, ceiling_name })?;
    }
    // The ceiling is the same push without a checkpoint. The ratio of the medians is the cost; the
    // 99th percentile shows the pause.
    let name = format!("push_64KiB_during_checkpoint_{size}");
    let unit = Unit::Latency;
    let ours = during;
    let ceiling = alone;
    let ceiling_name = "the same push alone";
    report.row(Row { name, unit, amount: 1 << 16, ours, ceiling, ceiling_name })?;
    Ok(())
}

/// Pushes ones to `small` for this time, or until `stop` is set. Returns the duration of each push.
pub(crate) fn push_small(
    worker: &mut Worker,
    time: Duration,
    stop: Option<&AtomicBool>,
) -> Result<Vec<Duration>, BenchError> {
    let began = Instant::now();
    let mut durations = Vec::new();
    while began.elapsed() < time && !stop.is_some_and(|stop| stop.load(Ordering::Acquire)) {
        let token = worker.token()?.ok_or("the training has ended")?;
        let start = Instant::now();
        let mut push = worker.begin(token)?;
        push.variable("small", &[1.0_f32; 1 << 14])?;
        push.finish()?;
        durations.push(start.elapsed());
    }
    Ok(durations)
}

/// Writes this many bytes to a file, flushes it and reads it back: a lower bound for a verified
/// save.
fn write_and_read(path: &std::path::Path, bytes: usize) -> std::io::Result<Duration> {
    let mut buffer = vec![1_u8; 1 << 20];
    let start = Instant::now();
    let mut file = File::create(path)?;
    for _ in 0..bytes >> 20 {
        file.write_all(&buffer)?;
    }
    file.sync_all()?;
    let mut file = File::open(path)?;
    while file.read(&mut buffer)? > 0 {}
    let elapsed = start.elapsed();
    std::fs::remove_file(path)?;
    Ok(elapsed)
}
