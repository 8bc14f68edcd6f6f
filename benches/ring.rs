//! Times all-reduce around a ring of processes of this host, beside Open MPI, gloo and the bare
//! sockets of the machine where those are installed.
//!
//! `cargo bench -p benches --bench ring -- [--ranks N] [--transport tcp|unix]` prints, for each
//! size, the median and the minimum in microseconds. The slowest rank counts.

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use clap::Parser;
use pushpull::blocking::Ring;
use pushpull::collective::{Launch, LaunchError, Reduction, RingConfig, Transport};

/// Times all-reduce around a ring of processes of this host.
#[derive(Debug, Parser)]
struct Options {
    /// The number of ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// The transport: tcp or unix.
    #[arg(long, default_value = "unix")]
    transport: String,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The sizes in KiB.
const SIZES: [usize; 8] = [1, 4, 16, 64, 256, 1024, 16_384, 65_536];

fn main() -> ExitCode {
    let options = Options::parse();
    let run = || -> Result<(), Box<dyn std::error::Error>> {
        match Launch::from_lookup(|name| std::env::var(name).ok()) {
            Err(LaunchError::NoLauncher { .. }) => start_ranks(&options),
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

/// Starts the ranks as processes of this program.
fn start_ranks(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let program = std::env::current_exe()?;
    let start = |rank: u32| {
        Command::new(&program)
            .args(["--transport", &options.transport])
            .env("PUSHPULL_RANK", rank.to_string())
            .env("PUSHPULL_SIZE", options.ranks.to_string())
            .stdin(Stdio::null())
            .spawn()
    };
    let ranks = (0..options.ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    for mut rank in ranks {
        let status = rank.wait()?;
        if !status.success() {
            return Err(format!("a rank has ended: {status}").into());
        }
    }
    Ok(())
}

fn rank(options: &Options, launch: Launch) -> Result<(), Box<dyn std::error::Error>> {
    let config = RingConfig::new(launch);
    let config = match options.transport.as_str() {
        "tcp" => config.transport(Transport::Tcp),
        "unix" => config,
        other => return Err(format!("the transport {other:?} is neither tcp nor unix").into()),
    };
    let mut ring = Ring::join(config)?;
    for kib in SIZES {
        let mut values = vec![ring.rank() as f32 + 1.0; kib * 256];
        let rounds = match kib {
            16_384.. => 10,
            _ => (60_000 / kib).clamp(8, 400),
        };
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
            println!(
                "pushpull {} n={} {kib:6} KiB rounds={rounds:3} median={:10.1} us minimum={:10.1} us",
                options.transport,
                ring.size(),
                times[rounds / 2],
                times[0],
            );
        }
    }
    ring.leave();
    Ok(())
}
