//! `pushpull bench`: measures a server, interleaved with the ceilings of the machine.

mod apply;
mod bed;
mod ceiling;
mod daemon;
mod memory;
mod mlp;
mod page;
mod plot;
mod probe;
mod report;
mod restart;
mod rows;
mod saving;
mod scale;
mod served;
mod stalled;
mod transport;
mod turns;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use self::report::Report;
use self::turns::Pace;

/// Options of `pushpull bench`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Suites to run.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Suite::Transport])]
    suite: Vec<Suite>,
    /// Transports of the suites `transport`, `rows` and `mlp`.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Transport::ALL)]
    transport: Vec<Transport>,
    /// Total sizes of the variables in the suite `transport`, such as 64B, 4KiB or 4MiB.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = size,
        default_values = ["64B", "4KiB", "64KiB", "1MiB", "4MiB", "64MiB"]
    )]
    sizes: Vec<String>,
    /// Number of variables that the total size is divided into.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    variables: u32,
    /// Number of workers that pull and push at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    replicas: u32,
    /// Number of shards of the server in this process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    shards: u16,
    /// Addresses of running daemons, all of them in the order of their tasks, to measure in place
    /// of a server in this process. They must run `--optimizer sgd` in asynchronous mode, and hold
    /// no variables or those of an earlier run with the same options.
    #[arg(long, value_delimiter = ',')]
    address: Vec<String>,
    /// Learning rate of the daemons of --address. Their values are checked against the sum of the
    /// pushes.
    #[arg(long, default_value_t = bed::RATE, requires = "address")]
    learning_rate: f64,
    /// Size of the variable of the suite `apply`.
    #[arg(long, value_parser = size, default_value = "256MiB")]
    apply_size: String,
    /// Sizes of the state in the suite `restart`.
    #[arg(long, value_delimiter = ',', value_parser = size, default_values = ["64MiB", "1GiB", "4GiB"])]
    restart_sizes: Vec<String>,
    /// Size of the values in the suite `memory`.
    #[arg(long, value_parser = size, default_value = "256MiB")]
    memory_size: String,
    /// Size of the pull in the suite `memory` whose reader stops reading.
    #[arg(long, value_parser = size, default_value = "1GiB")]
    stalled_size: String,
    /// Largest number of variables in the suite `scale`.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    scale_variables: u32,
    /// Largest number of connections in the suite `scale`.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=4_000))]
    scale_connections: u32,
    /// Size of the variable of the suite `checkpoint`.
    #[arg(long, value_parser = size, default_value = "256MiB")]
    checkpoint_size: String,
    /// Number of rounds of pushpull and its ceiling, interleaved. Figures are medians over the
    /// rounds.
    #[arg(long, default_value_t = 7, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(5..=1000))]
    rounds: usize,
    /// Approximate duration of one side of a round, in milliseconds.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    round_ms: u64,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Draw the throughputs of the suite `transport` by size, with the ceilings, into an SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write the figures, the machine and the command into a Markdown page, between its figure
    /// markers.
    #[arg(long, value_name = "FILE.md")]
    page: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// A short selection of the other suites, in less than a minute.
    Quick,
    /// Pulls and pushes beside the bare transport.
    Transport,
    /// Update rules in the store beside the same rules in place.
    Apply,
    /// Rows of a sparse variable and of a table, in the store and over the transports, beside a
    /// bare gather.
    Rows,
    /// A killed daemon from exec to its first answered pull, beside a process that only prints its
    /// version.
    Restart,
    /// A small network trained by two workers, beside the same two that only compute.
    Mlp,
    /// Memory of a daemon beside the bounds of its configuration, memory of an idle connection, and
    /// pushes beside a reader that requested everything and stopped reading.
    Memory,
    /// Pulls and pushes with many variables and with many connections, beside one of each.
    Scale,
    /// A checkpoint during pushes, beside a file that is written, flushed and read.
    Checkpoint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// TCP over loopback.
    Tcp,
    /// A Unix socket without shared memory.
    Uds,
    /// Memory that the server shares over a Unix socket.
    Shm,
}

impl Transport {
    const ALL: [Transport; 3] = [Transport::Tcp, Transport::Uds, Transport::Shm];

    /// Returns whether a client can use this transport with the address.
    fn fits(self, address: &str) -> bool {
        (self == Transport::Tcp) != address.starts_with("unix:")
    }

    /// Returns whether the server shares memory.
    pub(crate) fn is_shared(self) -> bool {
        self == Transport::Shm
    }

    /// Returns its name within row names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Uds => "uds",
            Transport::Shm => "shm",
        }
    }

    /// Returns an address for a server in this process, and the private folder of its socket.
    pub(crate) fn address(self, what: &str) -> std::io::Result<(String, Option<BenchFolder>)> {
        Ok(match self {
            Transport::Tcp => ("127.0.0.1:0".to_owned(), None),
            Transport::Uds | Transport::Shm => {
                let folder = BenchFolder::private(what)?;
                (format!("unix:{}/ps.sock", folder.path().display()), Some(folder))
            }
        })
    }
}

pub(crate) type Failure = Box<dyn Error>;

/// Runs the suites of the options and prints their rows.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let mut report = Report::new(options.json);
    let pace = Pace { rounds: options.rounds, round: Duration::from_millis(options.round_ms) };
    for &suite in &options.suite {
        measure(suite, options, pace, &mut report)?;
    }
    if let Some(path) = &options.plot {
        plot::draw(path, report.lines())?;
    }
    if let Some(path) = &options.page {
        page::write(path, report.lines())?;
    }
    Ok(())
}

fn measure(
    suite: Suite,
    options: &Options,
    pace: Pace,
    report: &mut Report,
) -> Result<(), Failure> {
    match suite {
        Suite::Quick => quick(options, report),
        Suite::Transport => transport::run(options, &options.sizes, pace, report),
        Suite::Restart => restart::run(&options.restart_sizes, pace.rounds, report),
        Suite::Memory => {
            memory::run(bytes_of(&options.memory_size)?, report)?;
            stalled::run(&options.stalled_size, pace, report)
        }
        Suite::Scale => scale::run(options, pace, report),
        Suite::Checkpoint => {
            let bytes = bytes_of(&options.checkpoint_size)?;
            saving::run(&options.checkpoint_size, bytes, pace.rounds, report)
        }
        Suite::Mlp => {
            options.transport.iter().try_for_each(|&transport| mlp::run(transport, pace, report))
        }
        Suite::Rows => {
            rows::run(&[16, 64], pace, report)?;
            options
                .transport
                .iter()
                .try_for_each(|&transport| served::run(&[16, 64], transport, pace, report))
        }
        Suite::Apply => {
            let bytes = bytes_of(&options.apply_size)?;
            apply::run(&apply::every_rule(), bytes, pace, report)
        }
    }
}

/// Runs short rounds of the most telling suites.
fn quick(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let pace = Pace { rounds: options.rounds.min(5), round: Duration::from_millis(80) };
    let sizes = ["64B", "4KiB", "1MiB", "16MiB"].map(str::to_owned);
    transport::run(options, &sizes, pace, report)?;
    apply::run(&apply::every_rule()[..2], 32 << 20, pace, report)?;
    rows::run(&[16], pace, report)?;
    mlp::run(Transport::Shm, pace, report)?;
    restart::run(&["64MiB".to_owned()], pace.rounds, report)
}

/// Validates a size on the command line and returns its text.
fn size(text: &str) -> Result<String, String> {
    bytes_of(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Parses a size with a unit, such as 4KiB, to bytes.
fn bytes_of(size: &str) -> Result<usize, Failure> {
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &size[digits.len()..] {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => {
            return Err(
                format!("cannot read the size {size:?}: say 64B, 4KiB, 4MiB or 1GiB").into()
            );
        }
    };
    let bytes = digits.parse::<usize>()?.saturating_mul(unit);
    if bytes == 0 || bytes % 8 != 0 || bytes > 1 << 33 {
        return Err(format!("cannot measure {size}: not a multiple of 8 up to 8GiB").into());
    }
    Ok(bytes)
}

/// A private folder, removed with its contents on drop. On tmpfs if /dev/shm exists.
#[derive(Debug)]
pub(crate) struct BenchFolder(PathBuf);

impl BenchFolder {
    pub(crate) fn private(what: &str) -> std::io::Result<BenchFolder> {
        let shared = Path::new("/dev/shm");
        let root = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let path = root.join(format!("pushpull-bench-{what}-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(BenchFolder(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for BenchFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_need_a_unit_and_a_multiple_of_eight_bytes() {
        for (size, bytes) in [("64B", 64), ("4KiB", 4096), ("2MiB", 2 << 20), ("8GiB", 8 << 30)] {
            assert_eq!(bytes_of(size).unwrap(), bytes);
        }
        for size in ["", "4", "4kb", "0B", "12B", "9GiB", "-8B", "99999999999999999999B"] {
            assert!(bytes_of(size).is_err(), "{size}");
        }
    }
}
