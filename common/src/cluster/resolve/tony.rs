//! The source `tony`: the variables that TonY sets in the containers of YARN.

use super::found::{Found, Outcome};
use super::{Lookup, ResolveError};
use crate::cluster::ClusterSpec;
use crate::cluster::error::clip;
use crate::ids::TaskId;
use crate::launch::number;

const CLUSTER: &str = "CLUSTER_SPEC";
const JOB: &str = "JOB_NAME";
const INDEX: &str = "TASK_INDEX";

/// Reads `CLUSTER_SPEC`, `JOB_NAME` and `TASK_INDEX`. `JOB_NAME` alone belongs to other programs.
pub(super) fn read(lookup: Lookup<'_>) -> Result<Outcome, ResolveError> {
    let Some(text) = lookup(CLUSTER) else {
        return Ok(Outcome::Absent("CLUSTER_SPEC is not set".to_owned()));
    };
    let cluster = ClusterSpec::from_json(&text)
        .map_err(|cause| ResolveError::Cluster { variable: CLUSTER.to_owned(), cause })?;
    let half_set =
        |missing| ResolveError::HalfSet { variable: CLUSTER, value: clip(&text), missing };
    let job = lookup(JOB).ok_or_else(|| half_set(JOB))?;
    let (_, index) = number(lookup, INDEX)?.ok_or_else(|| half_set(INDEX))?;
    let task = TaskId::new(&job, index);
    Ok(Outcome::Found(Found {
        cluster,
        task: Some((JOB, task)),
        rendezvous: None,
        taken: vec![(CLUSTER, text), (JOB, job), (INDEX, index.to_string())],
    }))
}
