//! Suite `crowd`: several workers on one processor and on two, polling as they do by default and
//! never.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pushpull::blocking::Worker;
use pushpull::error::Chain;
use pushpull::{ClusterSpec, Params, Ps, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

use crate::bench::bed::RATE;
use crate::bench::processors::on_processors;
use crate::bench::report::{Report, Row, Unit};
use crate::bench::turns::{Pace, interleave};
use crate::bench::{BenchError, BenchFolder, Transport, bytes_of};
use crate::options::SuitesOptions;

/// Measures every size and number of workers on each number of processors, by default one and two.
pub(crate) fn run(
    options: &SuitesOptions,
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    let here = std::thread::available_parallelism()?.get();
    let usual = if here == 1 { &[1][..] } else { &[1, 2] };
    let processors = match &options.transports.transport_suite.processors[..] {
        [] => usual,
        few => few,
    };
    processors
        .iter()
        .try_for_each(|&count| on_processors(count, || measure(options, count, pace, report)))
}

fn measure(
    options: &SuitesOptions,
    processors: usize,
    pace: Pace,
    report: &mut Report,
) -> Result<(), BenchError> {
    for &transport in &options.transports.transport {
        for size in &options.sizes.crowd_sizes {
            for &workers in &options.sizes.crowd_workers {
                let start = |polls| Crowd::start(transport, bytes_of(size)?, workers, polls);
                let mut polling = start(true)?;
                let mut sleeping = start(false)?;
                // A round has at least three turns.
                let (ours, ceiling) = interleave(
                    Pace { round: Duration::ZERO, ..pace },
                    || polling.turn(pace.round / 3),
                    || sleeping.turn(pace.round / 3),
                )?;
                let transport = transport.name();
                let name = format!("steps_{transport}_{size}_workers{workers}_cpus{processors}");
                let ceiling_name = "without polling";
                report.row(Row {
                    name,
                    unit: Unit::Steps,
                    amount: 1,
                    ours,
                    ceiling,
                    ceiling_name,
                })?;
            }
        }
    }
    Ok(())
}

/// A server and workers that take steps at once.
struct Crowd {
    workers: Vec<(Worker, Params)>,
    _server: Ps,
    _folder: Option<BenchFolder>,
}

impl Crowd {
    fn start(
        transport: Transport,
        bytes: usize,
        workers: u32,
        polls: bool,
    ) -> Result<Crowd, BenchError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let (address, folder) = transport.address(&format!("crowd-{polls}"))?;
        let listener = runtime.block_on(Ps::listen(&address))?;
        let builder = ClusterSpec::builder().job("ps", [listener.address()]);
        let cluster = builder.workers(workers).build()?;
        let network = transport.network();
        let network = if polls { network } else { network.busy_poll(Duration::ZERO) };
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(RATE));
        let server = listener.start(config.network(network))?;
        let variables = [VariableSpec::f32("w", [bytes as u64 / 4])?];
        let join = |task| -> Result<(Worker, Params), BenchError> {
            let config = WorkerConfig::new(cluster.clone(), TaskId::worker(task));
            let config = config.shared_memory(transport.is_shared());
            let config = if polls { config } else { config.busy_poll(Duration::ZERO) };
            let mut worker = Worker::connect(config)?;
            let params = worker.join(&variables, |_| ())?;
            Ok((worker, params))
        };
        let workers = (0..workers).map(join).collect::<Result<_, _>>()?;
        Ok(Crowd { workers, _server: server, _folder: folder })
    }

    /// Lets all workers take steps for this time. Returns the mean time between two steps.
    fn turn(&mut self, time: Duration) -> Result<Duration, BenchError> {
        let steps = AtomicU64::new(0);
        let is_over = AtomicBool::new(false);
        let run = |worker: &mut Worker, params: &mut Params| {
            while !is_over.load(Ordering::Relaxed) {
                step(worker, params).map_err(|error| Chain(&*error).to_string())?;
                steps.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = self
                .workers
                .iter_mut()
                .map(|(worker, params)| scope.spawn(move || run(worker, params)))
                .collect();
            std::thread::sleep(time);
            is_over.store(true, Ordering::Relaxed);
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| Err("a worker thread panicked".to_owned()))
            })
        })?;
        Ok(begun.elapsed().div_f64(steps.load(Ordering::Relaxed).max(1) as f64))
    }
}

/// Pulls the variable and pushes a gradient of zeros.
fn step(worker: &mut Worker, params: &mut Params) -> Result<(), BenchError> {
    let token = worker.token()?.ok_or("the training has ended")?;
    let _ = worker.pull(&token, params)?;
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w")?;
    worker.push(token, gradients)?;
    Ok(())
}
