//! The source `dmlc`: the variables of ps-lite, MXNet and BytePS.

use super::found::{Found, Outcome};
use super::{ClusterSource, Known, Lookup, RegisteringTask, RendezvousPlan, ResolveError};
use crate::cluster::ClusterSpec;
use crate::cluster::error::clip;
use crate::ids::TaskId;
use crate::launch::{join_address, number};

const ROLE: &str = "DMLC_ROLE";
const NUM_SERVER: &str = "DMLC_NUM_SERVER";
const NUM_WORKER: &str = "DMLC_NUM_WORKER";
const SERVER_ID: &str = "DMLC_SERVER_ID";
const WORKER_ID: &str = "DMLC_WORKER_ID";
const ROOT: &str = "DMLC_PS_ROOT_URI";
const ROOT_PORT: &str = "DMLC_PS_ROOT_PORT";
const HOST: &str = "DMLC_NODE_HOST";

/// Reads the role and the number of this process, and the numbers of tasks.
///
/// The addresses of the servers are those of the caller, or else the scheduler of ps-lite gathers
/// them: the process with this role is the rendezvous of the cluster.
pub(super) fn read(lookup: Lookup<'_>, known: &Known) -> Result<Outcome, ResolveError> {
    let Some(role) = lookup(ROLE) else {
        return Ok(Outcome::Absent("DMLC_ROLE is not set".to_owned()));
    };
    let half_set = |missing| ResolveError::HalfSet { variable: ROLE, value: clip(&role), missing };
    let (job, id, count) = match &*role {
        "server" => (TaskId::PS_JOB, SERVER_ID, NUM_SERVER),
        "worker" => ("worker", WORKER_ID, NUM_WORKER),
        "scheduler" => return scheduler(lookup, known, role),
        _ => {
            let expected = "scheduler, server or worker";
            return Err(ResolveError::Malformed { variable: ROLE, value: clip(&role), expected });
        }
    };
    let index = count_of(lookup, id)?.or(known.index);
    let servers = count_of(lookup, NUM_SERVER)?.ok_or_else(|| half_set(NUM_SERVER))?;
    let workers = count_of(lookup, NUM_WORKER)?.ok_or_else(|| half_set(NUM_WORKER))?;
    check_count("--num-ps", known.num_ps, NUM_SERVER, servers)?;
    check_count("--num-workers", known.num_workers, NUM_WORKER, workers)?;
    let tasks = if job == TaskId::PS_JOB { servers } else { workers };
    if let Some(index) = index.filter(|&index| index >= tasks) {
        let value = index.to_string();
        let job = job.to_owned();
        return Err(ResolveError::IndexTooHigh { variable: id, value, job, tasks, flag: count });
    }
    let mut taken = vec![(ROLE, role.clone())];
    taken.extend(index.map(|index| (id, index.to_string())));
    taken.extend([(NUM_SERVER, servers.to_string()), (NUM_WORKER, workers.to_string())]);
    let Some(given) = known.num_given(TaskId::PS_JOB) else {
        let own = RegisteringTask::new(job, index, known).port(0).on_host(lookup(HOST));
        let plan = plan(lookup, known, (servers, workers))?.registering(own);
        taken.push((ROOT, plan.address.clone()));
        let task = index.map(|index| (ROLE, TaskId::new(job, index)));
        let cluster = ClusterSpec::default();
        return Ok(Outcome::Found(Found { cluster, task, rendezvous: Some(plan), taken }));
    };
    if given != servers as usize {
        return Err(ResolveError::Contradiction {
            first: format!("--ps-hosts of {given} addresses"),
            second: format!("{NUM_SERVER}={servers}"),
        });
    }
    let index = index.ok_or_else(|| half_set(id))?;
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
        rendezvous: None,
        taken,
    }))
}

/// Reads the variables of the scheduler, which is no task.
fn scheduler(lookup: Lookup<'_>, known: &Known, role: String) -> Result<Outcome, ResolveError> {
    let half_set = |missing| ResolveError::HalfSet { variable: ROLE, value: clip(&role), missing };
    let servers = count_of(lookup, NUM_SERVER)?.ok_or_else(|| half_set(NUM_SERVER))?;
    let workers = count_of(lookup, NUM_WORKER)?.ok_or_else(|| half_set(NUM_WORKER))?;
    let plan = plan(lookup, known, (servers, workers))?.here(true);
    let taken = vec![
        (ROLE, role),
        (NUM_SERVER, servers.to_string()),
        (NUM_WORKER, workers.to_string()),
        (ROOT, plan.address.clone()),
    ];
    Ok(Outcome::Found(Found { rendezvous: Some(plan), taken, ..Found::default() }))
}

/// Returns the plan of a process at the scheduler of ps-lite, or at the rendezvous of the caller.
fn plan(
    lookup: Lookup<'_>,
    known: &Known,
    counts: (u32, u32),
) -> Result<RendezvousPlan, ResolveError> {
    if let Some(address) = &known.rendezvous {
        return RendezvousPlan::new("--rendezvous", address, counts);
    }
    match (lookup(ROOT), lookup(ROOT_PORT)) {
        (Some(host), Some(port)) => RendezvousPlan::new(
            "DMLC_PS_ROOT_URI:DMLC_PS_ROOT_PORT",
            &join_address(&host, &port),
            counts,
        ),
        (Some(host), None) => {
            Err(ResolveError::HalfSet { variable: ROOT, value: clip(&host), missing: ROOT_PORT })
        }
        (None, _) => {
            let remedy = "--ps-hosts, or DMLC_PS_ROOT_URI with a scheduler";
            Err(ResolveError::NoPeers { resolver: ClusterSource::Dmlc, remedy })
        }
    }
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
