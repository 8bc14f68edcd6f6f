//! Suite `rows` over a transport: a worker pulls and pushes rows of a sparse variable, interleaved
//! with a bare gather and with the rule in place.

use std::sync::Arc;
use std::time::Instant;

use pushpull::blocking::{Reader, Worker};
use pushpull::optim::Adagrad;
use pushpull::{ClusterSpec, Ps, PsConfig, TaskId, VariableSpec, WorkerConfig};
use pushpull_ps::measure::RowsInPlace;

use super::rows::{BATCH, GATHER, IN_PLACE, ROWS, batches, sorted};
use crate::bench::report::{Report, Row, Unit};
use crate::bench::turns::{Pace, interleave};
use crate::bench::{BenchError, Transport};

/// Measures rows of each of these widths, in elements.
pub(crate) fn run(
    widths: &[u64],
    transport: Transport,
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    let batches = batches();
    // Ascending ids need no sorting.
    let ids: Vec<Vec<u32>> = batches.iter().map(|rows| sorted(rows)).collect();
    for &width in widths {
        measure(width, transport, &ids, pace, report)?;
    }
    Ok(())
}

fn measure(
    width: u64,
    transport: Transport,
    batches: &[Vec<u32>],
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let (address, _folder) = transport.address("rows")?;
    let listener = runtime.block_on(Ps::listen(&address))?;
    let builder = ClusterSpec::builder().job("ps", [listener.address()]);
    let cluster = builder.workers(1).build()?;
    let server = PsConfig::new(cluster.clone(), TaskId::ps(0), Adagrad::new(RATE));
    let _server = listener.start(server.network(transport.network()))?;
    let config = WorkerConfig::new(cluster, TaskId::worker(0));
    let config = config.shared_memory(transport.is_shared());
    let mut worker = Worker::connect(config.clone())?;
    worker.join(&[VariableSpec::f32("rows", [ROWS.into(), width])?.sparse()], |_| ())?;
    let mut reader = Reader::connect(config)?;

    let elements = width as usize * BATCH;
    let mut plain = RowsInPlace::new(ROWS as usize, width as usize, Arc::new(Adagrad::new(RATE)))?;
    let gradient: Vec<f32> = (0..elements).map(|i| (i % 17) as f32 - 8.0).collect();
    let ids: Vec<Vec<u64>> =
        batches.iter().map(|rows| rows.iter().map(|&row| row.into()).collect()).collect();
    let mut gathered = vec![0.0_f32; elements];
    let mut pulled = vec![0.0_f32; elements];
    let mut push = |turn: usize| {
        let token = worker.token()?.ok_or("the training has ended")?;
        let start = Instant::now();
        let mut gradients = worker.gradients();
        gradients.set_rows("rows", &ids[turn % ids.len()], &gradient)?;
        worker.push(token, gradients)?;
        Ok::<_, BenchError>(start.elapsed())
    };
    let mut apply = |turn: usize| {
        let start = Instant::now();
        plain.push(&batches[turn % batches.len()], &gradient);
        start.elapsed()
    };
    // Push every batch once first: no measured operation faults pages in.
    for turn in 0..batches.len() {
        push(turn)?;
        apply(turn);
    }
    let (mut pushes, mut applied) = (0, 0);
    let push_next = || {
        pushes += 1;
        push(pushes - 1)
    };
    let apply_next = || {
        applied += 1;
        Ok(apply(applied - 1))
    };
    let pushed = interleave(pace, push_next, apply_next)?;
    for turn in pushes..applied {
        push(turn)?;
    }
    for turn in applied..pushes {
        apply(turn);
    }

    let mut turn = 0;
    let gather = || {
        turn += 1;
        let start = Instant::now();
        plain.gather(&batches[turn % batches.len()], &mut gathered);
        Ok(start.elapsed())
    };
    let mut pulls = 0;
    let pull = || {
        pulls += 1;
        let start = Instant::now();
        reader.pull_rows("rows", &ids[pulls % ids.len()], &mut pulled)?;
        Ok(start.elapsed())
    };
    let times = interleave(pace, pull, gather)?;
    let mut all = vec![0.0_f32; plain.values().len()];
    for (first, rows) in all.chunks_mut(elements).enumerate() {
        let first = (first * BATCH) as u64;
        let ids: Vec<u64> = (first..first + BATCH as u64).collect();
        reader.pull_rows("rows", &ids, rows)?;
    }
    if all != plain.values() {
        return Err("the rows differ from those of the rule in place".into());
    }
    let rows = [("pull", times, GATHER), ("push_adagrad", pushed, IN_PLACE)];
    for (verb, (ours, ceiling), ceiling_name) in rows {
        let name = format!("rows_{verb}_{}_dim{width}", transport.name());
        let unit = Unit::Rows;
        let amount = BATCH as u64;
        report.row(Row { name, unit, amount, ours, ceiling, ceiling_name })?;
    }
    Ok(())
}

const RATE: f64 = 0.5;
