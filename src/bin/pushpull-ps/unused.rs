//! Flags that parse, and have no effect beside the others: they are refused by name.

use clap::CommandFactory;
use pushpull::TaskId;

use super::complaint::{CommandLine, DaemonError};
use super::options::DaemonOptions;

/// The flags that have an effect in a task that serves functions alone.
const OF_FUNCTIONS_ALONE: [&str; 10] = [
    "--ps-hosts",
    "--worker-hosts",
    "--cluster",
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
    let unused = |flag: &String| typed.has(flag) && !OF_FUNCTIONS_ALONE.contains(&&**flag);
    match flags.find(unused) {
        None => Ok(()),
        Some(flag) => Err(typed
            .blame(&flag, &format_args!("it has no effect in {task}, which holds no variables"))),
    }
}

/// Checks the flags that decide which checkpoints are kept.
///
/// # Errors
/// Returns an error that names `--keep-every-hours` if `--max-to-keep` keeps all.
pub(crate) fn check_retention(
    typed: &CommandLine,
    max_to_keep: usize,
    keep_every_hours: u32,
) -> Result<(), DaemonError> {
    let flag = "--keep-every-hours";
    match max_to_keep == 0 && keep_every_hours > 0 && typed.has(flag) {
        true => Err(typed.blame(flag, &"it has no effect, --max-to-keep 0 keeps all checkpoints")),
        false => Ok(()),
    }
}
