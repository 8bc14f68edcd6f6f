//! Flags that parse, and have no effect or a useless one beside the others: they are refused by name.

use std::path::Path;

use clap::CommandFactory;
use pushpull::{ClusterSpec, TaskId};

use super::complaint::{CommandLine, DaemonError};
use super::options::{DaemonOptions, FlagAddress};

/// The flags that have an effect in a task that serves functions alone.
const OF_FUNCTIONS_ALONE: [&str; 22] = [
    "--job",
    "--print-config",
    "--ps-hosts",
    "--worker-hosts",
    "--cluster",
    "--resolve",
    "--num-ps",
    "--num-workers",
    "--base-port",
    "--ps-service",
    "--rendezvous",
    "--advertise",
    "--task-id",
    "--rendezvous-timeout-ms",
    "--exit-with-parent",
    "--job-name",
    "--task-index",
    "--listen",
    "--unix-socket",
    "--insecure",
    "--cuda",
    "--bytes-max",
];

/// Checks that every flag has an effect in a task that serves functions alone.
///
/// # Errors
/// Returns an error that names the first flag without an effect, and the task.
pub(crate) fn check_functions_alone(typed: &CommandLine, task: &TaskId) -> Result<(), DaemonError> {
    let command = DaemonOptions::command();
    let flags = command.get_arguments().filter_map(|argument| argument.get_long());
    let mut flags = flags.map(|flag| format!("--{flag}"));
    let unused = |flag: &String| typed.has_typed(flag) && !OF_FUNCTIONS_ALONE.contains(&&**flag);
    match flags.find(unused) {
        None => Ok(()),
        Some(flag) => Err(typed
            .blame(&flag, &format_args!("it has no effect in {task}, which holds no variables"))),
    }
}

/// Checks that `--elastic-workers` lets in more workers than the cluster does by itself.
///
/// # Errors
/// Returns an error that names the flag if the cluster lists ps tasks alone.
pub(crate) fn check_elastic(typed: &CommandLine, cluster: &ClusterSpec) -> Result<(), DaemonError> {
    let flag = "--elastic-workers";
    match typed.has(flag) && cluster.jobs().count() == 1 {
        true => {
            let fault = "it has no effect, a cluster that lists no workers accepts all of them";
            Err(typed.blame(flag, &fault))
        }
        false => Ok(()),
    }
}

/// Checks that checkpoints outlive the state: they are kept for the case that it is lost.
///
/// # Errors
/// Returns an error that names `--checkpoint-dir` if it is the state directory.
pub(crate) fn check_directories(
    typed: &CommandLine,
    [state, checkpoints]: [Option<&Path>; 2],
) -> Result<(), DaemonError> {
    let is_one = |state: &Path, checkpoints: &Path| {
        let real = |path: &Path| path.canonicalize();
        state == checkpoints
            || real(state).ok().is_some_and(|it| real(checkpoints).ok() == Some(it))
    };
    match state.zip(checkpoints).is_some_and(|(state, checkpoints)| is_one(state, checkpoints)) {
        true => {
            let fault = "it is the --state-dir, and is lost with it: give another directory";
            Err(typed.blame("--checkpoint-dir", &fault))
        }
        false => Ok(()),
    }
}

/// Checks that `--unix-socket` is another path than the address that a flag gives. The task would
/// wait for itself.
///
/// # Errors
/// Returns an error that names `--unix-socket`.
pub(crate) fn check_socket(
    typed: &CommandLine,
    at: FlagAddress<'_>,
    path: &Path,
) -> Result<(), DaemonError> {
    match at.address.strip_prefix("unix:").is_some_and(|own| Path::new(own) == path) {
        true => {
            Err(typed.blame("--unix-socket", &format_args!("it is the address of {}", at.flag)))
        }
        false => Ok(()),
    }
}
