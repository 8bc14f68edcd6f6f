//! Suite `restart`: the time of a killed server from exec to its first answered pull.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pushpull::cluster::ShardId;
use pushpull::protocol::PartitionId;
use pushpull::protocol::message::Selection;
use pushpull::protocol::wire::List;
use pushpull::{ClusterSpec, VariableSpec};

use super::daemon::{BenchDaemons, TIMEOUT};
use super::probe::answers;
use crate::bench::report::{Report, ReportLine, Row, Unit};
use crate::bench::{BenchError, bytes_of};

/// Settings for a small inbox: one push slot and few pinned bytes, so that the state fits in
/// memory.
const SMALL_INBOX: &[&str] = &["--inbox-pushes", "1", "--pin-bytes-max", "65536"];

/// Kills and restarts daemons with states of these sizes.
pub(crate) fn run(sizes: &[String], rounds: usize, report: &mut Report) -> Result<(), BenchError> {
    let restarts = sizes.iter().map(|size| one_size(size, rounds, report));
    let restarts = restarts.collect::<Result<Vec<f64>, _>>()?;
    if let [first, .., last] = restarts[..] {
        let name = "restart_flat".to_owned();
        let unit = Unit::Latency;
        let ceiling_name = "the first size";
        let ours = last;
        let ceiling = Some(first);
        report.line(ReportLine { name, unit, ours, ceiling, p99: None, ceiling_name, rounds })?;
    }
    Ok(())
}

/// Measures one size. Returns the median restart time in microseconds.
fn one_size(size: &str, rounds: usize, report: &mut Report) -> Result<f64, BenchError> {
    let daemons = BenchDaemons::new("restart", SMALL_INBOX)?;
    let mut running = daemons.start()?;
    let small = VariableSpec::f32("small", [16])?;
    let rows = 1 << 16;
    let large = VariableSpec::f32("large", [rows, bytes_of(size)? as u64 / 4 / rows])?;
    daemons.declare(vec![small, large])?;
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    let mut kills = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        running.kill()?;
        kills.push(vec![began.elapsed()]);
        let began = Instant::now();
        running = daemons.start()?;
        await_answer(&daemons.cluster, began)?;
        ours.push(vec![began.elapsed()]);
        let began = Instant::now();
        Command::new(daemons.program()).arg("--version").stdout(Stdio::null()).status()?;
        theirs.push(vec![began.elapsed()]);
    }
    // This time is not pushpull's: the kernel tears down the memory of a killed process before it
    // releases the locks.
    let name = format!("kill_to_lock_{size}");
    let unit = Unit::Latency;
    let ceiling_name = "a daemon that prints its version";
    let ceiling = theirs.clone();
    report.row(Row { name, unit, amount: 8, ours: kills, ceiling, ceiling_name })?;
    let name = format!("restart_{size}");
    let line = report.row(Row { name, unit, amount: 8, ours, ceiling: theirs, ceiling_name })?;
    Ok(line.ours)
}

fn await_answer(cluster: &ClusterSpec, began: Instant) -> Result<(), BenchError> {
    let small = || List::new(vec![PartitionId(0)]).unwrap_or_default();
    loop {
        let selection = Selection::Partitions { partitions: small() };
        match answers(cluster, ShardId::default(), selection) {
            Ok(true) => return Ok(()),
            Ok(false) => return Err("the daemon has lost its state".into()),
            Err(error) if began.elapsed() > TIMEOUT => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}
