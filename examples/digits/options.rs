//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use pushpull::{ClusterSpec, Codec, Mode, TaskId};

use super::data::Split;

/// Synchronous steps: of the gradients of how many replicas each is made, and of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replicas {
    /// Gradients that make a step.
    pub(crate) aggregate: u32,
    /// Replicas there are.
    pub(crate) total: u32,
}

impl FromStr for Replicas {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Replicas, &'static str> {
        let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
        match text.split_once('/').map(|(a, r)| (number(a), number(r))) {
            Some((Some(aggregate), Some(total))) => Ok(Replicas { aggregate, total }),
            _ => Err("expected A/R, two whole numbers from 1 on, such as 3/4"),
        }
    }
}

/// The role of one process of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Job {
    /// A parameter server.
    Ps,
    /// A worker.
    Worker,
}

/// Trains a small network on handwritten digits over a parameter server.
///
/// Without --job-name the whole cluster runs in this process.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// The addresses of the parameter servers, host:port separated by commas.
    #[arg(long, value_delimiter = ',', requires = "job_name")]
    ps_hosts: Vec<String>,
    /// The addresses of the workers, host:port separated by commas; they are only names.
    #[arg(long, value_delimiter = ',', requires = "job_name")]
    worker_hosts: Vec<String>,
    /// The role of this process in the cluster.
    #[arg(long, value_enum, requires_all = ["ps_hosts", "worker_hosts"])]
    job_name: Option<Job>,
    /// The index of this process among those of its job.
    #[arg(long, default_value_t = 0)]
    task_index: u32,
    /// Ends a parameter server once all workers are gone.
    #[arg(long)]
    pub(crate) exit_when_done: bool,
    /// How many seconds a parameter server then still waits for another worker.
    #[arg(long, default_value_t = 10)]
    pub(crate) exit_grace: u64,
    /// Lets a parameter server listen where other machines can reach it, without authentication.
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Makes each step of the gradients of A workers of R: 3/4 takes the three fastest of four. Without
    /// --job-name there are R workers then, and 2 otherwise. Every process must be given the same. A
    /// step is made of --batch rows in either mode, so as many steps come to the same accuracy.
    #[arg(long, value_name = "A/R")]
    pub(crate) synchronous: Option<Replicas>,
    /// Encodes the gradients on their way: f16, bf16, int8, onebit, topk(FRACTION) or
    /// threshold(MAGNITUDE). What that leaves out is added to the next ones.
    #[arg(long)]
    pub(crate) codec: Option<Codec>,
    /// Trains in this process with each codec, and three seeds, and writes a table of what came of it
    /// into this document, between its marks; of --data, or of the digits.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["job_name", "codec"])]
    pub(crate) codec_table: Option<PathBuf>,
    /// A directory with Fashion-MNIST or MNIST in IDX form, plain or .gz.
    #[arg(long)]
    pub(crate) data: Option<PathBuf>,
    /// The seed of the first weights and of the batches.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The global step at which training ends.
    #[arg(long, default_value_t = 2000)]
    pub(crate) steps: u64,
    /// Rows that a step is made of. A worker's gradient is of all of them, or with --synchronous A/R of
    /// an A-th, rounded up.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Units in the hidden layer.
    #[arg(long, default_value_t = 128)]
    pub(crate) hidden: usize,
    /// Adam's learning rate.
    #[arg(long, default_value_t = 1e-3)]
    pub(crate) learning_rate: f64,
}

impl Options {
    /// How updates are taken.
    pub(crate) fn mode(&self) -> Mode {
        match self.synchronous {
            None => Mode::Asynchronous,
            Some(Replicas { aggregate, total }) => {
                Mode::Synchronous { replicas_to_aggregate: aggregate, total_num_replicas: total }
            }
        }
    }

    /// Workers of a cluster in one process.
    pub(crate) fn workers(&self) -> u32 {
        self.synchronous.map_or(2, |replicas| replicas.total)
    }

    /// Parameters of the network for these data.
    pub(crate) fn parameters(&self, split: &Split) -> usize {
        let (inputs, outputs) = (split.train.width, split.train.classes);
        (inputs + 1) * self.hidden + (self.hidden + 1) * outputs
    }

    /// Rows that one gradient is of.
    pub(crate) fn rows(&self) -> usize {
        let gradients = self.synchronous.map_or(1, |replicas| replicas.aggregate);
        self.batch.div_ceil(gradients as usize)
    }

    /// The task this process is to run, and its cluster; `None` for the whole cluster.
    pub(crate) fn job(&self) -> Result<Option<(Job, TaskId, ClusterSpec)>, pushpull::ClusterError> {
        let Some(job) = self.job_name else {
            return Ok(None);
        };
        let cluster = ClusterSpec::builder()
            .job("ps", &self.ps_hosts)
            .job("worker", &self.worker_hosts)
            .build()?;
        let task = match job {
            Job::Ps => TaskId::ps(self.task_index),
            Job::Worker => TaskId::worker(self.task_index),
        };
        cluster.task_address(&task.job, task.index)?;
        Ok(Some((job, task, cluster)))
    }
}
