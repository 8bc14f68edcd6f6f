//! [`TaskOptions`]: the hosts of a cluster, and which of its tasks this process is.

use clap::Args;
use pushpull::error::ClusterError;
use pushpull::{ClusterSpec, TaskId};

/// The four flags of a classic trainer.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct TaskOptions {
    /// Addresses of the ps tasks, host:port or unix:/path, separated by commas
    #[arg(long, aliases = ["ps-host", "ps_host"], value_name = "ADDRESSES", value_delimiter = ',')]
    pub(crate) ps_hosts: Vec<String>,
    /// Addresses of the worker tasks, separated by commas; others are then refused
    #[arg(
        long,
        aliases = ["worker-host", "worker_host"],
        value_name = "ADDRESSES",
        value_delimiter = ','
    )]
    pub(crate) worker_hosts: Vec<String>,
    /// Job of this task
    #[arg(long, value_name = "JOB")]
    pub(crate) job_name: Option<String>,
    /// Index of this task in its job [default: 0]
    #[arg(long, value_name = "INDEX")]
    pub(crate) task_index: Option<u32>,
}

impl TaskOptions {
    /// Returns the index of this task.
    pub(crate) fn index(&self) -> u32 {
        self.task_index.unwrap_or(0)
    }

    /// Returns the task of a process that does not know its place yet, as far as flags tell.
    pub(crate) fn joining_task(&self) -> TaskId {
        TaskId::new(self.job_name.as_deref().unwrap_or("worker"), self.index())
    }

    /// Returns the cluster of these hosts. Without worker hosts it has no job `worker`.
    ///
    /// # Errors
    /// Returns the flag at fault with its error.
    pub(crate) fn cluster(&self) -> Result<ClusterSpec, (&'static str, ClusterError)> {
        let servers = || ClusterSpec::builder().job("ps", &self.ps_hosts);
        let alone = servers().build().map_err(|error| ("--ps-hosts", error))?;
        if self.worker_hosts.is_empty() {
            return Ok(alone);
        }
        let both = servers().job("worker", &self.worker_hosts).build();
        both.map_err(|error| ("--worker-hosts", error))
    }
}
