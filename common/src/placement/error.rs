//! Why variables cannot be placed as asked.

use thiserror::Error;

use super::{Placement, ShardMap};
use crate::cluster::ClusterError;
use crate::variable::VariableError;

/// Why variables cannot be placed. Always the fault of the caller's configuration.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// No ps task to place anything on.
    #[error("cannot place variables: there is no ps task")]
    NoTasks,
    /// The cluster has no job `ps`.
    #[error("cannot place variables: {source}")]
    Cluster {
        /// What is wrong with the cluster.
        source: ClusterError,
    },
    /// A ps task is listed twice.
    #[error("cannot place variables: the ps task {task} is listed twice")]
    DuplicateTask {
        /// The task's index.
        task: u32,
    },
    /// Tasks without shards, or more shards than [`ShardMap::SHARDS_MAX`].
    #[error(
        "cannot place variables on {tasks} tasks of {shards_per_task} shards: the cluster has 1 \
         to {} shards",
        ShardMap::SHARDS_MAX
    )]
    Shards {
        /// How many tasks there are.
        tasks: usize,
        /// How many shards each has.
        shards_per_task: u16,
    },
    /// A variable whose initializer or partitioner cannot be used.
    #[error("cannot place variables: {source}")]
    Variable {
        /// What is wrong with the variable.
        source: VariableError,
    },
    /// A variable pinned to a job other than `ps`.
    #[error(
        "cannot place the variable {variable:?} on {device}: only the ps tasks {tasks} hold \
         variables"
    )]
    PinnedJob {
        /// The variable's name.
        variable: String,
        /// The device it is pinned to.
        device: String,
        /// The ps tasks there are, such as `0-3, 5`.
        tasks: String,
    },
    /// A variable pinned to a ps task that does not exist.
    #[error("cannot place the variable {variable:?} on ps task {task}: there are only {tasks}")]
    PinnedTask {
        /// The variable's name.
        variable: String,
        /// The task it is pinned to.
        task: u32,
        /// The ps tasks there are, such as `0-3, 5`.
        tasks: String,
    },
    /// A custom strategy chose a ps task that does not exist.
    #[error(
        "cannot place part {part} of the variable {variable:?} on ps task {task}, as the custom \
         strategy chose: there are only {tasks}"
    )]
    CustomTask {
        /// The variable's name.
        variable: String,
        /// The part's index.
        part: u32,
        /// The task it chose.
        task: u32,
        /// The ps tasks there are, such as `0-3, 5`.
        tasks: String,
    },
    /// A custom strategy where no variable is at hand to show it.
    #[error("cannot set devices by a custom strategy: it chooses by the whole variable")]
    CustomSetter,
    /// More partitions than [`Placement::PARTITIONS_MAX`].
    #[error(
        "cannot place the variable {variable:?}: there are more than {} partitions with it",
        Placement::PARTITIONS_MAX
    )]
    TooManyPartitions {
        /// The variable's name.
        variable: String,
    },
    /// All variables together have more bytes than 64 bits can count.
    #[error("cannot place the variable {variable:?}: with it the bytes exceed 64 bits")]
    TooManyBytes {
        /// The variable's name.
        variable: String,
    },
}
