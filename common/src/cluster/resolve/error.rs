//! The errors of resolving a cluster.

use thiserror::Error;

use super::{ClusterSource, NodeListProblem};
use crate::cluster::ClusterError;
use crate::launch::LaunchError;

/// A source that is absent, malformed, incomplete, or contradicts the caller. The configuration is
/// at fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// No resolver has this name.
    #[error(
        "cannot find the resolver {name:?}: expected auto, flags, tf-config, tony, dmlc, slurm, mpi \
         or kubernetes"
    )]
    UnknownResolver {
        /// The name, clipped.
        name: String,
    },
    /// The one source that was asked for is not set.
    #[error("cannot resolve the cluster by {resolver}: {reason}")]
    Absent {
        /// The source.
        resolver: ClusterSource,
        /// The reason.
        reason: String,
    },
    /// No source is set.
    #[error("cannot resolve the cluster: {reasons}")]
    NoSource {
        /// Each source with the reason, separated by semicolons.
        reasons: String,
    },
    /// The value of a variable is malformed.
    #[error("cannot read {variable}={value:?}: expected {expected}")]
    Malformed {
        /// The variable.
        variable: &'static str,
        /// Its value, clipped.
        value: String,
        /// A description of the valid values.
        expected: &'static str,
    },
    /// One variable is set and another that belongs to it is not.
    #[error("cannot use {variable}={value:?}: {missing} is not set")]
    HalfSet {
        /// The variable that is set.
        variable: &'static str,
        /// Its value, clipped.
        value: String,
        /// The variable that is not set.
        missing: &'static str,
    },
    /// The cluster that a variable or several flags describe is invalid.
    #[error("cannot use {variable}: {cause}")]
    Cluster {
        /// The variable or the flags.
        variable: String,
        /// The fault.
        cause: ClusterError,
    },
    /// The rank of this process is malformed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Two values that mean the same differ.
    #[error("cannot use {first} with {second}: they contradict each other")]
    Contradiction {
        /// A flag or variable with its value.
        first: String,
        /// The other flag or variable with its value.
        second: String,
    },
    /// A list of nodes is malformed.
    #[error("cannot read {variable}={value:?}: {problem}")]
    NodeList {
        /// The variable.
        variable: &'static str,
        /// Its value, clipped.
        value: String,
        /// The fault.
        problem: NodeListProblem,
    },
    /// The nodes of a Slurm step and the numbers of tasks on them do not match.
    #[error(
        "cannot match SLURM_STEP_NODELIST={nodes:?} with SLURM_STEP_TASKS_PER_NODE={tasks:?}: \
         {found}"
    )]
    Nodes {
        /// The list of nodes, clipped.
        nodes: String,
        /// The list of numbers of tasks, clipped.
        tasks: String,
        /// The two counts.
        found: String,
    },
    /// The tasks of a Slurm step are not numbered node by node.
    #[error(
        "cannot find the nodes of the ranks: rank {rank} is task {local} on node {node}, not where \
         a block distribution places it: give srun --distribution=block"
    )]
    Distribution {
        /// The rank of this process.
        rank: u32,
        /// `SLURM_NODEID`.
        node: String,
        /// `SLURM_LOCALID`.
        local: String,
    },
    /// A value of the caller is needed to divide the processes among jobs, or to find them.
    #[error("cannot resolve the cluster by {resolver}: {flag} is needed, {purpose}")]
    Needed {
        /// The source.
        resolver: ClusterSource,
        /// The flag that gives the value.
        flag: &'static str,
        /// The use of the value.
        purpose: &'static str,
    },
    /// The source numbers fewer processes than there are tasks.
    #[error("cannot divide {size_variable}={size} processes into {num_ps} ps tasks and workers")]
    TooFewProcesses {
        /// The variable of the number of processes.
        size_variable: &'static str,
        /// The number of processes.
        size: u32,
        /// The number of ps tasks.
        num_ps: u32,
    },
    /// The index of this task is not below the number of tasks of its job.
    #[error("cannot use {variable}={value}: the job {job} has {tasks} tasks, by {flag}")]
    IndexTooHigh {
        /// The variable with the index.
        variable: &'static str,
        /// Its value, clipped.
        value: String,
        /// The job.
        job: String,
        /// The number of its tasks.
        tasks: u32,
        /// The flag with the number.
        flag: &'static str,
    },
    /// The port of a task is above 65535.
    #[error("cannot give a port to task {local} of {host}: --base-port is {base}")]
    Port {
        /// The host.
        host: String,
        /// The number of the task on its host.
        local: u32,
        /// The port of the first task.
        base: u16,
    },
    /// Nobody tells the addresses of the ps tasks.
    #[error("cannot find the ps tasks: {resolver} tells nobody its peers: give {remedy}")]
    NoPeers {
        /// The source.
        resolver: ClusterSource,
        /// The flag that helps.
        remedy: &'static str,
    },
    /// Two clusters of a union have the same task.
    #[error("cannot unite clusters that both have /job:{job}/task:{index}")]
    TaskTwice {
        /// The job.
        job: String,
        /// The index.
        index: u32,
    },
}
