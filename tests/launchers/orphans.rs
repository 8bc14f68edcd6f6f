//! Ranks with `--exit-with-parent` under a launcher that is killed.

use std::path::Path;

use serde_json::Value;

use super::marked_job::{MarkedJob, wait_until};
use super::{LauncherCase, RANK, in_folder};

/// Checks that no rank outlives the launcher.
pub(crate) fn check_killed(case: &LauncherCase, folder: &Path) -> Result<Value, String> {
    // `env` becomes the launcher.
    let mut command = in_folder(folder, "env");
    command.arg(case.program).args(case.flags.split_ascii_whitespace());
    command.arg(std::env::current_exe().unwrap());
    command.args([RANK, "--steps", "1000000000", "--exit-with-parent"]);
    let mut job = MarkedJob::start(command);
    let have_begun = wait_until(|| {
        let said = job.errors();
        (0..4).all(|rank| said.contains(&format!("rank {rank} of 4 on ")))
    });
    job.kill_launcher();
    match (have_begun, wait_until(|| job.processes().is_empty())) {
        (true, true) => Ok("no rank outlives the launcher".into()),
        (false, _) => Err(format!("the ranks do not begin:\n{}", job.errors())),
        (true, false) => Err("a rank outlives the launcher".to_owned()),
    }
}
