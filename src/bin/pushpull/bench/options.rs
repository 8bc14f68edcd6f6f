//! The command line of `pushpull bench`, grouped as its help shows it.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum, value_parser};

use super::super::local_path::local_path;
use super::turns::Pace;
use super::{Transport, bed, size};

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
    /// Transports, also of rows and mlp, listed below
    #[arg(
        long,
        value_name = "TRANSPORTS",
        value_enum,
        value_delimiter = ',',
        default_values_t = Transport::ALL,
        hide_possible_values = true
    )]
    pub(super) transport: Vec<Transport>,
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
    pub(super) transport_suite: TransportSuite,
    #[command(flatten)]
    pub(super) suites: SuiteSizes,
    #[command(flatten)]
    pub(super) output: OutputOptions,
}

/// Options of the suite `transport`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Suite transport")]
pub(super) struct TransportSuite {
    /// Total sizes of the variables
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = size,
        allow_hyphen_values = true,
        default_values = ["64B", "4KiB", "64KiB", "1MiB", "4MiB", "64MiB"]
    )]
    pub(super) sizes: Vec<String>,
    /// Number of variables that a size is divided into
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=1_000_000)
    )]
    pub(super) variables: u32,
    /// Number of workers that pull and push at once
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=256)
    )]
    pub(super) replicas: u32,
    /// Number of shards of the server in this process
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = value_parser!(u16).range(1..=64)
    )]
    pub(super) shards: u16,
    /// Daemons to measure, all in task order [default: a server here]
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',')]
    pub(super) address: Vec<String>,
    /// Learning rate of the daemons of --address
    #[arg(long, value_name = "RATE", default_value_t = bed::RATE, requires = "address")]
    pub(super) learning_rate: f64,
}

/// Sizes of the other suites.
#[derive(Debug, Args)]
#[command(next_help_heading = "Other suites")]
pub(super) struct SuiteSizes {
    /// Size of the variable of apply
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "256MiB"
    )]
    pub(super) apply_size: String,
    /// Sizes of the state of restart
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        value_parser = size,
        allow_hyphen_values = true,
        default_values = ["64MiB", "1GiB", "4GiB"]
    )]
    pub(super) restart_sizes: Vec<String>,
    /// Size of the values of memory
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "256MiB"
    )]
    pub(super) memory_size: String,
    /// Size of the pull of memory whose reader stops
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "1GiB"
    )]
    pub(super) stalled_size: String,
    /// Largest number of variables of scale
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100_000,
        value_parser = value_parser!(u32).range(1..=1_000_000)
    )]
    pub(super) scale_variables: u32,
    /// Largest number of connections of scale
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1_000,
        value_parser = value_parser!(u32).range(1..=4_000)
    )]
    pub(super) scale_connections: u32,
    /// Size of the variable of checkpoint
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "256MiB"
    )]
    pub(super) checkpoint_size: String,
}

/// Where the figures go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputOptions {
    /// Print one JSON object per line
    #[arg(long)]
    pub(super) json: bool,
    /// Draw the throughputs of transport by size, with the ceilings
    #[arg(long, value_name = "FILE.svg", value_parser = local_path())]
    pub(super) plot: Option<PathBuf>,
    /// Write the figures into a page, between its figure markers
    #[arg(long, value_name = "FILE.md", value_parser = local_path())]
    pub(super) page: Option<PathBuf>,
}

/// A suite; the help of the command describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    Quick,
    Transport,
    Apply,
    Rows,
    Restart,
    Mlp,
    Memory,
    Scale,
    Checkpoint,
}

impl BenchOptions {
    /// Returns the number and the duration of the rounds.
    pub(super) fn pace(&self) -> Pace {
        Pace { rounds: self.rounds, round: Duration::from_millis(self.round_ms) }
    }
}

const DETAILS: &str = "\
Suites:
  quick       a short selection of the others, in less than a minute
  transport   pulls and pushes beside the bare transport
  apply       update rules in the store beside the same rules in place
  rows        rows of a sparse variable and of a table, in the store and served, beside a gather
  restart     a killed daemon from exec to its first answered pull, beside an empty process
  mlp         a small network trained by two workers, beside the same two that only compute
  memory      memory of a daemon beside its bounds, and pushes beside a reader that stops reading
  scale       many variables and many connections, beside one of each
  checkpoint  a checkpoint during pushes, beside a file that is written, flushed and read

Transports:
  tcp  TCP over loopback
  uds  a Unix socket without shared memory
  shm  memory that the server shares over a Unix socket

A size may end in K, M or G, powers of 1024, or in KB, MB or GB, powers of 1000.
The daemons of --address must run --optimizer sgd in asynchronous mode, and hold no variables or
those of an earlier run with the same options.
";
