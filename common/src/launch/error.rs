//! The errors of finding a process's place in its job.

use crate::protocol::limits;
use thiserror::Error;

/// Missing, malformed or contradictory variables of a launcher. The configuration is at fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher has started this process, or it passes no rank.
    #[error(
        "cannot find the rank of this process: it is no task of a Slurm step, and none of these \
         variables is set: {variables}"
    )]
    NoLauncher {
        /// The variables of the ranks, separated by commas.
        variables: String,
    },
    /// A Slurm job has several tasks, and this process is none of them.
    #[error(
        "cannot find the rank of this process: it is in the Slurm job {job} with \
         SLURM_NTASKS={tasks}, but in no step: start the program with srun"
    )]
    OutsideStep {
        /// The id of the Slurm job, clipped.
        job: String,
        /// The number of tasks of the job.
        tasks: u32,
    },
    /// A rank has no size.
    #[error("cannot use {rank_variable}={rank}: {size_variable} is not set")]
    NoSize {
        /// The variable of the rank.
        rank_variable: &'static str,
        /// Its value.
        rank: u32,
        /// The variable of the size.
        size_variable: &'static str,
    },
    /// A size has no rank.
    #[error("cannot use {size_variable}={size}: {rank_variable} is not set")]
    NoRank {
        /// The variable of the size.
        size_variable: &'static str,
        /// Its value.
        size: u32,
        /// The variable of the rank.
        rank_variable: &'static str,
    },
    /// A value is empty, is no number in plain decimal digits, or has more than 32 bits.
    #[error("cannot read {variable}={value:?}: expected a number")]
    NotNumber {
        /// The variable.
        variable: &'static str,
        /// Its value, clipped.
        value: String,
    },
    /// A size is 0 or above [`limits::RING_SIZE_MAX`].
    #[error("cannot use {variable}={size}: a size is a number from 1 to {}", limits::RING_SIZE_MAX)]
    Size {
        /// The variable.
        variable: &'static str,
        /// Its value.
        size: u32,
    },
    /// A rank is not below its size.
    #[error("cannot use {rank_variable}={rank} with {size_variable}={size}: ranks begin at 0")]
    RankTooHigh {
        /// The variable of the rank or local rank.
        rank_variable: &'static str,
        /// Its value.
        rank: u32,
        /// The variable of the size or local size.
        size_variable: &'static str,
        /// Its value.
        size: u32,
    },
    /// A host has more processes than the job.
    #[error(
        "cannot use {local_variable}={local_size} with {size_variable}={size}: a host has a part \
         of the job"
    )]
    LocalSize {
        /// The variable of the local size.
        local_variable: &'static str,
        /// Its value.
        local_size: u32,
        /// The variable of the size.
        size_variable: &'static str,
        /// Its value.
        size: u32,
    },
    /// Two variables that mean the same have different values.
    #[error(
        "cannot choose between {first_variable}={first} and {second_variable}={second}: unset the \
         variables of one launcher"
    )]
    Contradiction {
        /// The variable that is read first.
        first_variable: &'static str,
        /// Its value.
        first: u32,
        /// The other variable.
        second_variable: &'static str,
        /// Its value.
        second: u32,
    },
    /// The list of tasks on each node of a Slurm step is malformed.
    #[error("cannot read SLURM_STEP_TASKS_PER_NODE={value:?}: expected a list such as \"2(x3),1\"")]
    TasksPerNode {
        /// The value, clipped.
        value: String,
    },
    /// The list of tasks on each node of a Slurm step lacks this process.
    #[error(
        "cannot use SLURM_STEP_TASKS_PER_NODE={value:?} with SLURM_NODEID={node} and \
         SLURM_LOCALID={local_rank}: it counts no such task"
    )]
    NoSuchTask {
        /// The list, clipped.
        value: String,
        /// The number of this node in the step.
        node: u32,
        /// The number of this task on the node.
        local_rank: u32,
    },
    /// The address of the rendezvous is not `host:port`.
    #[error("cannot use {variable}={value:?}: expected host:port, the port from 1 to 65535")]
    Rendezvous {
        /// The variable, or the variables of host and port.
        variable: &'static str,
        /// The address, clipped.
        value: String,
    },
}

/// Returns the first 80 characters: an error about hostile text must not carry all of it.
pub(super) fn clip(text: &str) -> String {
    match text.char_indices().nth(CLIP_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

const CLIP_CHARS: usize = 80;
