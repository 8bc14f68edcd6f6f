//! The error of an impossible placement.

use thiserror::Error;

use super::{Placement, ShardMap};
use crate::cluster::ClusterError;
use crate::variable::VariableError;

/// The reason why variables cannot be placed. The caller's configuration is at fault.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// There is no ps task.
    #[error("cannot place variables: there is no ps task")]
    NoTasks,
    /// No job of the cluster holds variables, or several could.
    #[error("cannot place variables")]
    Cluster {
        /// The cluster's error.
        source: ClusterError,
    },
    /// A ps task is listed twice.
    #[error("cannot place variables: the ps task {task} is listed twice")]
    DuplicateTask {
        /// The task's index.
        task: u32,
    },
    /// There are no shards, or more than [`ShardMap::SHARDS_MAX`].
    #[error(
        "cannot place variables on {tasks} tasks of {shards_per_task} shards: the cluster has 1 \
         to {} shards",
        ShardMap::SHARDS_MAX
    )]
    Shards {
        /// The number of tasks.
        tasks: usize,
        /// The number of shards of each task.
        shards_per_task: u16,
    },
    /// A variable's declaration is invalid.
    #[error("cannot place variables")]
    Variable {
        /// The variable's error.
        source: VariableError,
    },
    /// A variable is pinned to a job that does not hold variables.
    #[error(
        "cannot place the variable {variable:?} on {device}: only the {job} tasks {tasks} hold \
         variables"
    )]
    PinnedJob {
        /// The variable's name.
        variable: String,
        /// The device that it is pinned to.
        device: String,
        /// The job that holds the variables.
        job: String,
        /// The ps tasks of the cluster, such as `0-3, 5`.
        tasks: String,
    },
    /// A variable is pinned to a ps task that does not exist.
    #[error("cannot place the variable {variable:?} on {job} task {task}: there are only {tasks}")]
    PinnedTask {
        /// The variable's name.
        variable: String,
        /// The job that holds the variables.
        job: String,
        /// The task that it is pinned to.
        task: u32,
        /// The ps tasks of the cluster, such as `0-3, 5`.
        tasks: String,
    },
    /// A custom strategy chose a ps task that does not exist.
    #[error(
        "cannot place part {part} of the variable {variable:?} on {job} task {task}, as the \
         custom strategy chose: there are only {tasks}"
    )]
    CustomTask {
        /// The variable's name.
        variable: String,
        /// The part's index.
        part: u32,
        /// The job that holds the variables.
        job: String,
        /// The chosen task.
        task: u32,
        /// The ps tasks of the cluster, such as `0-3, 5`.
        tasks: String,
    },
    /// A device setter cannot use a custom strategy, which needs the whole variable.
    #[error("cannot set devices by a custom strategy: it chooses by the whole variable")]
    CustomSetter,
    /// There are more partitions than [`Placement::PARTITIONS_MAX`].
    #[error(
        "cannot place the variable {variable:?}: there are more than {} partitions with it",
        Placement::PARTITIONS_MAX
    )]
    TooManyPartitions {
        /// The variable's name.
        variable: String,
    },
    /// The bytes of all variables together exceed 64 bits.
    #[error("cannot place the variable {variable:?}: with it the bytes exceed 64 bits")]
    TooManyBytes {
        /// The variable's name.
        variable: String,
    },
}
