//! Suite `memory`: a reader that requests all values and stops reading, its effect on pushes and on
//! the memory of the daemon.

use pushpull::blocking::{Reader, Worker};
use pushpull::cluster::ShardId;
use pushpull::protocol::message::{Pull, Role, Selection};
use pushpull::{TaskId, VariableSpec, WorkerConfig};

use super::daemon::BenchDaemons;
use super::memory::memory_used;
use super::probe::ProbeConnection;
use super::saving::push_small;
use crate::bench::report::{Report, ReportLine, Row, Unit, latency};
use crate::bench::turns::Pace;
use crate::bench::{BenchError, bytes_of};

/// Settings of the daemon. Plain gradient descent has no slots, and one worker needs one push slot.
const SETTINGS: &[&str] = &["--optimizer", "sgd", "--learning-rate", "1", "--inbox-pushes", "1"];

/// Measures a daemon with values of this size, all of which the reader requests.
pub(crate) fn run(size: &str, pace: Pace, report: &mut Report) -> Result<(), BenchError> {
    let bytes = bytes_of(size)? as u64;
    let daemons = BenchDaemons::new("stalled", SETTINGS)?;
    let daemon = daemons.start()?;
    let config = WorkerConfig::new(daemons.cluster.clone(), TaskId::worker(0)).shared_memory(false);
    let mut worker = Worker::connect(config.clone())?;
    let small = VariableSpec::f32("small", [1 << 14])?;
    let rows = 1 << 14;
    let large = VariableSpec::f32("large", [rows, (bytes / 4 / rows).max(1)])?;
    worker.join(&[small, large], |_| ())?;
    let mut alone = Vec::new();
    let mut stalled = Vec::new();
    let mut most = 0;
    for _ in 0..pace.rounds {
        alone.push(push_small(&mut worker, pace.round, None)?);
        let reader = ProbeConnection::open(&daemons.cluster, ShardId::default(), Role::Reader {})?;
        let mut reader = reader.ok_or("the daemon refused a reader")?;
        reader.send(Pull { selection: Selection::All {} }.into(), &[])?;
        stalled.push(push_small(&mut worker, pace.round, None)?);
        most = most.max(memory_used(daemon.id(), &daemons.state())?);
    }
    let count: usize = alone.iter().chain(&stalled).map(Vec::len).sum();
    let expected = -(count as f64) as f32;
    let mut reader = Reader::connect(config)?;
    let mut params = reader.params();
    let step = reader.pull(&mut params)?;
    let value = params.view::<f32>("small")?[0];
    if (step, value) != (count as u64, expected) {
        return Err(format!("step {step} has {value}, not {expected} at {count}").into());
    }
    let unit = Unit::Latency;
    let p99 = latency(&stalled, 0.99);
    let ceiling = Some(latency(&alone, 0.99));
    let name = "push_64KiB_beside_stalled_reader";
    let is = "the same push alone";
    let ours = stalled;
    let theirs = alone;
    let row =
        Row { name: name.into(), unit, amount: 1 << 16, ours, ceiling: theirs, ceiling_name: is };
    report.row(row)?;
    let rounds = pace.rounds;
    let name = format!("{name}_p99");
    let none = None;
    report.line(ReportLine {
        name,
        unit,
        ours: p99,
        ceiling,
        p99: none,
        ceiling_name: is,
        rounds,
    })?;
    // The state, the new values of the largest push, one push slot, and the pinned values of pulls.
    let formula = 4 * bytes;
    let ours = most as f64 / 1024.0;
    let ceiling = Some(formula as f64 / 1024.0);
    let name = format!("memory_stalled_reader_{size}");
    let unit = Unit::Memory;
    let ceiling_name = "state, largest push, inbox and pins";
    report.line(ReportLine { name, unit, ours, ceiling, p99: None, ceiling_name, rounds })?;
    Ok(())
}
