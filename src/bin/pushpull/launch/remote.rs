//! The line that an agent runs on a host: a shell that runs a task, and ends it with the launcher.

use std::time::Duration;

use super::plan::{PlannedTask, shell_line};

/// Runs a command in a session of its own, and sends it the signals whose names come as lines. At the
/// end of the input, when the launcher or the connection has ended, it gets SIGTERM, and SIGKILL some
/// seconds later. Arguments: the directory, the seconds, the command.
///
/// - The watcher reads by itself: another program would stay behind when the watcher is ended.
/// - `setsid` does not fork where it is no leader of a group, so the number of the job is that of the
///   group. Until it has run there is no group, but a process.
/// - Shells say how a job has ended. Where nobody reads that, they would die of it, so it goes nowhere.
/// - A signal that is ignored would be ignored by the command as well, so it starts before.
const SCRIPT: &str = r#"cd "$1" || echo "pushpull: the task runs in $PWD" >&2; after=$2; shift 2; exec 3<&0 </dev/null; setsid "$@" 3<&- & task=$!; { send() { kill -s "$1" -- "-$task" || kill -s "$1" "$task"; }; while read -r order <&3; do send "$order"; done; send TERM; while [ "$after" -gt 0 ]; do sleep 1; after=$((after - 1)); done; send KILL; } >/dev/null 2>&1 & watcher=$!; exec 3<&- >/dev/null 2>&1; trap "" HUP INT TERM; wait "$task"; code=$?; kill -s TERM "$watcher"; kill -s TERM -- "-$task" && { sleep 1; kill -s KILL -- "-$task"; }; exit "$code""#;

/// Returns the line for a task that starts in this directory.
pub(super) fn remote_line(task: &PlannedTask, directory: &str, kill_after: Duration) -> String {
    let seconds = kill_after.as_secs().to_string();
    let config = format!("TF_CONFIG={}", task.tf_config);
    let shell = ["exec", "sh", "-c", SCRIPT, "pushpull", directory, &seconds, "env", &config];
    shell_line(shell.into_iter().chain(task.command.iter().map(String::as_str)))
}
