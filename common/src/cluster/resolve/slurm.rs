//! The source `slurm`: a step of a Slurm job, whose variables tell the nodes of all its tasks.

use super::found::{Found, Outcome};
use super::node_list::expand_node_list;
use super::ranks::{Division, launch_of};
use super::{ClusterSource, Known, Lookup, ResolveError};
use crate::cluster::ClusterSpec;
use crate::cluster::error::clip;
use crate::ids::TaskId;
use crate::launch::{Launch, Launcher, task_runs};

const RANK: &str = "SLURM_PROCID";
const SIZE: &str = "SLURM_NTASKS";
const NODES: &str = "SLURM_STEP_NODELIST";
const TASKS: &str = "SLURM_STEP_TASKS_PER_NODE";
const NODE_ID: &str = "SLURM_NODEID";
const LOCAL_ID: &str = "SLURM_LOCALID";

/// Reads the nodes of a step, and the task of this process in it.
///
/// Task `i` of a node listens at the base port plus `i`.
#[doc(alias = "tf.distribute.cluster_resolver.SlurmClusterResolver")]
pub(super) fn read(lookup: Lookup<'_>, known: &Known) -> Result<Outcome, ResolveError> {
    let launch = match launch_of(lookup, |launcher| launcher == Launcher::Slurm)? {
        Ok(launch) => launch,
        Err(reason) => return Ok(Outcome::Absent(reason)),
    };
    let rank = launch.rank().to_string();
    let half_set = |missing| ResolveError::HalfSet { variable: RANK, value: rank.clone(), missing };
    let nodes = lookup(NODES).ok_or_else(|| half_set(NODES))?;
    let tasks = lookup(TASKS).ok_or_else(|| half_set(TASKS))?;
    let places = places(&nodes, &tasks, launch.size())?;
    check_own(lookup, &launch, &places)?;
    let division = Division::of(ClusterSource::Slurm, &launch, SIZE, known)?;
    let addresses = places.iter().map(|place| place.address(known.base_port));
    let addresses = addresses.collect::<Result<Vec<_>, _>>()?;
    let cluster = cluster(&division, &addresses, known)?;
    Ok(Outcome::Found(Found {
        cluster,
        task: Some((RANK, division.task)),
        rendezvous: None,
        taken: vec![
            (NODES, nodes),
            (TASKS, tasks),
            (RANK, rank.clone()),
            (SIZE, launch.size().to_string()),
        ],
    }))
}

/// The node of a task, and its number there.
struct TaskPlace {
    node: usize,
    host: String,
    local: u32,
}

impl TaskPlace {
    fn address(&self, base: u16) -> Result<String, ResolveError> {
        match u16::try_from(self.local).ok().and_then(|local| base.checked_add(local)) {
            Some(port) => Ok(format!("{}:{port}", self.host)),
            None => Err(ResolveError::Port { host: self.host.clone(), local: self.local, base }),
        }
    }
}

/// Returns the places of all ranks, numbered node by node.
fn places(nodes: &str, tasks: &str, size: u32) -> Result<Vec<TaskPlace>, ResolveError> {
    let hosts = expand_node_list(nodes).map_err(|problem| ResolveError::NodeList {
        variable: NODES,
        value: clip(nodes),
        problem,
    })?;
    let runs = task_runs(tasks)?;
    let mismatch = |found| ResolveError::Nodes { nodes: clip(nodes), tasks: clip(tasks), found };
    let num_nodes = runs.iter().map(|&(_, nodes)| u64::from(nodes)).sum::<u64>();
    if num_nodes != hosts.len() as u64 {
        return Err(mismatch(format!("{} nodes and {num_nodes} numbers", hosts.len())));
    }
    let total = runs.iter().map(|&(tasks, nodes)| u64::from(tasks).saturating_mul(nodes.into()));
    let total = total.fold(0u64, u64::saturating_add);
    if total != u64::from(size) {
        return Err(mismatch(format!("{total} tasks, and {SIZE}={size}")));
    }
    let counts = runs.iter().flat_map(|&(tasks, nodes)| (0..nodes).map(move |_| tasks));
    let on_node = |(node, (host, tasks)): (usize, (String, u32))| {
        (0..tasks).map(move |local| TaskPlace { node, host: host.clone(), local })
    };
    Ok(hosts.into_iter().zip(counts).enumerate().flat_map(on_node).collect())
}

/// Checks that this process is where its rank is by the list.
fn check_own(
    lookup: Lookup<'_>,
    launch: &Launch,
    places: &[TaskPlace],
) -> Result<(), ResolveError> {
    let (Some(node), Some(local)) = (lookup(NODE_ID), lookup(LOCAL_ID)) else {
        return Ok(());
    };
    let rank = launch.rank();
    let place = places.get(rank as usize);
    match place
        .is_some_and(|place| node == place.node.to_string() && local == place.local.to_string())
    {
        true => Ok(()),
        false => Err(ResolveError::Distribution { rank, node: clip(&node), local: clip(&local) }),
    }
}

/// Returns the jobs of a step that the caller does not give.
fn cluster(
    division: &Division,
    addresses: &[String],
    known: &Known,
) -> Result<ClusterSpec, ResolveError> {
    let serves = division.num_ps > 0 || known.num_given(TaskId::PS_JOB).is_some();
    if !serves {
        return Err(ResolveError::NoPeers { resolver: ClusterSource::Slurm, remedy: "--ps-hosts" });
    }
    let (servers, workers) = addresses.split_at(division.num_ps as usize);
    let jobs = match &division.only_job {
        Some(job) => vec![(&**job, addresses)],
        None => vec![(TaskId::PS_JOB, servers), ("worker", workers)],
    };
    let jobs =
        jobs.into_iter().filter(|(job, tasks)| known.num_given(job).is_none() && !tasks.is_empty());
    let builder = jobs.fold(ClusterSpec::builder(), |builder, (job, tasks)| {
        builder.job(job, tasks.iter().map(String::as_str))
    });
    let variable = NODES.to_owned();
    builder.build().map_err(|cause| ResolveError::Cluster { variable, cause })
}
