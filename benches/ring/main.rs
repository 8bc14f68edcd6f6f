//! Times all-reduce around a ring of processes of this host. With `--peers`, beside Open MPI, gloo and
//! the bare sockets of the machine.
//!
//! `cargo bench -p benches --bench ring -- [--peers] [--ranks 2,4] [--turns N]` prints a table: for
//! each size the median and the minimum in microseconds. The slowest rank of a round counts. The
//! contenders take turns, and the best turn of each counts. With `--training` it prints the time of a
//! training step on a ring and with a server instead; with `--overlap` that of a step on a ring of two
//! with whole and with streamed gradients.
//!
//! Open MPI needs `mpirun` (or `--mpirun PATH`) and `mpi4py`, gloo needs `torch`, both for `--python`.

mod bare;
mod contender;
mod overlap;
mod table;
mod training;

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use pushpull::blocking::Ring;
use pushpull::collective::{Launch, LaunchError, Reduction, RingConfig, Transport};

use self::contender::Contender;
use self::table::Table;

type Fault = Box<dyn Error + Send + Sync>;

/// Times all-reduce around a ring of processes of this host.
#[derive(Debug, Parser)]
struct Options {
    /// The numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2")]
    ranks: Vec<u32>,
    /// Time Open MPI, gloo and bare sockets as well.
    #[arg(long)]
    peers: bool,
    /// Time a training on a ring beside one with a server instead.
    #[arg(long, conflicts_with = "peers")]
    training: bool,
    /// Time a step with streamed gradients beside one with whole gradients instead.
    #[arg(long, conflicts_with_all = ["peers", "training"])]
    overlap: bool,
    /// The turns of each contender.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// The largest size in KiB.
    #[arg(long, default_value_t = 65_536)]
    kib_max: usize,
    /// Only contenders with this in their name.
    #[arg(long, default_value = "")]
    only: String,
    /// The launcher of Open MPI.
    #[arg(long, default_value = "mpirun")]
    mpirun: String,
    /// The Python with `mpi4py` and `torch`.
    #[arg(long, default_value = "/usr/bin/python3")]
    python: String,
    /// The transport of a rank, in a process of this program.
    #[arg(long, hide = true)]
    transport: Option<String>,
    /// The number of ranks that exchange bytes without a ring, in a process of this program.
    #[arg(long, hide = true)]
    bare: Option<u32>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// Passed by the tests of benches: one short turn.
    #[arg(long, hide = true)]
    test: bool,
}

/// The sizes in KiB.
const SIZES: [usize; 8] = [1, 4, 64, 256, 1024, 4096, 16_384, 65_536];

/// Returns the sizes in KiB up to a limit, with the rounds of each.
fn sizes(kib_max: usize) -> impl Iterator<Item = (usize, usize)> {
    let rounds = |kib: usize| match kib {
        16_384.. => 10,
        _ => (60_000 / kib).clamp(16, 400),
    };
    SIZES.into_iter().filter(move |kib| *kib <= kib_max).map(move |kib| (kib, rounds(kib)))
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if options.test {
        options.turns = 1;
        options.kib_max = 64;
    }
    let run = || -> Result<(), Fault> {
        if let Some(ranks) = options.bare {
            return Ok(bare::rank(ranks, options.kib_max)?);
        }
        match Launch::from_lookup(|name| std::env::var(name).ok()) {
            Err(LaunchError::NoLauncher { .. }) if options.training => {
                training::compare(&options.ranks, options.turns)
            }
            Err(LaunchError::NoLauncher { .. }) if options.overlap => overlap::compare(),
            Err(LaunchError::NoLauncher { .. }) => compare(&options),
            launch => rank(&options, launch?.parent_process(std::os::unix::process::parent_id())),
        }
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Lets all contenders take turns.
fn compare(options: &Options) -> Result<(), Fault> {
    for &ranks in &options.ranks {
        let mut contenders = Contender::all(options);
        let mut table = Table::new(ranks);
        for _ in 0..options.turns {
            contenders.retain(|contender| match contender.time(options, ranks) {
                Ok(times) => {
                    table.add(contender.name, times);
                    true
                }
                Err(cause) => {
                    println!("without {}: {cause}", contender.name);
                    false
                }
            });
        }
        println!("{table}");
    }
    Ok(())
}

/// Takes part in a ring as one rank. Rank 0 prints a size, the median and the minimum a line.
fn rank(options: &Options, launch: Launch) -> Result<(), Fault> {
    let config = RingConfig::new(launch);
    let config = match options.transport.as_deref() {
        Some("tcp") => config.transport(Transport::Tcp),
        Some("unix") => config.transport(Transport::Unix),
        _ => config,
    };
    let mut ring = Ring::join(config)?;
    for (kib, rounds) in sizes(options.kib_max) {
        let mut values = vec![1.0_f32; kib * 256];
        for _ in 0..3 {
            ring.all_reduce(&mut values.clone(), Reduction::Sum)?;
        }
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            values.fill(1.0);
            ring.barrier()?;
            let begin = Instant::now();
            ring.all_reduce(&mut values, Reduction::Sum)?;
            times.push(begin.elapsed().as_secs_f64() * 1e6);
            assert_eq!(values[0], ring.size() as f32);
        }
        ring.all_reduce(&mut times, Reduction::Max)?;
        if ring.rank() == 0 {
            times.sort_by(f64::total_cmp);
            println!("{kib} {} {}", times[rounds / 2], times[0]);
        }
    }
    ring.leave();
    Ok(())
}
