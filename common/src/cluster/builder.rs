//! [`ClusterSpecBuilder`]: collects jobs and validates them in `build`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::address::{canonical, without_scheme};
use super::error::clip;
use super::{AddressProblem, ClusterError, ClusterSpec, Job, is_job_name};
use crate::ids::TaskId;

/// Collects the jobs of a cluster. Only [`ClusterSpecBuilder::build`] validates, so calls chain.
#[derive(Clone, Debug, Default)]
pub struct ClusterSpecBuilder {
    jobs: Vec<(String, Vec<(u32, String)>)>,
}

impl ClusterSpecBuilder {
    /// Adds a job whose tasks are numbered from 0 in the order of their addresses.
    pub fn job(
        self,
        name: impl Into<String>,
        addresses: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        self.sparse_job(name, (0u32..).zip(addresses))
    }

    /// Adds the job `worker` with this number of tasks, without addresses: nothing connects to a
    /// worker.
    pub fn workers(self, count: u32) -> Self {
        self.job("worker", (0..count).map(|_| ClusterSpec::NO_ADDRESS))
    }

    /// Adds a job whose tasks have explicit indices, in any order.
    pub fn sparse_job(
        mut self,
        name: impl Into<String>,
        tasks: impl IntoIterator<Item = (u32, impl Into<String>)>,
    ) -> Self {
        // One task over the limit is enough for `build` to fail, even if the iterator is endless.
        let tasks = tasks.into_iter().take(ClusterSpec::TASKS_MAX + 1);
        self.jobs.push((name.into(), tasks.map(|(index, a)| (index, a.into())).collect()));
        self
    }

    /// Validates all jobs and returns the cluster. The error names the first task at fault.
    pub fn build(self) -> Result<ClusterSpec, ClusterError> {
        if self.jobs.len() > ClusterSpec::JOBS_MAX {
            return Err(ClusterError::TooManyJobs { jobs: self.jobs.len() });
        }
        let mut jobs = BTreeMap::new();
        let mut owners = BTreeMap::new();
        for (name, tasks) in self.jobs {
            if !is_job_name(&name) {
                return Err(ClusterError::JobName { job: clip(&name) });
            }
            let name: Arc<str> = name.into();
            let job = check_job(&name, tasks, &mut owners)?;
            if jobs.insert(name.clone(), job).is_some() {
                return Err(ClusterError::DuplicateJob { job: name.to_string() });
            }
        }
        check_size(&jobs)?;
        Ok(ClusterSpec { jobs })
    }
}

fn check_job(
    name: &Arc<str>,
    tasks: Vec<(u32, String)>,
    owners: &mut BTreeMap<String, TaskId>,
) -> Result<Job, ClusterError> {
    if tasks.len() > ClusterSpec::TASKS_MAX {
        return Err(ClusterError::TooManyTasks { job: name.to_string() });
    }
    let mut job = Job::new();
    for (index, address) in tasks {
        let address = without_scheme(&address);
        if index >= ClusterSpec::INDEX_LIMIT {
            return Err(ClusterError::Index { job: name.to_string(), index: index.to_string() });
        }
        let task = TaskId { job: name.clone(), index };
        let key = match address {
            ClusterSpec::NO_ADDRESS if *task.job == *TaskId::PS_JOB => Err(AddressProblem::Absent),
            ClusterSpec::NO_ADDRESS => Ok(None),
            address => canonical(address).map(Some),
        };
        let key = match key {
            Ok(key) => key,
            Err(problem) => {
                return Err(ClusterError::Address { task, address: clip(address), problem });
            }
        };
        // Check the index first: a task that is listed twice often has the same address twice, and
        // the duplicate index is the better error.
        if job.insert(index, address.into()).is_some() {
            return Err(ClusterError::DuplicateIndex { task });
        }
        if let Some(first) = key.and_then(|key| owners.insert(key, task.clone())) {
            let address = address.to_owned();
            return Err(ClusterError::DuplicateAddress { address, first, second: task });
        }
    }
    Ok(job)
}

/// Bounds the size of both text forms, so that every accepted cluster can be read back.
fn check_size(jobs: &BTreeMap<Arc<str>, Job>) -> Result<(), ClusterError> {
    // A JSON task is at most `"1048575":"ADDRESS",`, a JSON job `"NAME":{},`.
    let tasks = |job: &Job| job.values().map(|address| address.len() + 13).sum::<usize>();
    let bytes = 2 + jobs.iter().map(|(name, job)| name.len() + 6 + tasks(job)).sum::<usize>();
    match bytes <= ClusterSpec::TEXT_BYTES_MAX {
        true => Ok(()),
        false => Err(ClusterError::TooLong { bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_equals_the_dense_map_in_any_order() {
        let list = ClusterSpec::builder().job("a", ["x:1", "y:1"]).build();
        let map = ClusterSpec::builder().sparse_job("a", [(1, "y:1"), (0, "x:1")]).build();
        assert_eq!(list, map);
        assert!(list.is_ok());
    }

    #[test]
    fn the_scheme_of_classic_targets_is_left_out() {
        let build = |address: &str| ClusterSpec::builder().job("ps", [address]).build();
        assert_eq!(build("grpc://a:1"), build("a:1"));
        let error = build("http://a:1").unwrap_err().to_string();
        let expected = "cannot use the address \"http://a:1\" of /job:ps/task:0: ";
        assert!(error.starts_with(expected) && error.contains("scheme"), "{error}");
    }

    #[test]
    fn duplicates_name_both_tasks() {
        let error = ClusterSpec::builder()
            .job("ps", ["a:1", "b:1"])
            .sparse_job("worker", [(3, "B:1")])
            .build()
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot give B:1 to /job:worker/task:3: /job:ps/task:1 has it already"
        );
        let twice = ClusterSpec::builder().sparse_job("ps", [(1, "a:1"), (1, "b:1")]).build();
        assert_eq!(twice, Err(ClusterError::DuplicateIndex { task: TaskId::ps(1) }));
        let twice = ClusterSpec::builder().job("ps", ["a:1"]).job("ps", ["b:1"]).build();
        assert_eq!(twice, Err(ClusterError::DuplicateJob { job: "ps".into() }));
    }

    #[test]
    fn faults_name_the_task() {
        let error = ClusterSpec::builder().job("ps", ["a:1", "b:0"]).build().unwrap_err();
        assert_eq!(
            error,
            ClusterError::Address {
                task: TaskId::ps(1),
                address: "b:0".into(),
                problem: AddressProblem::Port
            }
        );
        assert_eq!(
            error.to_string(),
            "cannot use the address \"b:0\" of /job:ps/task:1: \
             its port is not a number from 1 to 65535"
        );
        let error = ClusterSpec::builder().job("p-s", ["a:1"]).build();
        assert_eq!(error, Err(ClusterError::JobName { job: "p-s".into() }));
        let error = ClusterSpec::builder().sparse_job("ps", [(1 << 20, "a:1")]).build();
        assert!(matches!(error, Err(ClusterError::Index { .. })));
    }

    #[test]
    fn every_bound_is_enforced() {
        let tasks = |n: u32| (0..n).map(|i| format!("h{}:{}", i / 60_000, i % 60_000 + 1));
        assert!(ClusterSpec::builder().job("ps", tasks(1 << 16)).build().is_ok());
        let error = ClusterSpec::builder().job("ps", tasks((1 << 16) + 1)).build();
        assert_eq!(error, Err(ClusterError::TooManyTasks { job: "ps".into() }));
        let jobs = |n: usize| {
            (0..n).fold(ClusterSpec::builder(), |b, i| b.job(format!("j{i}"), [""; 0])).build()
        };
        assert!(jobs(ClusterSpec::JOBS_MAX).is_ok());
        assert_eq!(jobs(65), Err(ClusterError::TooManyJobs { jobs: 65 }));
        let long = |job: &str| {
            let host = format!("{job}{}", "h".repeat(230));
            (0..40_000).map(move |i| format!("{host}:{}", i + 1)).collect::<Vec<_>>()
        };
        let error = ClusterSpec::builder().job("a", long("a")).job("b", long("b")).build();
        assert!(matches!(error, Err(ClusterError::TooLong { .. })));
    }
}
