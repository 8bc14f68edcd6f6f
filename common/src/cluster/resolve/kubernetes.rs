//! The source `kubernetes`: the names of pods in a StatefulSet, an Indexed Job or a JobSet.
//!
//! Kubernetes tells a pod no peers, but names pods by rules. Pod 1 of the StatefulSet `train-ps`
//! under the headless Service `train-ps` is `train-ps-1.train-ps`. Pod 1 of the replicated job `ps`
//! of the JobSet `train` is `train-ps-0-1.train`.

use super::found::{Found, Outcome};
use super::{ClusterSource, Known, Lookup, ResolveError};
use crate::cluster::ClusterSpec;
use crate::cluster::error::clip;
use crate::ids::TaskId;
use crate::launch::number;

const SERVICE: &str = "KUBERNETES_SERVICE_HOST";
const POD: &str = "HOSTNAME";
const COMPLETION_INDEX: &str = "JOB_COMPLETION_INDEX";

/// Reads the name of this pod, and derives the names of the pods with ps tasks.
///
/// The last part of the name of a workload is its job: `train-ps` has ps tasks. The pods of an
/// Indexed Job with another name are workers.
#[doc(alias = "tf.distribute.cluster_resolver.KubernetesClusterResolver")]
pub(super) fn read(lookup: Lookup<'_>, known: &Known) -> Result<Outcome, ResolveError> {
    let Some(_) = lookup(SERVICE) else {
        return Ok(Outcome::Absent(format!("{SERVICE} is not set")));
    };
    let half_set = |missing| {
        let value = lookup(SERVICE).unwrap_or_default();
        ResolveError::HalfSet { variable: SERVICE, value: clip(&value), missing }
    };
    let name = lookup(POD).ok_or_else(|| half_set(POD))?;
    let completion = number(lookup, COMPLETION_INDEX)?.map(|(_, index)| index);
    let Some(pod) = PodName::read(&name, completion)? else {
        let reason =
            format!("{POD}={} has no number, and {COMPLETION_INDEX} is not set", clip(&name));
        return Ok(Outcome::Absent(reason));
    };
    let job = pod.job_of(known)?;
    let mut builder = ClusterSpec::builder();
    if known.num_given(TaskId::PS_JOB).is_none() {
        builder = builder.job(TaskId::PS_JOB, pod.servers(&job, known)?);
    }
    if let Some(workers) = known.num_workers.filter(|_| known.num_given("worker").is_none()) {
        builder = builder.workers(workers);
    }
    let variable = POD.to_owned();
    let cluster = builder.build().map_err(|cause| ResolveError::Cluster { variable, cause })?;
    pod.check_index(&name, &job, known)?;
    let index = (pod.index_variable, pod.index.to_string());
    let task = TaskId::new(&job, pod.index);
    let mut taken = vec![(POD, name.clone())];
    taken.extend((pod.index_variable != POD).then_some(index));
    let task = Some((pod.index_variable, task));
    Ok(Outcome::Found(Found { cluster, task, rendezvous: None, taken }))
}

/// The parts of a pod's name.
struct PodName<'a> {
    /// The name of the StatefulSet or the Job.
    workload: &'a str,
    /// The JobSet and the replicated job, if the Job is one of a JobSet.
    replicated: Option<(&'a str, &'a str)>,
    index: u32,
    index_variable: &'static str,
    is_job: bool,
}

impl<'a> PodName<'a> {
    /// Reads a name that ends in an index; `None` if it has none, as in a Deployment.
    fn read(name: &'a str, completion: Option<u32>) -> Result<Option<PodName<'a>>, ResolveError> {
        let numbered = split_number(name);
        let Some(completion) = completion else {
            return Ok(numbered.map(|(workload, index)| PodName {
                workload,
                replicated: None,
                index,
                index_variable: POD,
                is_job: false,
            }));
        };
        // A pod of a Job may have a host name of its own.
        let workload = match numbered {
            Some((workload, index)) if index == completion => workload,
            Some((_, index)) => {
                return Err(ResolveError::Contradiction {
                    first: format!("{POD}={}, number {index}", clip(name)),
                    second: format!("{COMPLETION_INDEX}={completion}"),
                });
            }
            None => name,
        };
        let replicated = split_number(workload)
            .and_then(|(job, number)| (number == 0).then(|| job.rsplit_once('-')).flatten());
        Ok(Some(PodName {
            workload,
            replicated: replicated.filter(|(_, job)| JOBS.contains(job)),
            index: completion,
            index_variable: COMPLETION_INDEX,
            is_job: true,
        }))
    }

    /// Returns the job of the cluster that this pod is a task of.
    fn job_of(&self, known: &Known) -> Result<String, ResolveError> {
        let last = match self.replicated {
            Some((_, job)) => job,
            None => self.workload.rsplit_once('-').map_or(self.workload, |(_, last)| last),
        };
        match (&known.job, JOBS.contains(&last)) {
            (Some(job), _) => Ok(job.clone()),
            (None, true) => Ok(last.to_owned()),
            (None, false) if self.is_job => Ok("worker".to_owned()),
            (None, false) => Err(ResolveError::Needed {
                resolver: ClusterSource::Kubernetes,
                flag: "--job-name",
                purpose: "because the name of the StatefulSet ends in no job, such as -ps",
            }),
        }
    }

    /// Returns the addresses of the ps tasks.
    fn servers(&self, job: &str, known: &Known) -> Result<Vec<String>, ResolveError> {
        let needed = |flag, purpose| ResolveError::Needed {
            resolver: ClusterSource::Kubernetes,
            flag,
            purpose,
        };
        let is_ps = job == TaskId::PS_JOB;
        let (pods, service) = match (self.replicated, &known.ps_service) {
            (Some((set, _)), service) => {
                (format!("{set}-{}-0", TaskId::PS_JOB), service.as_deref().unwrap_or(set))
            }
            (None, Some(service)) if is_ps => (self.workload.to_owned(), &**service),
            (None, None) if is_ps => (self.workload.to_owned(), self.workload),
            (None, Some(service)) => (service.clone(), &**service),
            (None, None) => {
                let purpose = "the StatefulSet and the headless Service of the ps tasks";
                return Err(needed("--ps-service", purpose));
            }
        };
        let count = known.num_ps.ok_or_else(|| needed("--num-ps", "the number of ps tasks"))?;
        // One more than a job may have is enough for the cluster to be refused.
        let count = count.min(ClusterSpec::TASKS_MAX as u32 + 1);
        let port = known.base_port;
        Ok((0..count).map(|index| format!("{pods}-{index}.{service}:{port}")).collect())
    }

    /// Checks the index of this pod against the number of tasks by the caller.
    fn check_index(&self, name: &str, job: &str, known: &Known) -> Result<(), ResolveError> {
        let (count, flag) = match job {
            TaskId::PS_JOB => (known.num_ps, "--num-ps"),
            "worker" => (known.num_workers, "--num-workers"),
            _ => return Ok(()),
        };
        match count.filter(|&count| self.index >= count) {
            None => Ok(()),
            Some(tasks) => Err(ResolveError::IndexTooHigh {
                variable: self.index_variable,
                value: if self.is_job { self.index.to_string() } else { clip(name) },
                job: job.to_owned(),
                tasks,
                flag,
            }),
        }
    }
}

/// Splits a name such as `train-ps-1` before its number.
fn split_number(name: &str) -> Option<(&str, u32)> {
    let (rest, number) = name.rsplit_once('-')?;
    let is_plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    Some((rest, number.parse().ok().filter(|_| is_plain && !rest.is_empty())?))
}

/// The names by which the end of a workload's name is its job.
const JOBS: [&str; 4] = [TaskId::PS_JOB, "worker", "chief", "evaluator"];
