//! [`Found`]: what a source tells, completed by the values of the caller.

use super::{ClusterSource, Known, RegisteringTask, RendezvousPlan, Resolution, ResolveError};
use crate::cluster::error::clip;
use crate::cluster::{ClusterSpec, ClusterSpecBuilder};
use crate::ids::TaskId;

/// The result of reading a source.
#[derive(Debug)]
pub(super) enum Outcome {
    Found(Found),
    /// The source is not set, with the reason.
    Absent(String),
}

/// The cluster and the task of a source that is set.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The jobs of the cluster.
    pub(super) cluster: ClusterSpec,
    /// This task, with the variable that tells it.
    pub(super) task: Option<(&'static str, TaskId)>,
    /// The rendezvous that tells the cluster, if the source does not.
    pub(super) rendezvous: Option<RendezvousPlan>,
    /// The variables that were read. The first is the one that errors name for the cluster.
    pub(super) taken: Vec<(&'static str, String)>,
}

impl Found {
    /// Adds the values of the caller.
    ///
    /// # Errors
    /// [`ResolveError::Contradiction`], and those of a cluster.
    pub(super) fn complete(
        self,
        source: ClusterSource,
        known: &Known,
        passed: Vec<(ClusterSource, String)>,
    ) -> Result<Resolution, ResolveError> {
        let variable = self.taken.first().map(|(variable, _)| *variable);
        check_addresses(source, self.rendezvous.as_ref(), known)?;
        let cluster = unite(variable, self.cluster, known)?;
        let task = match (&self.rendezvous, &self.task, known.index) {
            // The rendezvous assigns the index.
            (Some(_), None, None) => None,
            _ => complete_task(self.task, known)?,
        };
        if let Some(task) = task.as_ref().filter(|task| is_listed(&cluster, task)) {
            let found = cluster.require(&task.job, task.index);
            let variable = || origins(variable, known);
            found.map_err(|cause| ResolveError::Cluster { variable: variable(), cause })?;
        }
        let taken = self.taken.into_iter();
        let taken = taken.map(|(name, value)| (name.to_owned(), clip(&value))).collect();
        let rendezvous = self.rendezvous;
        Ok(Resolution { cluster, task, rendezvous, source, taken, passed })
    }
}

/// Returns the values of the caller alone, if they name a task of a cluster. A job without an index
/// is left to sources that number their processes.
///
/// # Errors
/// Those of a [`RendezvousPlan`].
pub(super) fn flags(known: &Known) -> Result<Outcome, ResolveError> {
    let given = match known.rendezvous {
        None => [
            ("--ps-hosts", !known.jobs.is_empty()),
            ("--job-name", known.job.is_some()),
            ("--task-index", known.index.is_some()),
        ],
        Some(_) => [
            ("--job-name", known.job.is_some()),
            ("--num-ps", known.num_ps.is_some()),
            ("--num-workers", known.num_workers.is_some()),
        ],
    };
    if let Some((flag, _)) = given.into_iter().find(|(_, is_given)| !is_given) {
        return Ok(Outcome::Absent(format!("{flag} is not given")));
    }
    let (Some(address), Some(job)) = (&known.rendezvous, &known.job) else {
        return Ok(Outcome::Found(Found::default()));
    };
    let counts = (known.num_ps.unwrap_or(0), known.num_workers.unwrap_or(0));
    let plan = RendezvousPlan::new("--rendezvous", address, counts)?;
    let plan = plan.registering(RegisteringTask::new(job, known.index, known).port(0));
    Ok(Outcome::Found(Found { rendezvous: Some(plan), ..Found::default() }))
}

/// Checks that a rendezvous tells the whole cluster, and that one that a flag names is used.
fn check_addresses(
    source: ClusterSource,
    plan: Option<&RendezvousPlan>,
    known: &Known,
) -> Result<(), ResolveError> {
    let contradiction = |first, second| Err(ResolveError::Contradiction { first, second });
    match (plan, known.jobs.first(), &known.rendezvous) {
        (Some(plan), Some((flag, _)), _) => {
            let second = format!("the rendezvous {}, which gathers all addresses", plan.address);
            contradiction((*flag).to_owned(), second)
        }
        (None, given, Some(address)) => {
            let origin = given.map_or(source.name(), |(flag, _)| flag);
            let second = format!("{origin}, which tells the addresses");
            contradiction(format!("--rendezvous {}", clip(address)), second)
        }
        _ => Ok(()),
    }
}

/// Whether the cluster must have the task: its job is one of the cluster.
fn is_listed(cluster: &ClusterSpec, task: &TaskId) -> bool {
    cluster.jobs().any(|job| *job == *task.job)
}

/// Adds the jobs of the caller to those of a source.
fn unite(
    variable: Option<&str>,
    found: ClusterSpec,
    known: &Known,
) -> Result<ClusterSpec, ResolveError> {
    let mut builder = add_jobs(ClusterSpec::builder(), &found, |_| true);
    for (flag, given) in &known.jobs {
        for job in given.jobs() {
            let theirs = found.jobs().any(|found| found == job).then(|| one_job(&found, job));
            let ours = one_job(given, job);
            if let Some(theirs) = theirs.filter(|theirs| *theirs != ours) {
                return Err(ResolveError::Contradiction {
                    first: format!("{flag} ({})", clip(&ours)),
                    second: format!("{} ({})", variable.unwrap_or_default(), clip(&theirs)),
                });
            }
        }
        builder = add_jobs(builder, given, |job| !found.jobs().any(|found| found == job));
    }
    let variable = || origins(variable, known);
    builder.build().map_err(|cause| ResolveError::Cluster { variable: variable(), cause })
}

/// Returns the names of the variable and the flags that give the jobs.
fn origins(variable: Option<&str>, known: &Known) -> String {
    let flags = known.jobs.iter().map(|(flag, _)| *flag);
    flags.chain(variable).collect::<Vec<_>>().join(" and ")
}

/// Adds the chosen jobs of a cluster to a builder.
fn add_jobs(
    builder: ClusterSpecBuilder,
    cluster: &ClusterSpec,
    is_chosen: impl Fn(&str) -> bool,
) -> ClusterSpecBuilder {
    cluster.jobs().filter(|job| is_chosen(job)).fold(builder, |builder, job| {
        let tasks = cluster.tasks().filter(|(task, _)| *task.job == *job);
        builder.sparse_job(job, tasks.map(|(task, address)| (task.index, address)))
    })
}

/// Formats one job of a cluster.
fn one_job(cluster: &ClusterSpec, job: &str) -> String {
    let alone = add_jobs(ClusterSpec::builder(), cluster, |name| name == job).build();
    alone.map_or_else(|error| error.to_string(), |alone| alone.to_string())
}

/// Returns this task by the source and the caller, who must agree.
fn complete_task(
    found: Option<(&'static str, TaskId)>,
    known: &Known,
) -> Result<Option<TaskId>, ResolveError> {
    let Some((variable, task)) = found else {
        let index = known.index.unwrap_or(0);
        return Ok(known.job.as_ref().map(|job| TaskId::new(job, index)));
    };
    let contradiction = |first: String| ResolveError::Contradiction {
        first,
        second: format!("{variable}, by which this is {task}"),
    };
    if let Some(job) = known.job.as_ref().filter(|job| ***job != *task.job) {
        return Err(contradiction(format!("--job-name {}", clip(job))));
    }
    match known.index.filter(|&index| index != task.index) {
        Some(index) => Err(contradiction(format!("--task-index {index}"))),
        None => Ok(Some(task)),
    }
}
