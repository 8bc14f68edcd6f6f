//! [`Launch`]: the rank of a process and the size of its job, as the launcher passes them.

mod error;
mod job_key;
mod launcher;
mod place;
mod rendezvous;
mod rows;
mod slurm;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod variable_table;

pub use error::LaunchError;
pub use launcher::Launcher;

pub(crate) use place::number;
pub(crate) use rendezvous::{
    VARIABLE as RENDEZVOUS, check as check_rendezvous, join as join_address,
};
pub(crate) use slurm::task_runs;

use job_key::job_key;
use place::Place;
use rows::Row;
use slurm::SlurmStep;

/// The place of a process in a launched job.
///
/// A launcher starts the processes of a job and passes each its place in environment variables.
/// The library reads no environment: the program passes the lookup.
///
/// ```no_run
/// # use pushpull_common::launch::{Launch, LaunchError};
/// let launch = match Launch::from_lookup(|name| std::env::var(name).ok()) {
///     Err(LaunchError::NoLauncher { .. }) => Launch::new(0, 1)?,
///     launch => launch?,
/// };
/// let launch = launch.parent_process(std::os::unix::process::parent_id());
/// # Ok::<(), LaunchError>(())
/// ```
///
/// # The variables
///
/// | launcher | rank, size | local rank, local size | job |
/// | --- | --- | --- | --- |
/// | pushpull | `PUSHPULL_RANK`, `PUSHPULL_SIZE` | `PUSHPULL_LOCAL_RANK`, `PUSHPULL_LOCAL_SIZE` | parent process |
/// | Open MPI 4 and 5 | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` | `PMIX_NAMESPACE` |
/// | MPICH | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | parent process |
/// | Horovod | `HOROVOD_RANK`, `HOROVOD_SIZE` | `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE` | `HOROVOD_GLOO_RENDEZVOUS_ADDR`, `HOROVOD_GLOO_RENDEZVOUS_PORT` |
/// | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
/// | Slurm | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` with `SLURM_NODEID` | `SLURM_JOB_ID`, `SLURM_STEP_ID` |
///
/// The first row whose rank is set gives the place. Its size must be set as well. The variables of
/// the local rank and of the job may be missing. A size without a rank is an error, apart from
/// `WORLD_SIZE` beside another launcher: job scripts export it for all processes.
///
/// # Launchers inside launchers
///
/// - Rows that are set must agree in rank and size, apart from Slurm's.
/// - Slurm's row is read only if no other rank is set. Under Slurm, `mpirun` starts its daemons with
///   `srun`, so each rank inherits the `SLURM_PROCID` of a daemon.
/// - `srun --mpi=pmi2` sets `PMI_RANK`, and `srun --mpi=pmix` sets `PMIX_RANK`. They belong to
///   Slurm's row, and must agree with it if `PMI_JOBID` or `PMIX_NAMESPACE` names the same step.
///   MPICH's `mpiexec` differs from them by `MPI_LOCALRANKID`.
/// - Only a step of a Slurm job has ranks. The batch script and the shell of `salloc` have none,
///   though Slurm sets `SLURM_PROCID` and `SLURM_NTASKS` in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    place: Place,
    launcher: Launcher,
    job_key: Option<String>,
    rendezvous: Option<String>,
}

impl Launch {
    /// The longest job key in bytes.
    pub const JOB_KEY_BYTES_MAX: usize = job_key::JOB_KEY_BYTES_MAX;

    /// Reads the place of this process from the variables of its launcher.
    ///
    /// `lookup` returns the value of an environment variable. Returns
    /// [`LaunchError::NoLauncher`] if no rank is set: the program was started alone.
    #[doc(alias = "hvd.init")]
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Launch, LaunchError> {
        let lookup: Lookup<'_> = &lookup;
        let step = SlurmStep::read(lookup);
        let found = rows::find(lookup, step.as_ref())?;
        let (row, place) = match (found, &step) {
            (Some((row, place)), _) => (row, place),
            (None, Some(step)) => {
                let place = step.place(lookup)?.ok_or_else(no_launcher)?;
                (&Row::SLURM, place)
            }
            (None, None) => {
                slurm::check_alone(lookup)?;
                return Err(no_launcher());
            }
        };
        let id = match row.launcher {
            Launcher::Slurm => step.map(|step| step.attempt_id()),
            _ => row.job_id(lookup),
        };
        Ok(Launch {
            place,
            launcher: row.launcher,
            job_key: id.map(|id| job_key(row.launcher, &id)),
            rendezvous: rendezvous::read(lookup, row.launcher)?,
        })
    }

    /// Creates the place `rank` of `size` without a launcher.
    pub fn new(rank: u32, size: u32) -> Result<Launch, LaunchError> {
        let place = Place::new(("rank", rank), ("size", size))?;
        Ok(Launch { place, launcher: Launcher::Program, job_key: None, rendezvous: None })
    }

    /// Takes the parent process as the job, if the launcher passes no id of the job.
    ///
    /// The ranks that one parent started on a host get the same job key. A shell between the
    /// launcher and the program is a parent of its own for each rank: start the program with `exec`.
    #[must_use]
    pub fn parent_process(mut self, id: u32) -> Launch {
        let launcher = self.launcher;
        self.job_key.get_or_insert_with(|| job_key(launcher, &format!("parent-{id}")));
        self
    }

    /// Returns the number of this process in the job, from 0.
    #[doc(alias = "hvd.rank")]
    pub fn rank(&self) -> u32 {
        self.place.rank
    }

    /// Returns the number of processes of the job.
    #[doc(alias = "hvd.size")]
    pub fn size(&self) -> u32 {
        self.place.size
    }

    /// Returns the number of this process among those of its host, from 0.
    ///
    /// The order on a host need not be that of the ranks. Returns the rank if the launcher passes
    /// no local rank, as if the job had one host.
    #[doc(alias = "hvd.local_rank")]
    pub fn local_rank(&self) -> u32 {
        self.place.local_rank.unwrap_or(self.place.rank)
    }

    /// Returns the number of processes of the job on this host.
    ///
    /// Returns the size of the job if the launcher passes no local size.
    #[doc(alias = "hvd.local_size")]
    pub fn local_size(&self) -> u32 {
        self.place.local_size.unwrap_or(self.place.size)
    }

    /// Returns the source of the place.
    pub fn launcher(&self) -> Launcher {
        self.launcher
    }

    /// Returns the unique id of the job on this host: the name of the private folder in which its
    /// ranks meet.
    ///
    /// The key is a safe file name: ASCII letters, digits, `.`, `_` and `-`, at most
    /// [`JOB_KEY_BYTES_MAX`](Self::JOB_KEY_BYTES_MAX) bytes, beginning with the launcher. An id with
    /// other characters, or a longer one, ends in its SHA-256.
    pub fn job_key(&self) -> Option<&str> {
        self.job_key.as_deref()
    }

    /// Returns the address `host:port` at which ranks of several hosts meet.
    ///
    /// The variable is `PUSHPULL_RENDEZVOUS`. Without it, processes whose rank is `RANK` meet at
    /// `MASTER_ADDR` and `MASTER_PORT`, unless an agent of torchrun listens there.
    pub fn rendezvous(&self) -> Option<&str> {
        self.rendezvous.as_deref()
    }
}

/// Returns the value of an environment variable.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

fn no_launcher() -> LaunchError {
    let ranks: Vec<&str> = rows::ROWS.iter().map(|row| row.rank).collect();
    LaunchError::NoLauncher { variables: ranks.join(", ") }
}
