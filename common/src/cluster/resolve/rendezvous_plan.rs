//! [`RendezvousPlan`]: the rendezvous at which a process learns its cluster, and what it registers.

use super::{Known, ResolveError};
use crate::cluster::ClusterSize;
use crate::launch::check_rendezvous;

/// The rendezvous at which a process learns its cluster, since no variable tells it. The program
/// carries the plan out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RendezvousPlan {
    /// The address `host:port` of the rendezvous.
    pub address: String,
    /// The numbers of tasks, on which all processes agree.
    pub size: ClusterSize,
    /// Whether this process serves the rendezvous.
    pub is_here: bool,
    /// The task to register. `None` for a process that only serves the rendezvous.
    pub task: Option<RegisteringTask>,
}

/// The part of a task that its process knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegisteringTask {
    /// The job: `ps` or `worker`.
    pub job: String,
    /// The index, if the launcher numbers the tasks. Otherwise the rendezvous assigns one.
    pub index: Option<u32>,
    /// The stable id of a process without an index. Without either it takes any free index.
    pub id: Option<String>,
    /// The port at which the task listens, 0 for any free one; `None` if nobody connects to it.
    pub port: Option<u16>,
    /// The host at which others reach the task. `None` for the address of this host in the network of
    /// the rendezvous.
    pub host: Option<String>,
}

impl RendezvousPlan {
    /// Creates the plan of a process that does nothing yet. `origin` names the flag or the variables
    /// with the address, and `counts` are those of ps tasks and workers.
    ///
    /// # Errors
    /// [`ResolveError::Launch`] for an address that is not `host:port`, and [`ResolveError::Cluster`]
    /// for counts that no rendezvous gathers.
    pub(super) fn new(
        origin: &'static str,
        address: &str,
        (num_ps, num_workers): (u32, u32),
    ) -> Result<RendezvousPlan, ResolveError> {
        let address = check_rendezvous(origin, address.to_owned())?;
        let size = ClusterSize::new(num_ps, num_workers)
            .map_err(|cause| ResolveError::Cluster { variable: origin.to_owned(), cause })?;
        Ok(RendezvousPlan { address, size, is_here: false, task: None })
    }

    /// Makes the process serve the rendezvous.
    pub(super) fn here(self, is_here: bool) -> RendezvousPlan {
        RendezvousPlan { is_here, ..self }
    }

    /// Makes the process register a task.
    pub(super) fn registering(self, task: RegisteringTask) -> RendezvousPlan {
        RendezvousPlan { task: Some(task), ..self }
    }
}

impl RegisteringTask {
    /// Creates a task of a job with an index, with the stable id of the caller, or with neither.
    pub(super) fn new(job: &str, index: Option<u32>, known: &Known) -> RegisteringTask {
        RegisteringTask {
            job: job.to_owned(),
            index,
            id: known.task_id.clone(),
            port: None,
            host: known.advertised_host.clone(),
        }
    }

    /// Gives the task a port, if it is a ps task: nobody connects to a worker.
    pub(super) fn port(self, port: u16) -> RegisteringTask {
        let is_ps = self.job == crate::ids::TaskId::PS_JOB;
        RegisteringTask { port: is_ps.then_some(port), ..self }
    }

    /// Gives the task a host, unless the caller advertises one.
    pub(super) fn on_host(self, host: Option<String>) -> RegisteringTask {
        RegisteringTask { host: self.host.or(host), ..self }
    }
}
