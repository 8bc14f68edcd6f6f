//! The source `dmlc`: the variables of ps-lite, MXNet and BytePS.

use super::found::{Found, Outcome};
use super::{ClusterSource, Known, Lookup, ResolveError};
use crate::cluster::ClusterSpec;
use crate::cluster::error::clip;
use crate::ids::TaskId;
use crate::launch::number;

const ROLE: &str = "DMLC_ROLE";
const NUM_SERVER: &str = "DMLC_NUM_SERVER";
const NUM_WORKER: &str = "DMLC_NUM_WORKER";
const SERVER_ID: &str = "DMLC_SERVER_ID";
const WORKER_ID: &str = "DMLC_WORKER_ID";

/// Reads the role and the number of this process, and the numbers of tasks.
///
/// These variables tell nobody the addresses of the servers, which ps-lite asks its scheduler for:
/// the caller gives them.
pub(super) fn read(lookup: Lookup<'_>, known: &Known) -> Result<Outcome, ResolveError> {
    let Some(role) = lookup(ROLE) else {
        return Ok(Outcome::Absent("DMLC_ROLE is not set".to_owned()));
    };
    let (job, id, count) = match &*role {
        "server" => (TaskId::PS_JOB, SERVER_ID, NUM_SERVER),
        "worker" => ("worker", WORKER_ID, NUM_WORKER),
        _ => {
            let expected = "server or worker: a cluster of pushpull needs no scheduler";
            return Err(ResolveError::Malformed { variable: ROLE, value: clip(&role), expected });
        }
    };
    let half_set = |missing| ResolveError::HalfSet { variable: ROLE, value: clip(&role), missing };
    let index = match (count_of(lookup, id)?, known.index) {
        (Some(index), _) | (None, Some(index)) => index,
        (None, None) => return Err(half_set(id)),
    };
    let servers = count_of(lookup, NUM_SERVER)?.ok_or_else(|| half_set(NUM_SERVER))?;
    let workers = count_of(lookup, NUM_WORKER)?.ok_or_else(|| half_set(NUM_WORKER))?;
    check_count("--num-ps", known.num_ps, NUM_SERVER, servers)?;
    check_count("--num-workers", known.num_workers, NUM_WORKER, workers)?;
    match known.num_given(TaskId::PS_JOB) {
        None => {
            let remedy = "--ps-hosts";
            return Err(ResolveError::NoPeers { resolver: ClusterSource::Dmlc, remedy });
        }
        Some(given) if given != servers as usize => {
            return Err(ResolveError::Contradiction {
                first: format!("--ps-hosts of {given} addresses"),
                second: format!("{NUM_SERVER}={servers}"),
            });
        }
        Some(_) => {}
    }
    let tasks = if job == TaskId::PS_JOB { servers } else { workers };
    if index >= tasks {
        let value = index.to_string();
        let job = job.to_owned();
        return Err(ResolveError::IndexTooHigh { variable: id, value, job, tasks, flag: count });
    }
    let builder = ClusterSpec::builder();
    let builder = match known.num_given("worker") {
        Some(_) => builder,
        None => builder.workers(workers),
    };
    let cluster = builder
        .build()
        .map_err(|cause| ResolveError::Cluster { variable: NUM_WORKER.to_owned(), cause })?;
    Ok(Outcome::Found(Found {
        cluster,
        task: Some((ROLE, TaskId::new(job, index))),
        taken: vec![
            (ROLE, role),
            (id, index.to_string()),
            (NUM_SERVER, servers.to_string()),
            (NUM_WORKER, workers.to_string()),
        ],
    }))
}

fn count_of(lookup: Lookup<'_>, variable: &'static str) -> Result<Option<u32>, ResolveError> {
    Ok(number(lookup, variable)?.map(|(_, number)| number))
}

fn check_count(
    flag: &str,
    given: Option<u32>,
    variable: &str,
    count: u32,
) -> Result<(), ResolveError> {
    match given.filter(|&given| given != count) {
        None => Ok(()),
        Some(given) => Err(ResolveError::Contradiction {
            first: format!("{flag} {given}"),
            second: format!("{variable}={count}"),
        }),
    }
}
