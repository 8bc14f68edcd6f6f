//! The command line of the suites.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, ValueEnum, value_parser};

use crate::bench::options::{OutputOptions, TransportOptions};
use crate::bench::size;
use crate::bench::turns::Pace;
use crate::local_path::local_path;

/// Measures pushpull beside the ceilings of the machine.
#[derive(Debug, Parser)]
#[command(name = "suites", next_help_heading = "Measurement", after_help = DETAILS)]
pub(crate) struct SuitesOptions {
    /// Suites to run, listed below
    #[arg(
        long,
        value_name = "SUITES",
        value_enum,
        value_delimiter = ',',
        default_values_t = [Suite::Quick],
        hide_possible_values = true
    )]
    pub(crate) suite: Vec<Suite>,
    #[command(flatten)]
    pub(crate) transports: TransportOptions,
    #[command(flatten)]
    pub(crate) sizes: SuiteSizes,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
    /// Write the figures into a page, between its figure markers
    #[arg(long, value_name = "FILE.md", value_parser = local_path(), help_heading = "Output")]
    pub(crate) page: Option<PathBuf>,
    /// Only check that a suite runs, as `cargo bench -- --test` asks of every bench
    #[arg(long, hide = true)]
    test: bool,
    /// Ignored: cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Sizes of the suites.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sizes")]
pub(crate) struct SuiteSizes {
    /// Sizes of the variable of apply
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        value_parser = size,
        allow_hyphen_values = true,
        default_values = ["64KiB", "256MiB"]
    )]
    pub(crate) apply_sizes: Vec<String>,
    /// Sizes of the state of restart
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        value_parser = size,
        allow_hyphen_values = true,
        default_values = ["64MiB", "1GiB", "4GiB"]
    )]
    pub(crate) restart_sizes: Vec<String>,
    /// Size of the values of memory and footprint
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "256MiB"
    )]
    pub(crate) memory_size: String,
    /// Size of the pull of memory whose reader stops
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "1GiB"
    )]
    pub(crate) stalled_size: String,
    /// Largest number of variables of scale
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100_000,
        value_parser = value_parser!(u32).range(1..=1_000_000)
    )]
    pub(crate) scale_variables: u32,
    /// Largest number of connections of scale
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1_000,
        value_parser = value_parser!(u32).range(1..=4_000)
    )]
    pub(crate) scale_connections: u32,
    /// Sizes of the variable of crowd
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        value_parser = size,
        allow_hyphen_values = true,
        default_values = ["64B", "4KiB", "64KiB"]
    )]
    pub(crate) crowd_sizes: Vec<String>,
    /// Numbers of workers of crowd
    #[arg(
        long,
        value_name = "NS",
        value_delimiter = ',',
        default_values_t = [1, 2, 4, 16, 64],
        value_parser = value_parser!(u32).range(1..=256)
    )]
    pub(crate) crowd_workers: Vec<u32>,
    /// Size of the variable of checkpoint
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = size,
        allow_hyphen_values = true,
        default_value = "256MiB"
    )]
    pub(crate) checkpoint_size: String,
}

/// A suite; the help of the command describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    Quick,
    Transport,
    Apply,
    Rows,
    Restart,
    Mlp,
    Memory,
    Footprint,
    Scale,
    Crowd,
    Checkpoint,
}

impl SuitesOptions {
    /// Returns the number and the duration of the rounds.
    pub(crate) fn pace(&self) -> Pace {
        match self.test {
            true => Pace { rounds: 1, round: Duration::ZERO },
            false => self.transports.pace(),
        }
    }

    /// Returns the suites to run. With `--test` it is one that needs no daemon and little memory.
    pub(crate) fn suites(&self) -> &[Suite] {
        if self.test { &[Suite::Mlp] } else { &self.suite }
    }
}

const DETAILS: &str = "\
Suites:
  quick       a short selection of the others, in less than a minute
  transport   pulls and pushes beside the bare transport; also in the tool, as `pushpull bench`
  apply       update rules in the store beside the same rules in place
  rows        rows of a sparse variable and of a table, in the store and served, beside a gather and the rule
  restart     a killed daemon from exec to its first answered pull, beside an empty process
  mlp         a small network trained by two workers, beside the same two that only compute
  memory      memory of a daemon beside its bounds, and pushes beside a reader that stops reading
  footprint   memory of a daemon, of its state directory and of a worker, beside the bytes of the values
  scale       many variables and many connections, beside one of each
  crowd       steps of 1 to 64 workers on one processor and on two (--processors), polling and never
  checkpoint  a checkpoint, alone and during pushes, beside a file that is written, flushed and read

The transports are those of `pushpull bench --help`, also for rows, mlp and crowd. The suites quick,
restart and memory start the daemon, which must be built before:
cargo build --release --features cli --bin pushpull-ps
";
