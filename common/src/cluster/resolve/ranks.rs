//! [`Division`]: ranks of a launcher as tasks of jobs. The source `mpi`: launchers that number
//! their processes and tell nobody the addresses.

use super::found::{Found, Outcome};
use super::{ClusterSource, Known, Lookup, RegisteringTask, RendezvousPlan, ResolveError};
use crate::cluster::ClusterSpec;
use crate::ids::TaskId;
use crate::launch::{Launch, LaunchError, Launcher, RENDEZVOUS};

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
    let taken = vec![
        (rank_variable, launch.rank().to_string()),
        (size_variable, launch.size().to_string()),
    ];
    let task = Some((rank_variable, division.task.clone()));
    let mut builder = ClusterSpec::builder();
    if known.num_given(TaskId::PS_JOB).is_none() {
        match (rendezvous(lookup, &launch, known), sockets(&launch, &division, known)) {
            (Some((_, false)), Some(sockets)) | (None, Some(sockets)) => {
                builder = builder.job(TaskId::PS_JOB, sockets);
            }
            (Some((address, _)), _) if division.num_ps > 0 => {
                let plan = plan(address, &launch, &division, known)?;
                let cluster = ClusterSpec::default();
                let rendezvous = Some(plan);
                return Ok(Outcome::Found(Found { cluster, task, rendezvous, taken }));
            }
            _ => {
                let remedy = "--rendezvous or --ps-hosts";
                return Err(ResolveError::NoPeers { resolver: ClusterSource::Mpi, remedy });
            }
        }
    }
    if known.num_given("worker").is_none() && division.only_job.is_none() {
        builder = builder.workers(launch.size() - division.num_ps);
    }
    let variable = rank_variable.to_owned();
    let cluster = builder.build().map_err(|cause| ResolveError::Cluster { variable, cause })?;
    Ok(Outcome::Found(Found { cluster, task, rendezvous: None, taken }))
}

/// Returns the Unix sockets of the ps tasks of a job, if it is on one host.
fn sockets(launch: &Launch, division: &Division, known: &Known) -> Option<Vec<String>> {
    let is_one_host = launch.local_size() == launch.size() && division.num_ps > 0;
    let key = launch.job_key().filter(|_| is_one_host)?;
    let folder = known.socket_folder.as_ref()?.join(format!("pushpull-{key}"));
    let socket = |index| format!("unix:{}/ps-{index}.sock", folder.display());
    Some((0..division.num_ps).map(socket).collect())
}

/// Returns the address of the rendezvous, and whether a flag or a variable of pushpull asks for it:
/// other launchers pass one to jobs on one host, too.
fn rendezvous<'a>(
    lookup: Lookup<'_>,
    launch: &'a Launch,
    known: &'a Known,
) -> Option<(&'a str, bool)> {
    let flag = known.rendezvous.as_deref().map(|address| (address, true));
    flag.or_else(|| Some((launch.rendezvous()?, lookup(RENDEZVOUS).is_some())))
}

/// Returns what a rank does at the rendezvous, which rank 0 serves.
fn plan(
    address: &str,
    launch: &Launch,
    division: &Division,
    known: &Known,
) -> Result<RendezvousPlan, ResolveError> {
    let (base, local) = (known.base_port, launch.local_rank());
    let port = u16::try_from(local).ok().and_then(|local| base.checked_add(local));
    let port = port.ok_or(ResolveError::Port { host: "this host".to_owned(), local, base })?;
    let workers = launch.size().saturating_sub(division.num_ps);
    let plan = RendezvousPlan::new("--rendezvous", address, (division.num_ps, workers))?;
    let TaskId { job, index } = &division.task;
    let task = RegisteringTask::new(job, Some(*index), known).port(port);
    Ok(plan.here(launch.rank() == 0).registering(task))
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
