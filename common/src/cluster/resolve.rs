//! The cluster and the task of a process, as its launcher tells them: [`resolve`].
//!
//! A [`ClusterSource`] is a launcher, or a variable that several set. Each has a file of its own and reads
//! environment variables by the lookup of the caller, so the library reads no environment.

mod dmlc;
mod error;
mod found;
mod kubernetes;
mod node_list;
mod ranks;
mod rendezvous_plan;
mod slurm;
mod source;
mod tf_config;
mod tony;
mod union;

pub use error::ResolveError;
pub use node_list::{NodeListProblem, expand_node_list};
pub use rendezvous_plan::{RegisteringTask, RendezvousPlan};
pub use source::{ClusterSource, Resolver};
pub use union::union;

use std::path::PathBuf;

use super::ClusterSpec;
use crate::ids::TaskId;
use found::Outcome;

/// Returns the value of an environment variable.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The knowledge of the caller beside the variables: its flags, or the values of a job file.
///
/// A value of the caller completes what a source tells, and must not contradict it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Known {
    /// Jobs of the cluster, each with the name of the flag that gives them, such as `--ps-hosts`.
    pub jobs: Vec<(&'static str, ClusterSpec)>,
    /// The job of this task, by `--job-name`.
    pub job: Option<String>,
    /// The index of this task, by `--task-index`.
    pub index: Option<u32>,
    /// The number of ps tasks, by `--num-ps`: the first ranks of a launcher that numbers its processes.
    pub num_ps: Option<u32>,
    /// The number of workers, by `--num-workers`.
    pub num_workers: Option<u32>,
    /// The port of the first task on each host, by `--base-port`: 2222.
    pub base_port: u16,
    /// The headless Service and the StatefulSet of the ps tasks in Kubernetes, by `--ps-service`.
    pub ps_service: Option<String>,
    /// The folder for the Unix sockets of the ps tasks, for a job on one host whose launcher tells no
    /// addresses. Its subfolder `pushpull-KEY` is that of the job.
    pub socket_folder: Option<PathBuf>,
    /// The address `host:port` of the rendezvous at which the tasks learn each other's addresses, by
    /// `--rendezvous`.
    pub rendezvous: Option<String>,
    /// The host at which others reach this task, by `--advertise`.
    pub advertised_host: Option<String>,
    /// The stable id of this process at the rendezvous, by `--task-id`, if no launcher numbers it.
    pub task_id: Option<String>,
    /// The parent process of this one, which names the job if its launcher does not.
    pub parent_process: Option<u32>,
}

impl Known {
    /// The default of [`Known::base_port`].
    pub const BASE_PORT: u16 = 2222;

    /// Returns the number of tasks of a job that the caller gives; `None` if it gives no such job.
    fn num_given(&self, job: &str) -> Option<usize> {
        self.jobs.iter().find_map(|(_, jobs)| jobs.num_tasks(job).ok())
    }
}

impl Default for Known {
    fn default() -> Self {
        Known {
            jobs: Vec::new(),
            job: None,
            index: None,
            num_ps: None,
            num_workers: None,
            base_port: Known::BASE_PORT,
            ps_service: None,
            socket_folder: None,
            rendezvous: None,
            advertised_host: None,
            task_id: None,
            parent_process: None,
        }
    }
}

/// The cluster and the task of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resolution {
    /// The jobs. Without a job `worker` the servers accept any worker. Empty before the rendezvous
    /// has told it, if there is one.
    pub cluster: ClusterSpec,
    /// This task, if the source or the caller tells it. An evaluator is no task of the cluster.
    pub task: Option<TaskId>,
    /// The rendezvous that has yet to tell the cluster, and to assign the index of this task if its
    /// source numbers no tasks.
    pub rendezvous: Option<RendezvousPlan>,
    /// The source that was taken.
    pub source: ClusterSource,
    /// The variables that were read, each with its value, clipped.
    pub taken: Vec<(String, String)>,
    /// The sources that were not taken, each with the reason.
    pub passed: Vec<(ClusterSource, String)>,
}

impl Resolution {
    /// Takes the cluster from the rendezvous, and the index that it has assigned.
    #[must_use]
    pub fn gathered(self, cluster: ClusterSpec, index: u32) -> Resolution {
        let own = self.rendezvous.and_then(|plan| plan.task);
        let task = own.map(|own| TaskId::new(&own.job, index)).or(self.task);
        Resolution { cluster, task, rendezvous: None, ..self }
    }
}

/// Finds the cluster and the task of this process.
///
/// [`Resolver::Auto`] takes the first source that is set, in the order of [`ClusterSource::ALL`].
/// `lookup` returns the value of an environment variable.
///
/// ```
/// use pushpull_common::cluster::resolve::{Known, Resolver, resolve};
/// let variable = |name: &str| {
///     (name == "TF_CONFIG").then(|| {
///         r#"{"cluster": {"ps": ["p:2222"], "worker": ["w:2222"]}, "task": {"type": "ps", "index": 0}}"#
///             .to_owned()
///     })
/// };
/// let resolved = resolve(Resolver::Auto, &variable, &Known::default())?;
/// assert_eq!(resolved.cluster.to_string(), "ps=p:2222;worker=w:2222");
/// assert_eq!(resolved.task.map(|task| task.to_string()).as_deref(), Some("/job:ps/task:0"));
/// # Ok::<(), pushpull_common::cluster::resolve::ResolveError>(())
/// ```
///
/// # Errors
/// A variable that is malformed, a source of which only a part is set, and a source that
/// contradicts the caller, each by name; [`ResolveError::NoSource`] if no source is set.
#[doc(alias = "tf.distribute.cluster_resolver")]
pub fn resolve(
    resolver: Resolver,
    lookup: &dyn Fn(&str) -> Option<String>,
    known: &Known,
) -> Result<Resolution, ResolveError> {
    let non_empty = |name: &str| lookup(name).filter(|value| !value.is_empty());
    let lookup: Lookup<'_> = &non_empty;
    let candidates = match resolver {
        Resolver::Auto => &ClusterSource::ALL[..],
        Resolver::Only(ref source) => std::slice::from_ref(source),
    };
    let mut passed = Vec::new();
    for &source in candidates {
        match read(source, lookup, known)? {
            Outcome::Absent(reason) => passed.push((source, reason)),
            Outcome::Found(found) => {
                let rest = candidates.iter().skip(passed.len() + 1);
                for &later in rest {
                    passed.push((later, reason_behind(source, later, lookup, known)));
                }
                return found.complete(source, known, passed);
            }
        }
    }
    match (resolver, passed.pop()) {
        (Resolver::Only(source), Some((_, reason))) => {
            Err(ResolveError::Absent { resolver: source, reason })
        }
        (_, last) => {
            passed.extend(last);
            let reasons = passed.iter().map(|(source, reason)| format!("{source}: {reason}"));
            Err(ResolveError::NoSource { reasons: reasons.collect::<Vec<_>>().join("; ") })
        }
    }
}

fn read(source: ClusterSource, lookup: Lookup<'_>, known: &Known) -> Result<Outcome, ResolveError> {
    match source {
        ClusterSource::Flags => found::flags(known),
        ClusterSource::TfConfig => tf_config::read(lookup),
        ClusterSource::Tony => tony::read(lookup),
        ClusterSource::Dmlc => dmlc::read(lookup, known),
        ClusterSource::Slurm => slurm::read(lookup, known),
        ClusterSource::Mpi => ranks::read(lookup, known),
        ClusterSource::Kubernetes => kubernetes::read(lookup, known),
    }
}

/// Returns why a source was not taken, behind one that was.
fn reason_behind(
    taken: ClusterSource,
    later: ClusterSource,
    lookup: Lookup<'_>,
    known: &Known,
) -> String {
    match read(later, lookup, known) {
        Ok(Outcome::Absent(reason)) => reason,
        Ok(Outcome::Found(_)) => format!("{taken} comes first"),
        Err(error) => format!("{taken} comes first, and: {error}"),
    }
}

#[cfg(test)]
mod tests;
