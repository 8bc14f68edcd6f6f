//! A training on a ring beside the same training with a server, in synchronous mode.
//!
//! Both have a thread of this process for each rank or worker. The server has a thread more, and
//! shares memory with its workers. They take turns.

use std::thread;
use std::time::{Duration, Instant};

use pushpull::blocking::{Ring, TrainingSession};
use pushpull::collective::{Launch, RingConfig};
use pushpull::compute::{Compute, Device, Mlp, Model, Samples};
use pushpull::local::Cluster;
use pushpull::training::{TrainingConfig, hooks};
use pushpull::{PsConfig, Sgd, Synchronous, VariableSpec};

use crate::Fault;

/// The network of the example `digits`.
const DIGITS: [usize; 3] = [64, 128, 10];
const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];
/// The samples of a worker in a step.
const BATCH: usize = 64;
/// The elements of a model whose gradient takes no time: 16 MiB.
const ELEMENTS: u64 = 4 << 20;
/// The steps before the clock starts.
const WARM: u64 = 10;

/// The gradient that a step computes.
#[derive(Clone, Copy)]
enum Workload {
    /// The gradient of the digits' network.
    Digits,
    /// Nothing: the gradient of a large variable is there already.
    Large,
}

impl Workload {
    fn steps(self) -> u64 {
        match self {
            Workload::Digits => 500,
            Workload::Large => 30,
        }
    }

    /// Trains as one worker. Returns the time of a step.
    fn train(self, config: TrainingConfig) -> Result<Duration, Fault> {
        let last = hooks::StopAtStep::last(WARM + self.steps());
        match self {
            Workload::Digits => {
                let mut model = Model::new(Mlp::new(Device::pick("cpu:1")?, &DIGITS), NAMES);
                let features: Vec<f32> =
                    (0..64 * BATCH).map(|it| (it % 17) as f32 / 17.0).collect();
                let labels: Vec<u32> = (0..BATCH as u32).map(|sample| sample % 10).collect();
                let variables = Compute::<Samples<'_>>::variables(&model)?;
                self.time(config.variables(variables).hook(last), |step| {
                    step.compute(&mut model, Samples { features: &features, labels: &labels })?;
                    Ok(())
                })
            }
            Workload::Large => {
                let variables = [VariableSpec::f32("w", [ELEMENTS])?];
                self.time(config.variables(variables).hook(last), |step| {
                    step.parts().1.view_mut_unfilled::<f32>("w")?.fill(1e-6);
                    Ok(())
                })
            }
        }
    }

    fn time(
        self,
        config: TrainingConfig,
        mut compute: impl FnMut(&mut pushpull::blocking::Step<'_>) -> Result<(), Fault>,
    ) -> Result<Duration, Fault> {
        let mut session = TrainingSession::start(config)?;
        let mut begin = None;
        while let Some(mut step) = session.step()? {
            if step.step() >= WARM {
                begin.get_or_insert_with(Instant::now);
            }
            compute(&mut step)?;
            step.push()?;
        }
        let elapsed = begin.map_or(Duration::ZERO, |begin| begin.elapsed());
        session.close()?;
        Ok(elapsed / self.steps() as u32)
    }
}

/// Runs a thread for each rank. Returns the time of a step on the slowest.
fn slowest(
    ranks: u32,
    rank: impl Fn(u32) -> Result<Duration, Fault> + Sync,
) -> Result<Duration, Fault> {
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..ranks).map(|index| scope.spawn(move || rank(index))).collect();
        let mut slowest = Duration::ZERO;
        for thread in threads {
            slowest = slowest.max(thread.join().map_err(|_| "a rank has panicked")??);
        }
        Ok(slowest)
    })
}

fn on_ring(ranks: u32, turn: usize, workload: Workload) -> Result<Duration, Fault> {
    let folder = tempfile::tempdir()?;
    let job = format!("bench-{turn}");
    slowest(ranks, |index| {
        let launch = Launch::new(index, ranks)?.parent_process(std::process::id());
        let config = RingConfig::new(launch).job(&job).folder(folder.path());
        let ring = Ring::join(config)?;
        workload.train(TrainingConfig::ring(ring.into_inner(), Sgd::new(0.01)))
    })
}

fn with_server(ranks: u32, workload: Workload) -> Result<Duration, Fault> {
    let cluster = Cluster::start(1, ranks, |cluster, task| {
        PsConfig::new(cluster, task, Sgd::new(0.01)).mode(Synchronous::new(ranks))
    })?;
    let time =
        slowest(ranks, |index| workload.train(TrainingConfig::new(cluster.worker_config(index))))?;
    cluster.stop()?;
    Ok(time)
}

/// Prints the median time of a step both ways, for each number of ranks.
pub(crate) fn compare(ranks: &[u32], turns: usize) -> Result<(), Fault> {
    println!("ranks  training           ring us  server us  ring/server");
    for &ranks in ranks {
        for (name, workload) in [("digits", Workload::Digits), ("16 MiB", Workload::Large)] {
            let mut times = [Vec::new(), Vec::new()];
            for turn in 0..turns {
                times[0].push(on_ring(ranks, turn, workload)?);
                times[1].push(with_server(ranks, workload)?);
            }
            let [ring, server] = times.map(|mut times| {
                times.sort_unstable();
                times[times.len() / 2].as_secs_f64() * 1e6
            });
            println!("{ranks:5}  {name:15} {ring:10.0} {server:10.0} {:12.2}", ring / server);
        }
    }
    Ok(())
}
