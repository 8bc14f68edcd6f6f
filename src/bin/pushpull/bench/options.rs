//! The command line of `pushpull bench`, grouped as its help shows it.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum, value_parser};

use super::super::local_path;
use super::report::Report;
use super::turns::Pace;
use super::{BenchError, Transport, bed, plot, size};

/// Options of `pushpull bench`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measurement", after_help = DETAILS)]
pub(crate) struct BenchOptions {
    /// Suites to run, listed below
    #[arg(
        long,
        value_name = "SUITES",
        value_enum,
        value_delimiter = ',',
        default_values_t = [Suite::Transport],
        hide_possible_values = true
    )]
    pub(super) suite: Vec<Suite>,
    #[command(flatten)]
    pub(super) bench: TransportOptions,
    #[command(flatten)]
    pub(super) output: OutputOptions,
}

/// Options of a measurement of transports.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measurement")]
pub(crate) struct TransportOptions {
    /// Transports, listed below
    #[arg(
        long,
        value_name = "TRANSPORTS",
        value_enum,
        value_delimiter = ',',
        default_values_t = Transport::USUAL,
        hide_possible_values = true
    )]
    pub(crate) transport: Vec<Transport>,
    /// Rounds of pushpull and its ceiling; figures are medians
    #[arg(
        long,
        value_name = "N",
        default_value_t = 7,
        value_parser = RangedU64ValueParser::<usize>::new().range(5..=1000)
    )]
    rounds: usize,
    /// Duration of one side of a round, in ms
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 300,
        value_parser = value_parser!(u64).range(1..=60_000)
    )]
    round_ms: u64,
    #[command(flatten)]
    pub(crate) transport_suite: TransportSuite,
}

/// Options of the suite `transport`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Suite transport")]
pub(crate) struct TransportSuite {
    /// Total sizes of the variables
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = size,
        allow_hyphen_values = true,
        default_values = ["64B", "4KiB", "64KiB", "1MiB", "4MiB", "64MiB"]
    )]
    pub(crate) sizes: Vec<String>,
    /// Number of variables that a size is divided into
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=1_000_000)
    )]
    pub(crate) variables: u32,
    /// Number of workers that pull and push at once
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=256)
    )]
    pub(crate) replicas: u32,
    /// Number of shards of the server in this process
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = value_parser!(u16).range(1..=64)
    )]
    pub(crate) shards: u16,
    /// Numbers of processors to measure on, one after the other [default: all of them]
    #[arg(
        long,
        value_name = "NS",
        value_delimiter = ',',
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024)
    )]
    pub(crate) processors: Vec<usize>,
    /// Addresses of all daemons to measure, in task order [default: a server here]
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',', conflicts_with = "processors")]
    pub(crate) address: Vec<String>,
    /// Learning rate of the daemons of --address
    #[arg(long, value_name = "RATE", default_value_t = bed::RATE, requires = "address")]
    pub(crate) learning_rate: f64,
}

/// Where the figures go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputOptions {
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the throughputs of transport by size, with the ceilings
    #[arg(long, value_name = "FILE.svg", value_parser = local_path())]
    pub(crate) plot: Option<PathBuf>,
}

/// A suite; the help of the command describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    Quick,
    Transport,
}

impl TransportOptions {
    /// Returns the number and the duration of the rounds.
    pub(crate) fn pace(&self) -> Pace {
        Pace { rounds: self.rounds, round: Duration::from_millis(self.round_ms) }
    }

    /// Returns the number and the duration of the rounds of a short selection.
    pub(crate) fn quick_pace(&self) -> Pace {
        Pace { rounds: self.rounds.min(5), round: Duration::from_millis(80) }
    }
}

impl OutputOptions {
    /// Draws the plot that is asked for.
    pub(crate) fn draw(&self, report: &Report) -> Result<(), BenchError> {
        match &self.plot {
            Some(path) => plot::draw(path, report.lines()),
            None => Ok(()),
        }
    }
}

const DETAILS: &str = "\
Suites:
  quick      a few sizes in short rounds
  transport  pulls and pushes beside the bare transport

Transports:
  tcp  TCP over loopback
  tls  TLS 1.3 over it, beside rustls alone; not among the default ones
  uds  a Unix socket without shared memory
  shm  memory that the server shares over a Unix socket

A size may end in K, M or G, powers of 1024, or in KB, MB or GB, powers of 1000.
The daemons of --address must run --optimizer sgd in asynchronous mode, and hold no variables or
those of an earlier run with the same options. More suites measure the rest, in a checkout:
cargo bench -p benches --bench suites -- --help
";
