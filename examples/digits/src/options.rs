//! Command line of the example.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use pushpull::training::Codec;
use pushpull::{ClusterSpec, Mode, Synchronous, TaskId};

use super::data::Split;

/// The value of `--synchronous`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replicas {
    /// Number of gradients in a step.
    pub(crate) aggregate: u32,
    /// Number of replicas.
    pub(crate) total: u32,
}

impl FromStr for Replicas {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Replicas, &'static str> {
        let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
        match text.split_once('/').map(|(a, r)| (number(a), number(r))) {
            Some((Some(aggregate), Some(total))) => Ok(Replicas { aggregate, total }),
            _ => Err("expected A/R, two positive integers, such as 3/4"),
        }
    }
}

/// The role of one process of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum JobName {
    /// A parameter server.
    Ps,
    /// A worker.
    Worker,
}

/// Train a small network on handwritten digits over a parameter server.
///
/// Without --job-name the whole cluster runs in this process.
#[derive(Clone, Debug, Parser)]
pub(crate) struct DigitsOptions {
    /// Addresses of the parameter servers, host:port separated by commas.
    #[arg(long, value_delimiter = ',', requires = "job_name")]
    ps_hosts: Vec<String>,
    /// Addresses of the workers, host:port separated by commas. They are only names.
    #[arg(long, value_delimiter = ',', requires = "job_name")]
    worker_hosts: Vec<String>,
    /// Role of this process in the cluster.
    #[arg(long, value_enum, requires_all = ["ps_hosts", "worker_hosts"])]
    job_name: Option<JobName>,
    /// Index of this process within its job.
    #[arg(long, default_value_t = 0)]
    task_index: u32,
    /// Exit a parameter server once all workers have gone.
    #[arg(long)]
    pub(crate) exit_when_done: bool,
    /// Time in seconds that --exit-when-done then waits for another worker.
    #[arg(long, default_value_t = 10)]
    pub(crate) exit_grace: u64,
    /// Allow a parameter server to listen where other machines can reach it, without
    /// authentication.
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Make each step of the mean of A gradients, from R workers: 3/4 takes the three fastest of
    /// four. Without --job-name there are R workers, 2 by default. Give all processes the same
    /// value. A step is made of --batch rows in either mode, so the same number of steps reaches
    /// the same accuracy.
    #[arg(long, value_name = "A/R")]
    pub(crate) synchronous: Option<Replicas>,
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
}

impl DigitsOptions {
    /// Returns the update mode.
    pub(crate) fn mode(&self) -> Mode {
        match self.synchronous {
            None => Mode::default(),
            Some(Replicas { aggregate, total }) => {
                Synchronous::new(aggregate).total_num_replicas(total).into()
            }
        }
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

    /// Returns the role, task and cluster of this process, or `None` for the whole cluster.
    pub(crate) fn job(
        &self,
    ) -> Result<Option<(JobName, TaskId, ClusterSpec)>, pushpull::error::ClusterError> {
        let Some(job) = self.job_name else {
            return Ok(None);
        };
        let cluster = ClusterSpec::builder()
            .job("ps", &self.ps_hosts)
            .job("worker", &self.worker_hosts)
            .build()?;
        let task = match job {
            JobName::Ps => TaskId::ps(self.task_index),
            JobName::Worker => TaskId::worker(self.task_index),
        };
        cluster.task_address(&task.job, task.index)?;
        Ok(Some((job, task, cluster)))
    }
}
