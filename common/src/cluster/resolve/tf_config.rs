//! The source `tf-config`: `TF_CONFIG`, with a dense or a sparse cluster.

use serde_json::Value;

use super::found::{Found, Outcome};
use super::{Lookup, ResolveError};
use crate::cluster::ClusterSpec;
use crate::cluster::error::clip;
use crate::ids::TaskId;

/// The variable.
const VARIABLE: &str = "TF_CONFIG";

/// Reads `TF_CONFIG`. One without a cluster is that of a program that runs alone.
///
/// Parts other than `cluster`, `sparseCluster` and `task` are ignored: launchers add their own.
pub(super) fn read(lookup: Lookup<'_>) -> Result<Outcome, ResolveError> {
    let Some(text) = lookup(VARIABLE) else {
        return Ok(Outcome::Absent("TF_CONFIG is not set".to_owned()));
    };
    let cluster = |cause| ResolveError::Cluster { variable: VARIABLE.to_owned(), cause };
    let value = crate::cluster::json::json_value(&text).map_err(cluster)?;
    let parts = value.as_object().ok_or_else(|| malformed(&text, "a JSON object"))?;
    let jobs = match (parts.get("cluster"), parts.get("sparseCluster")) {
        (Some(jobs), None) | (None, Some(jobs)) => jobs,
        (Some(jobs), Some(other)) if jobs == other => jobs,
        (Some(_), Some(_)) => {
            return Err(malformed(&text, "one of \"cluster\" and \"sparseCluster\""));
        }
        (None, None) if parts.contains_key("task") => {
            return Err(malformed(&text, "a \"cluster\" beside its \"task\""));
        }
        (None, None) => return Ok(Outcome::Absent("TF_CONFIG has no cluster".to_owned())),
    };
    if jobs.as_object().is_some_and(|jobs| jobs.is_empty()) {
        return Ok(Outcome::Absent("the cluster of TF_CONFIG is empty".to_owned()));
    }
    let spec = ClusterSpec::from_jobs(jobs).map_err(cluster)?;
    let task = parts.get("task").map(|task| read_task(task, &spec, &text)).transpose()?;
    Ok(Outcome::Found(Found {
        cluster: spec,
        task: task.map(|task| (VARIABLE, task)),
        rendezvous: None,
        taken: vec![(VARIABLE, text)],
    }))
}

/// Reads a task such as `{"type": "worker", "index": 1}`. The index may be a text, and that of the
/// only task of a job may be left out.
fn read_task(task: &Value, cluster: &ClusterSpec, text: &str) -> Result<TaskId, ResolveError> {
    let job = task.get("type").and_then(Value::as_str);
    let job = job.ok_or_else(|| malformed(text, "a text as the \"type\" of its \"task\""))?;
    let index = match task.get("index") {
        None if cluster.num_tasks(job).unwrap_or(1) <= 1 => Some(0),
        None => return Err(malformed(text, "an \"index\" of its \"task\"")),
        Some(Value::String(digits)) => digits.parse().ok(),
        Some(index) => index.as_u64().and_then(|index| u32::try_from(index).ok()),
    };
    let index = index.filter(|&index| index < ClusterSpec::INDEX_LIMIT);
    let index =
        index.ok_or_else(|| malformed(text, "a number as the \"index\" of its \"task\""))?;
    Ok(TaskId::new(job, index))
}

fn malformed(text: &str, expected: &'static str) -> ResolveError {
    ResolveError::Malformed { variable: VARIABLE, value: clip(text), expected }
}
