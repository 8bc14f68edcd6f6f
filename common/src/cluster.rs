//! [`ClusterSpec`]: the jobs of a cluster and the address of every task, parsed and therefore
//! valid.
//!
//! A job is a list of addresses (tasks 0 to n-1) or a sparse map from task index to address. Both
//! are kept as a map, so a list equals the dense map of the same tasks.
//!
//! Text may come from a peer or a file, so it is limited: [`ClusterSpec::JOBS_MAX`] jobs of
//! [`ClusterSpec::TASKS_MAX`] tasks, and [`ClusterSpec::TEXT_BYTES_MAX`] for the whole text.

mod address;
mod builder;
mod error;
mod json;
pub mod resolve;
mod size;
mod text;
mod unique_keys;

pub use address::{AddressProblem, without_scheme};
pub use builder::ClusterSpecBuilder;
pub use error::ClusterError;
pub use size::ClusterSize;

pub(crate) use address::canonical;
pub(crate) use error::index_list;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::TaskId;

/// The jobs of a cluster and the addresses of their tasks.
///
/// A value of this type is always valid. Job names follow the syntax, every address is `host:port`,
/// `[v6]:port`, `unix:/path` or [`ClusterSpec::NO_ADDRESS`], no two tasks share an address, and
/// both text forms fit [`ClusterSpec::TEXT_BYTES_MAX`]. The default is the empty cluster.
///
/// ```
/// use pushpull_common::cluster::ClusterSpec;
/// let cluster = ClusterSpec::builder()
///     .job("ps", ["a:2222", "b:2222"])
///     .sparse_job("worker", [(3, "c:2223")])
///     .build()?;
/// assert_eq!(cluster.to_string(), "ps=a:2222,b:2222;worker=3@c:2223");
/// # Ok::<(), pushpull_common::cluster::ClusterError>(())
/// ```
#[doc(alias = "tf.train.ClusterSpec")]
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClusterSpec {
    jobs: BTreeMap<Arc<str>, Job>,
}

/// The addresses of one job's tasks by index.
pub(crate) type Job = BTreeMap<u32, Arc<str>>;

impl ClusterSpec {
    /// The largest number of jobs.
    pub const JOBS_MAX: usize = 64;
    /// The largest number of tasks in one job.
    pub const TASKS_MAX: usize = 1 << 16;
    /// The bound on task indices: every index is below it, in sparse jobs too.
    pub const INDEX_LIMIT: u32 = 1 << 20;
    /// The longest job name in bytes.
    pub const JOB_NAME_BYTES_MAX: usize = 64;
    /// The longest address in bytes.
    pub const ADDRESS_BYTES_MAX: usize = 255;
    /// The longest text or JSON form in bytes, read or written.
    pub const TEXT_BYTES_MAX: usize = 16 << 20;

    /// The text in place of an address, for a task that accepts no connections: `-`. Tasks of the
    /// job `ps` must have an address; workers need none.
    pub const NO_ADDRESS: &str = "-";

    /// Checks the syntax of an address: `host:port`, `[v6]:port` or `unix:/path`.
    ///
    /// # Errors
    /// Every [`AddressProblem`] but [`AddressProblem::Absent`].
    pub fn check_address(address: &str) -> Result<(), AddressProblem> {
        address::canonical(address).map(|_| ())
    }

    /// Returns a builder for a cluster, with no jobs yet.
    pub fn builder() -> ClusterSpecBuilder {
        ClusterSpecBuilder::default()
    }

    /// Returns whether the cluster has no job. A cluster with a job of no tasks is not empty.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the names of the jobs, sorted.
    pub fn jobs(&self) -> impl Iterator<Item = &str> {
        self.jobs.keys().map(|name| &**name)
    }

    /// Returns every task with its address or [`ClusterSpec::NO_ADDRESS`], sorted by job name, then
    /// by index.
    pub fn tasks(&self) -> impl Iterator<Item = (TaskId, &str)> {
        self.jobs.iter().flat_map(|(name, job)| {
            job.iter()
                .map(|(&index, address)| (TaskId { job: name.clone(), index }, address.as_ref()))
        })
    }

    /// Returns the number of tasks of a job, holes not counted. Fails for an unknown job.
    pub fn num_tasks(&self, job: &str) -> Result<usize, ClusterError> {
        Ok(self.find(job)?.len())
    }

    /// Returns the indices of a job's tasks, ascending. Fails for an unknown job.
    pub fn task_indices(&self, job: &str) -> Result<Vec<u32>, ClusterError> {
        Ok(self.find(job)?.keys().copied().collect())
    }

    /// Returns a job's addresses up to its highest index, `None` for each hole. Fails for an
    /// unknown job.
    pub fn job_tasks(&self, job: &str) -> Result<Vec<Option<&str>>, ClusterError> {
        let tasks = self.find(job)?;
        let end = tasks.keys().next_back().map_or(0, |&highest| highest + 1);
        Ok((0..end).map(|index| tasks.get(&index).map(|address| &**address)).collect())
    }

    /// Returns a task's address. An unknown job, an index that the job lacks, and a task without an
    /// address are different errors.
    pub fn task_address(&self, job: &str, index: u32) -> Result<&str, ClusterError> {
        match self.entry(job, index)? {
            ClusterSpec::NO_ADDRESS => Err(ClusterError::NoAddress { job: job.to_owned(), index }),
            address => Ok(address),
        }
    }

    /// Checks that the cluster has this task, with or without an address. The error is that of
    /// [`ClusterSpec::task_address`].
    pub fn require(&self, job: &str, index: u32) -> Result<(), ClusterError> {
        self.entry(job, index).map(|_| ())
    }

    fn entry(&self, job: &str, index: u32) -> Result<&str, ClusterError> {
        let tasks = self.find(job)?;
        tasks.get(&index).map(|address| &**address).ok_or_else(|| ClusterError::UnknownTask {
            job: job.to_owned(),
            index,
            known: index_list(tasks.keys().copied()),
        })
    }

    /// Returns whether the cluster has this task.
    pub fn contains(&self, task: &TaskId) -> bool {
        self.jobs.get(&task.job).is_some_and(|job| job.contains_key(&task.index))
    }

    /// Returns the chief, which declares and initializes the variables: the lowest index of the job
    /// `chief` if it has tasks, otherwise of the job `worker`.
    pub fn chief(&self) -> Option<TaskId> {
        self.lowest("chief").or_else(|| self.lowest("worker"))
    }

    /// Returns the job that holds the variables. Its tasks are the ps tasks of the cluster.
    ///
    /// It is the job `ps` if the cluster has one. Otherwise it is the only job whose tasks all have
    /// addresses, not counting `chief`, `worker`, `evaluator` and jobs without tasks.
    ///
    /// # Errors
    /// [`ClusterError::NoVariablesJob`] if there is no such job, and
    /// [`ClusterError::SeveralVariablesJobs`] if there are more.
    ///
    /// ```
    /// use pushpull_common::cluster::ClusterSpec;
    /// let cluster: ClusterSpec = "local=a:2222,b:2222;worker=-".parse()?;
    /// assert_eq!(cluster.variables_job()?, "local");
    /// # Ok::<(), pushpull_common::cluster::ClusterError>(())
    /// ```
    pub fn variables_job(&self) -> Result<&str, ClusterError> {
        if let Some((name, _)) = self.jobs.get_key_value(TaskId::PS_JOB) {
            return Ok(name);
        }
        let can_hold = |name: &str, job: &Job| {
            let is_reachable = job.values().all(|address| **address != *ClusterSpec::NO_ADDRESS);
            !job.is_empty() && is_reachable && !JOBS_WITHOUT_VARIABLES.contains(&name)
        };
        let candidates = self.jobs.iter().filter(|(name, job)| can_hold(name, job));
        match candidates.map(|(name, _)| &**name).collect::<Vec<_>>()[..] {
            [only] => Ok(only),
            [] => Err(ClusterError::NoVariablesJob { known: self.known_jobs() }),
            ref several => Err(ClusterError::SeveralVariablesJobs { jobs: several.join(", ") }),
        }
    }

    /// Returns the index and the address of every task of the job that holds the variables,
    /// ascending. There are none if the cluster has no such job.
    pub fn ps_tasks(&self) -> impl Iterator<Item = (u32, &str)> {
        let job = self.variables_job().ok().and_then(|job| self.jobs.get(job));
        job.into_iter().flatten().map(|(&index, address)| (index, &**address))
    }

    /// Returns the ps task whose first shard owns the global step: the lowest index of the job that
    /// holds the variables.
    pub fn step_owner(&self) -> Option<TaskId> {
        self.lowest(self.variables_job().ok()?)
    }

    /// Returns the text that ps tasks must agree on: the indices of the job `ps`, such as `0,1`, or
    /// the name and the indices of another job that holds the variables, such as `local:0,1`.
    ///
    /// Addresses and the worker job are left out deliberately. They may change while the cluster
    /// runs: a task moves to another host, a worker joins.
    pub fn ps_identity(&self) -> String {
        let indices: Vec<_> = self.ps_tasks().map(|(index, _)| index.to_string()).collect();
        match self.variables_job() {
            Ok(job) if job != TaskId::PS_JOB => format!("{job}:{}", indices.join(",")),
            _ => indices.join(","),
        }
    }

    fn find(&self, job: &str) -> Result<&Job, ClusterError> {
        self.jobs.get(job).ok_or_else(|| ClusterError::UnknownJob {
            job: job.to_owned(),
            known: self.known_jobs(),
        })
    }

    /// Returns the names of the jobs in words, for errors.
    fn known_jobs(&self) -> String {
        match self.is_empty() {
            true => "no jobs".to_owned(),
            false => format!("the jobs {}", self.jobs().collect::<Vec<_>>().join(", ")),
        }
    }

    fn lowest(&self, job: &str) -> Option<TaskId> {
        let (name, tasks) = self.jobs.get_key_value(job)?;
        tasks.keys().next().map(|&index| TaskId { job: name.clone(), index })
    }
}

/// The jobs of the classic names that never hold variables.
const JOBS_WITHOUT_VARIABLES: [&str; 3] = ["chief", "worker", "evaluator"];

/// Returns whether a job's tasks are numbered 0 to n-1. A job of no tasks counts as sparse and is
/// written as an empty map, as in classic TensorFlow.
fn is_dense(job: &Job) -> bool {
    job.keys().next_back().is_some_and(|&highest| highest as usize + 1 == job.len())
}

/// Returns whether a name is a letter followed by letters, digits and underscores, short enough.
pub(crate) fn is_job_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    name.len() <= ClusterSpec::JOB_NAME_BYTES_MAX
        && bytes.next().is_some_and(|first| first.is_ascii_alphabetic())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(text: &str) -> ClusterSpec {
        text.parse().unwrap()
    }

    #[test]
    fn a_sparse_job_has_holes() {
        let cluster = cluster("ps=p0:1,p1:1;worker=1@w1:1");
        assert_eq!(cluster.jobs().collect::<Vec<_>>(), ["ps", "worker"]);
        assert_eq!(cluster.num_tasks("worker"), Ok(1));
        assert_eq!(cluster.task_indices("worker"), Ok(vec![1]));
        assert_eq!(cluster.job_tasks("worker"), Ok(vec![None, Some("w1:1")]));
        assert_eq!(cluster.task_address("ps", 1), Ok("p1:1"));
        assert!(cluster.contains(&TaskId::worker(1)) && !cluster.contains(&TaskId::worker(0)));
        assert!(!cluster.contains(&TaskId::new("chief", 0)));
        let tasks: Vec<_> = cluster.tasks().map(|(task, _)| task.to_string()).collect();
        assert_eq!(tasks, ["/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:1"]);
    }

    #[test]
    fn an_unknown_job_is_not_an_unknown_task() {
        let cluster = cluster("worker=1@a:1,2@b:1,7@c:1");
        let job = cluster.task_address("ps", 0).unwrap_err();
        assert!(matches!(job, ClusterError::UnknownJob { .. }));
        assert_eq!(job.to_string(), "cannot find the job \"ps\": the cluster has the jobs worker");
        let task = cluster.task_address("worker", 0).unwrap_err();
        assert!(matches!(task, ClusterError::UnknownTask { index: 0, .. }));
        assert_eq!(
            task.to_string(),
            "cannot find /job:worker/task:0: no task with this index, only 1-2, 7"
        );
        assert!(matches!(
            ClusterSpec::default().num_tasks("ps"),
            Err(ClusterError::UnknownJob { .. })
        ));
    }

    #[test]
    fn workers_need_no_address() {
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).workers(2).build().unwrap();
        assert_eq!(cluster.to_string(), "ps=a:1;worker=-,-");
        assert_eq!(cluster.to_string().parse(), Ok(cluster.clone()));
        assert_eq!(ClusterSpec::from_json(&cluster.to_json()), Ok(cluster.clone()));
        assert_eq!(
            (cluster.num_tasks("worker"), cluster.chief()),
            (Ok(2), Some(TaskId::worker(0)))
        );
        assert_eq!((cluster.require("worker", 1), cluster.require("ps", 0)), (Ok(()), Ok(())));
        let error = cluster.task_address("worker", 1).unwrap_err();
        assert_eq!(error.to_string(), "cannot connect to /job:worker/task:1: it has no address");
        let unknown = cluster.require("worker", 2).unwrap_err();
        assert!(matches!(unknown, ClusterError::UnknownTask { index: 2, .. }));
        let mixed = ClusterSpec::builder().job("ps", ["a:1"]).job("worker", ["b:1", "-"]).build();
        assert_eq!(mixed.unwrap().task_address("worker", 0), Ok("b:1"));
        let error = "ps=a:1,-".parse::<ClusterSpec>().unwrap_err();
        let expected = "cannot use the address \"-\" of /job:ps/task:1: \
                        workers find a ps task by its address";
        assert_eq!(error.to_string(), expected);
        let endless = ClusterSpec::builder().workers(u32::MAX).build();
        assert!(matches!(endless, Err(ClusterError::TooManyTasks { .. })));
    }

    #[test]
    fn the_chief_and_the_step_owner_have_the_lowest_index() {
        let plain = cluster("ps=1@a:1,3@b:1;worker=2@c:1,4@d:1");
        assert_eq!(plain.chief(), Some(TaskId::worker(2)));
        assert_eq!(plain.step_owner(), Some(TaskId::ps(1)));
        assert_eq!(plain.ps_identity(), "1,3");
        assert_eq!(cluster("chief=5@x:1;worker=c:1").chief(), Some(TaskId::new("chief", 5)));
        assert_eq!(cluster("chief=;worker=c:1").chief(), Some(TaskId::worker(0)));
        let empty = ClusterSpec::default();
        assert_eq!((empty.chief(), empty.step_owner()), (None, None));
        assert_eq!(empty.ps_identity(), "");
        assert!(empty.is_empty() && !cluster("ps=").is_empty());
    }

    #[test]
    fn the_job_ps_or_the_only_candidate_holds_the_variables() {
        let none = |known: &str| {
            format!(
                "cannot find the job that holds the variables: the cluster has {known}; name a job \
                 ps, or list one job beside chief, worker and evaluator whose tasks all have \
                 addresses"
            )
        };
        let several = |jobs: &str| {
            format!(
                "cannot choose the job that holds the variables among {jobs}: name one of them ps"
            )
        };
        // The cluster, its job or the error, its step owner and its identity.
        let table = [
            ("ps=a:1,b:1", Ok("ps"), "/job:ps/task:0", "0,1"),
            ("ps=3@a:1;local=b:1", Ok("ps"), "/job:ps/task:3", "3"),
            ("ps=;local=b:1", Ok("ps"), "", ""),
            ("local=a:1,b:1", Ok("local"), "/job:local/task:0", "local:0,1"),
            ("local=2@a:1,5@b:1;worker=c:1", Ok("local"), "/job:local/task:2", "local:2,5"),
            (
                "chief=a:1;evaluator=b:1;table=c:1;worker=d:1",
                Ok("table"),
                "/job:table/task:0",
                "table:0",
            ),
            // Jobs that no client reaches, or that have no tasks, are no candidates.
            ("local=a:1;trainer=-,-;unused=", Ok("local"), "/job:local/task:0", "local:0"),
            ("local=a:1,-;worker=-", Err(none("the jobs local, worker")), "", ""),
            ("chief=-;worker=a:1", Err(none("the jobs chief, worker")), "", ""),
            ("", Err(none("no jobs")), "", ""),
            ("cache=a:1;local=b:1;worker=c:1", Err(several("cache, local")), "", ""),
        ];
        for (text, expected, owner, identity) in table {
            let cluster = cluster(text);
            let job = cluster.variables_job().map_err(|error| error.to_string());
            assert_eq!(job, expected, "{text}");
            let step_owner = cluster.step_owner().map(|task| task.to_string());
            assert_eq!(step_owner.unwrap_or_default(), owner, "{text}");
            assert_eq!(cluster.ps_identity(), identity, "{text}");
        }
        let local = cluster("local=5@b:1,2@a:1;worker=c:1");
        assert_eq!(local.ps_tasks().collect::<Vec<_>>(), [(2, "a:1"), (5, "b:1")]);
        assert_eq!(cluster("worker=c:1").ps_tasks().count(), 0);
        assert_eq!((local.chief(), cluster("local=a:1").chief()), (Some(TaskId::worker(0)), None));
    }

    #[test]
    fn the_text_covers_addresses_but_the_identity_does_not() {
        let one = cluster("ps=a:1,b:1");
        let two = cluster("ps=a:1,b:2;worker=c:1");
        assert_ne!(one.to_string(), two.to_string());
        assert_eq!(one.ps_identity(), two.ps_identity());
        assert_eq!(one.to_string(), cluster("ps=1@b:1,0@a:1").to_string());
    }

    #[test]
    fn job_names_have_a_syntax() {
        for name in ["ps", "Worker_2", "a"] {
            assert!(is_job_name(name), "{name}");
        }
        for name in ["", "2a", "_a", "a-b", "a b", "é", &"a".repeat(65)] {
            assert!(!is_job_name(name), "{name}");
        }
    }
}
