//! The errors of parsing, building and querying a cluster.

use thiserror::Error;

use super::{AddressProblem, ClusterSpec};
use crate::ids::TaskId;

/// An invalid cluster, or a query for a job or task that it lacks. The caller's configuration is at
/// fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// The cluster has no such job.
    #[error("cannot find the job {job:?}: the cluster has {known}")]
    UnknownJob {
        /// The requested job.
        job: String,
        /// The jobs of the cluster, in words.
        known: String,
    },
    /// The job exists but has no task with this index.
    #[error("cannot find /job:{job}/task:{index}: no task with this index, only {known}")]
    UnknownTask {
        /// The requested job.
        job: String,
        /// The requested index.
        index: u32,
        /// The indices of the job, such as `0-3, 5`.
        known: String,
    },
    /// The task exists but accepts no connections: it is listed without an address.
    #[error("cannot connect to /job:{job}/task:{index}: it has no address")]
    NoAddress {
        /// The requested job.
        job: String,
        /// The requested index.
        index: u32,
    },
    /// No job of the cluster holds the variables: [`ClusterSpec::variables_job`].
    #[error(
        "cannot find the job that holds the variables: the cluster has {known}; name a job ps, or \
         list one job beside chief, worker and evaluator whose tasks all have addresses"
    )]
    NoVariablesJob {
        /// The jobs of the cluster, in words.
        known: String,
    },
    /// Several jobs could hold the variables: [`ClusterSpec::variables_job`].
    #[error("cannot choose the job that holds the variables among {jobs}: name one of them ps")]
    SeveralVariablesJobs {
        /// The names of the jobs, separated by commas.
        jobs: String,
    },
    /// A rendezvous cannot gather a cluster of this size: [`ClusterSize`](super::ClusterSize).
    #[error(
        "cannot gather {num_ps} ps tasks and {num_workers} workers: a rendezvous gathers at least one \
         ps task, and at most {} tasks",
        super::ClusterSize::TASKS_MAX
    )]
    Size {
        /// The number of ps tasks.
        num_ps: u32,
        /// The number of workers.
        num_workers: u32,
    },
    /// A job name is not a letter followed by letters, digits and underscores, or is too long.
    #[error(
        "cannot name a job {job:?}: a name is a letter, then letters, digits or underscores, at \
         most {} bytes",
        ClusterSpec::JOB_NAME_BYTES_MAX
    )]
    JobName {
        /// The name, clipped.
        job: String,
    },
    /// The same job was given twice.
    #[error("cannot add the job {job}: it was given before")]
    DuplicateJob {
        /// The job's name.
        job: String,
    },
    /// The same task was given twice.
    #[error("cannot add {task}: it was given before")]
    DuplicateIndex {
        /// The task.
        task: TaskId,
    },
    /// Two tasks have the same address.
    #[error("cannot give {address} to {second}: {first} has it already")]
    DuplicateAddress {
        /// The address as the second task spells it.
        address: String,
        /// The task that has the address.
        first: TaskId,
        /// The second task with the address.
        second: TaskId,
    },
    /// The address of a task is malformed.
    #[error("cannot use the address {address:?} of {task}: {problem}")]
    Address {
        /// The task.
        task: TaskId,
        /// The address, clipped.
        address: String,
        /// The fault in the address.
        problem: AddressProblem,
    },
    /// There are more jobs than [`ClusterSpec::JOBS_MAX`].
    #[error("cannot use {jobs} jobs: the limit is {}", ClusterSpec::JOBS_MAX)]
    TooManyJobs {
        /// The number of jobs.
        jobs: usize,
    },
    /// One job has more tasks than [`ClusterSpec::TASKS_MAX`].
    #[error("cannot use the tasks of job {job}: there are more than {}", ClusterSpec::TASKS_MAX)]
    TooManyTasks {
        /// The job's name.
        job: String,
    },
    /// A task index is not a number below [`ClusterSpec::INDEX_LIMIT`].
    #[error(
        "cannot number a task of job {job} {index:?}: an index is a number below {}",
        ClusterSpec::INDEX_LIMIT
    )]
    Index {
        /// The job's name.
        job: String,
        /// The text given as the index, clipped.
        index: String,
    },
    /// The text is longer than [`ClusterSpec::TEXT_BYTES_MAX`].
    #[error("cannot use a cluster of {bytes} bytes: the limit is {}", ClusterSpec::TEXT_BYTES_MAX)]
    TooLong {
        /// The length of the text, or an upper bound of it.
        bytes: usize,
    },
    /// The text is not JSON.
    #[error("cannot read the cluster as JSON: {reason}")]
    Json {
        /// The line of the first fault, from 1.
        line: usize,
        /// The column of the first fault.
        column: usize,
        /// The parser's message, with the position.
        reason: String,
    },
    /// The JSON value is not a map of jobs.
    #[error("cannot read the cluster: expected a map of jobs, found {found}")]
    NotJobs {
        /// The kind of value found.
        found: &'static str,
    },
    /// The part `task` of a `TF_CONFIG` names no task.
    #[error("cannot read the task: expected {{\"type\": JOB, \"index\": INDEX}}, found {found}")]
    NotTask {
        /// The part.
        found: String,
    },
    /// The part `task` of a `TF_CONFIG` has no index, and its job has several tasks.
    #[error("cannot read the task: its index is missing, and the job {job} has {tasks} tasks")]
    NoTaskIndex {
        /// The job's name, clipped.
        job: String,
        /// The number of its tasks.
        tasks: usize,
    },
    /// A `TF_CONFIG` has another part and no `cluster`.
    #[error(
        "cannot read the cluster: expected {{\"cluster\": JOBS, \"task\": TASK}} or jobs alone, found \
         {found:?} and no \"cluster\""
    )]
    NoCluster {
        /// The part that it has.
        found: String,
    },
    /// A job is neither a list nor a map of addresses.
    #[error("cannot read the job {job:?}: expected a list or map of addresses, found {found}")]
    NotTasks {
        /// The job's name, clipped.
        job: String,
        /// The kind of value found.
        found: &'static str,
    },
    /// The address of a task is not a JSON string.
    #[error("cannot read the job {job:?}: expected an address for task {index}, found {found}")]
    NotAddress {
        /// The job's name, clipped.
        job: String,
        /// The task's index as given, clipped.
        index: String,
        /// The kind of value found.
        found: &'static str,
    },
    /// A part of the text is not `job=addresses`.
    #[error("cannot read the cluster at byte {position}: expected job=address,..., found {text:?}")]
    Text {
        /// The byte offset of that part.
        position: usize,
        /// The text of that part, clipped.
        text: String,
    },
    /// Some tasks of a job have an index and some have none.
    #[error("cannot read the job {job:?}: either every task has an index or none has")]
    Mixed {
        /// The job's name, clipped.
        job: String,
    },
}

/// Returns the first 80 characters: an error about hostile text must not carry all of it.
pub(super) fn clip(text: &str) -> String {
    match text.char_indices().nth(CLIP_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// Formats ascending indices as ranges, such as `0-3, 5`. Shows at most eight ranges, so the text
/// stays short.
pub(crate) fn index_list(indices: impl IntoIterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for index in indices {
        match ranges.pop() {
            Some((first, last)) if last.checked_add(1) == Some(index) => {
                ranges.push((first, index));
            }
            previous => ranges.extend(previous.into_iter().chain([(index, index)])),
        }
        if ranges.len() > RANGES_MAX {
            break;
        }
    }
    let text = |&(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let mut words: Vec<String> = ranges.iter().take(RANGES_MAX).map(text).collect();
    if ranges.len() > RANGES_MAX {
        words.push("...".to_owned());
    }
    match words.is_empty() {
        true => "none".to_owned(),
        false => words.join(", "),
    }
}

const CLIP_CHARS: usize = 80;
const RANGES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_listed_as_ranges() {
        assert_eq!(index_list([]), "none");
        assert_eq!(index_list([3]), "3");
        assert_eq!(index_list([0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(index_list((0..40).step_by(2)), "0, 2, 4, 6, 8, 10, 12, 14, ...");
        assert_eq!(index_list(0..1 << 16), "0-65535");
    }

    #[test]
    fn long_text_is_clipped_at_a_character() {
        assert_eq!(clip("short"), "short");
        assert_eq!(clip(&"é".repeat(81)), format!("{}...", "é".repeat(80)));
    }
}
