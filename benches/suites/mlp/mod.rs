//! Suite `mlp`: two workers and one server train a small network, beside the same two workers that
//! only compute.
//!
//! Workers, session threads and the server share the cores of one machine, so the cost of a push
//! and a pull is subtracted from the computation.
//!
//! Run it on an idle machine. Beside other programs the process with more threads gets more of the
//! cores, and the ratio looks better than it is.

mod alone;
mod data;
mod training;

use std::error::Error;
use std::time::{Duration, Instant};

use pushpull::compute::{ComputeError, Device, Mlp};
use pushpull::{Mode, Synchronous};

use crate::bench::report::{Report, Row, Unit};
use crate::bench::turns::{Pace, interleave_all};
use crate::bench::{BenchError, Transport};
use alone::{Exchange, FrozenNetwork};
use data::Data;
use training::Training;

/// An error of any thread.
type ThreadError = Box<dyn Error + Send + Sync>;

const INPUTS: usize = 784;
const HIDDEN: usize = 512;
const CLASSES: usize = 10;
const BATCH_ROWS: usize = 128;
const BATCHES: usize = 32;
const WORKERS: usize = 2;
/// Names of the variables, in the order of [`Mlp::shapes`].
const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];
/// Batches of each worker in one operation.
const BATCHES_PER_TURN: usize = 16;

/// Measures, interleaved: the matrix products alone, the whole computation alone, the computation
/// with the bare transport, and training in both modes.
///
/// "Alone" means two threads that compute gradients and do nothing with them.
pub(crate) fn run(transport: Transport, pace: Pace, report: &mut Report) -> Result<(), BenchError> {
    let data = Data::generate(BATCHES, BATCH_ROWS, INPUTS, CLASSES)?;
    let replicas = || -> Result<Vec<FrozenNetwork>, ComputeError> {
        (0..WORKERS).map(|worker| FrozenNetwork::new(&data, worker)).collect()
    };
    let mut products = replicas()?;
    let mut computing = replicas()?;
    let mut exchanging = replicas()?
        .into_iter()
        .map(|replica| Exchange::start(replica, transport))
        .collect::<Result<Vec<_>, _>>()?;
    let synchronous = Synchronous::new(WORKERS as u32).into();
    let mut asynchronous = Training::start(transport, Mode::default(), &data)?;
    let mut synchronous = Training::start(transport, synchronous, &data)?;

    let [products, computing, exchanging, ours, in_step] = interleave_all(
        pace,
        [
            &mut || together(&mut products, FrozenNetwork::products),
            &mut || together(&mut computing, FrozenNetwork::compute),
            &mut || together(&mut exchanging, Exchange::step),
            &mut || asynchronous.turn(),
            &mut || synchronous.turn(),
        ],
    )?;
    let alone = "computing alone";
    let bare = "the matrix products alone";
    for (name, ours, ceiling, ceiling_name) in [
        ("mlp_compute", &computing, &products, bare),
        ("mlp_wire", &exchanging, &computing, alone),
        ("mlp_asynchronous", &ours, &computing, alone),
        ("mlp_synchronous", &in_step, &computing, alone),
    ] {
        let name = format!("{name}_{}", transport.name());
        let unit = Unit::Batches;
        let ours = ours.clone();
        let ceiling = ceiling.clone();
        let amount = (BATCHES_PER_TURN * WORKERS) as u64;
        report.row(Row { name, unit, amount, ours, ceiling, ceiling_name })?;
    }
    asynchronous.check()?;
    synchronous.check()
}

/// Has every worker compute [`BATCHES_PER_TURN`] batches on a thread of its own. Returns the time
/// until the last one is done.
fn together<T: Send>(
    workers: &mut [T],
    batch: impl Fn(&mut T) -> Result<(), ThreadError> + Sync,
) -> Result<Duration, BenchError> {
    let began = Instant::now();
    let batch = &batch;
    std::thread::scope(|scope| {
        let turn = |worker| scope.spawn(move || one_turn(worker, batch));
        let threads: Vec<_> = workers.iter_mut().map(turn).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err("a worker thread panicked".into()))
        })
    })
    .map_err(|fault| -> BenchError { fault })?;
    Ok(began.elapsed())
}

/// Creates the network of one worker, which computes on one thread.
fn network() -> Result<Mlp, ComputeError> {
    Ok(Mlp::new(Device::cpu_threads(1)?, &[INPUTS, HIDDEN, CLASSES]))
}

fn one_turn<T>(
    worker: &mut T,
    batch: &impl Fn(&mut T) -> Result<(), ThreadError>,
) -> Result<(), ThreadError> {
    (0..BATCHES_PER_TURN).try_for_each(|_| batch(worker))
}
