//! Command line of the example.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use pushpull::Mode;
use pushpull::training::Codec;

use super::data::Split;
use super::task::{self, ModeOptions, ProcessOptions, Replicas, Role, TaskError};

/// Train a small network on handwritten digits over a parameter server.
///
/// Without --job-name the whole cluster runs in this process: two parameter servers and two workers,
/// or with --synchronous A/R as many workers as R. With --job-name, give all processes the same hosts
/// and the same mode. A step is made of --batch rows in either mode, so the same number of steps
/// reaches the same accuracy.
#[derive(Clone, Debug, Parser)]
pub(crate) struct DigitsOptions {
    /// Codec of the gradients: f16, bf16, int8, onebit, topk(FRACTION) or threshold(MAGNITUDE). The
    /// error of the encoding is added to the next gradient. [default: none]
    #[arg(long)]
    pub(crate) codec: Option<Codec>,
    /// Train in this process with each codec and three seeds, and write a table of the results into
    /// this document, between its marks. Uses --data or the digits.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["job_name", "codec"])]
    pub(crate) codec_table: Option<PathBuf>,
    /// Directory with Fashion-MNIST or MNIST in IDX form, plain or .gz. [default: built-in digits]
    #[arg(long)]
    pub(crate) data: Option<PathBuf>,
    /// Seed of the initial weights and of the batches.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Global step at which training ends.
    #[arg(long, default_value_t = 2000)]
    pub(crate) steps: u64,
    /// Rows in a step. A gradient is of all of them, or with --synchronous A/R of an A-th, rounded
    /// up.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Number of units in the hidden layer.
    #[arg(long, default_value_t = 128)]
    pub(crate) hidden: usize,
    /// Learning rate of Adam.
    #[arg(long, default_value_t = 1e-3)]
    pub(crate) learning_rate: f64,
    // Their headings would hold for the flags behind them.
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
    #[command(flatten)]
    mode: ModeOptions,
    /// What the flags of `mode` choose.
    #[arg(skip)]
    pub(crate) synchronous: Option<Replicas>,
}

impl DigitsOptions {
    /// Parses a command line, and returns the role of this process in its cluster; no role if the
    /// whole cluster runs in it.
    pub(crate) fn parse_with_role(
        line: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<(DigitsOptions, Option<Role>), TaskError> {
        let mut options: DigitsOptions = task::parse(line);
        let role = options.process.role()?;
        let here = options.mode.synchronous.map_or(2, |replicas| replicas.total);
        options.synchronous = options.mode.replicas(task::workers(role.as_ref(), here))?;
        Ok((options, role))
    }

    /// Returns the update mode.
    pub(crate) fn mode(&self) -> Mode {
        self.synchronous.map_or_else(Mode::default, |replicas| replicas.mode().into())
    }

    /// Returns the number of workers of a cluster in one process.
    pub(crate) fn workers(&self) -> u32 {
        self.synchronous.map_or(2, |replicas| replicas.total)
    }

    /// Returns the number of parameters of the network for this dataset.
    pub(crate) fn parameters(&self, split: &Split) -> usize {
        let (inputs, outputs) = (split.train.width, split.train.classes);
        (inputs + 1) * self.hidden + (self.hidden + 1) * outputs
    }

    /// Returns the number of rows in one gradient.
    pub(crate) fn rows(&self) -> usize {
        let gradients = self.synchronous.map_or(1, |replicas| replicas.aggregate);
        self.batch.div_ceil(gradients as usize)
    }
}
