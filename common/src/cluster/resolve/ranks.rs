//! [`Division`]: ranks of a launcher as tasks of jobs. The source `mpi`: launchers that number
//! their processes and tell nobody the addresses.

use super::found::{Found, Outcome};
use super::{ClusterSource, Known, Lookup, ResolveError};
use crate::cluster::ClusterSpec;
use crate::ids::TaskId;
use crate::launch::{Launch, LaunchError, Launcher};

/// The tasks of a job by their ranks: the first are the ps tasks, the others the workers. With
/// `--job-name` and no number of ps tasks all ranks are tasks of that job.
pub(super) struct Division {
    pub(super) num_ps: u32,
    pub(super) task: TaskId,
    /// The job of all ranks, if they are of one.
    pub(super) only_job: Option<String>,
}

impl Division {
    /// Divides the ranks of a launch. `size_variable` has their number.
    pub(super) fn of(
        source: ClusterSource,
        launch: &Launch,
        size_variable: &'static str,
        known: &Known,
    ) -> Result<Division, ResolveError> {
        let size = launch.size();
        let given = known.num_given(TaskId::PS_JOB);
        let given = given.and_then(|given| u32::try_from(given).ok());
        let num_ps = match (known.num_ps, given, &known.job) {
            (Some(num_ps), Some(given), _) if num_ps != given => {
                return Err(ResolveError::Contradiction {
                    first: format!("--num-ps {num_ps}"),
                    second: format!("--ps-hosts of {given} addresses"),
                });
            }
            (Some(num_ps), ..) => num_ps,
            (None, _, Some(job)) => return Division::of_one_job(launch, job),
            (None, Some(given), None) => given,
            (None, None, None) => {
                let purpose = "the number of the first ranks that are ps tasks";
                return Err(ResolveError::Needed { resolver: source, flag: "--num-ps", purpose });
            }
        };
        if num_ps == 0 || num_ps > size {
            return Err(ResolveError::TooFewProcesses { size_variable, size, num_ps });
        }
        if let Some(workers) = known.num_workers.filter(|&workers| workers != size - num_ps) {
            return Err(ResolveError::Contradiction {
                first: format!("--num-workers {workers}"),
                second: format!("{size_variable}={size} and {num_ps} ps tasks"),
            });
        }
        let task = match launch.rank() {
            rank if rank < num_ps => TaskId::ps(rank),
            rank => TaskId::worker(rank - num_ps),
        };
        Ok(Division { num_ps, task, only_job: None })
    }

    fn of_one_job(launch: &Launch, job: &str) -> Result<Division, ResolveError> {
        let num_ps = if job == TaskId::PS_JOB { launch.size() } else { 0 };
        let task = TaskId::new(job, launch.rank());
        Ok(Division { num_ps, task, only_job: Some(job.to_owned()) })
    }
}

/// Returns the launch of this process, if its launcher is one of those.
pub(super) fn launch_of(
    lookup: Lookup<'_>,
    is_wanted: impl Fn(Launcher) -> bool,
) -> Result<Result<Launch, String>, ResolveError> {
    match Launch::from_lookup(lookup) {
        Ok(launch) if is_wanted(launch.launcher()) => Ok(Ok(launch)),
        Ok(launch) => Ok(Err(format!("the rank of this process is one of {}", launch.launcher()))),
        Err(LaunchError::NoLauncher { .. }) => Ok(Err("no variable with a rank is set".to_owned())),
        Err(error) => Err(error.into()),
    }
}

/// Reads a rank of MPI, Horovod or torchrun.
pub(super) fn read(lookup: Lookup<'_>, known: &Known) -> Result<Outcome, ResolveError> {
    let launch = match launch_of(lookup, |launcher| launcher != Launcher::Slurm)? {
        Ok(launch) => launch,
        Err(reason) => return Ok(Outcome::Absent(reason)),
    };
    let launch = match known.parent_process {
        Some(parent) => launch.parent_process(parent),
        None => launch,
    };
    let (rank_variable, size_variable) = variables(launch.launcher());
    let division = Division::of(ClusterSource::Mpi, &launch, size_variable, known)?;
    let mut builder = ClusterSpec::builder();
    if known.num_given(TaskId::PS_JOB).is_none() {
        builder = builder.job(TaskId::PS_JOB, sockets(&launch, &division, known)?);
    }
    if known.num_given("worker").is_none() && division.only_job.is_none() {
        builder = builder.workers(launch.size() - division.num_ps);
    }
    let variable = rank_variable.to_owned();
    let cluster = builder.build().map_err(|cause| ResolveError::Cluster { variable, cause })?;
    Ok(Outcome::Found(Found {
        cluster,
        task: Some((rank_variable, division.task)),
        taken: vec![
            (rank_variable, launch.rank().to_string()),
            (size_variable, launch.size().to_string()),
        ],
    }))
}

/// Returns the Unix sockets of the ps tasks of a job on one host.
fn sockets(
    launch: &Launch,
    division: &Division,
    known: &Known,
) -> Result<Vec<String>, ResolveError> {
    let is_one_host = launch.local_size() == launch.size() && division.num_ps > 0;
    match (&known.socket_folder, launch.job_key()) {
        (Some(folder), Some(key)) if is_one_host => {
            let folder = folder.join(format!("pushpull-{key}"));
            let socket = |index| format!("unix:{}/ps-{index}.sock", folder.display());
            Ok((0..division.num_ps).map(socket).collect())
        }
        _ => Err(ResolveError::NoPeers { resolver: ClusterSource::Mpi, remedy: "--ps-hosts" }),
    }
}

/// Returns the variables with the rank and the size.
fn variables(launcher: Launcher) -> (&'static str, &'static str) {
    match launcher {
        Launcher::OpenMpi => ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        Launcher::Mpich => ("PMI_RANK", "PMI_SIZE"),
        Launcher::Horovod => ("HOROVOD_RANK", "HOROVOD_SIZE"),
        Launcher::Torchrun => ("RANK", "WORLD_SIZE"),
        Launcher::Slurm => ("SLURM_PROCID", "SLURM_NTASKS"),
        Launcher::Pushpull | Launcher::Program => ("PUSHPULL_RANK", "PUSHPULL_SIZE"),
    }
}
