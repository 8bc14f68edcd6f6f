//! Ranks with `--exit-with-parent` under a launcher that is killed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{LauncherCase, RANK, in_folder};

/// The variable by which the ranks are found.
const MARK: &str = "PUSHPULL_TEST_MARK";

/// Deadline that only ends a hang.
const LONG: Duration = Duration::from_secs(60);

/// Checks that no rank outlives the launcher.
pub(crate) fn check_killed(case: &LauncherCase, folder: &Path) -> Result<Value, String> {
    let files = tempfile::tempdir().unwrap();
    let errors = files.path().join("errors");
    let mark = format!("{MARK}={}", files.path().display());
    // `env` becomes the launcher.
    let mut command = in_folder(folder, "env");
    command.args([&mark, case.program]).args(case.flags.split_ascii_whitespace());
    command.arg(std::env::current_exe().unwrap());
    command.args([RANK, "--steps", "1000000000", "--exit-with-parent"]);
    command.stdout(Stdio::null()).stderr(File::create(&errors).unwrap());
    let mut launcher = command.spawn().unwrap();
    let said = || String::from_utf8_lossy(&std::fs::read(&errors).unwrap()).into_owned();
    let have_begun = wait_until(|| {
        let said = said();
        (0..4).all(|rank| said.contains(&format!("rank {rank} of 4 on ")))
    });
    // It has ended already if the ranks have failed.
    let _ = launcher.kill();
    launcher.wait().unwrap();
    let have_ended = wait_until(|| marked(&mark).is_empty());
    for rank in marked(&mark) {
        // This test has started it, and it may have ended meanwhile.
        let _ = kill_process(rank, Signal::KILL);
    }
    match (have_begun, have_ended) {
        (true, true) => Ok("no rank outlives the launcher".into()),
        (false, _) => Err(format!("the ranks do not begin:\n{}", said())),
        (true, false) => Err("a rank outlives the launcher".to_owned()),
    }
}

/// Waits for a condition. Returns whether it has become true.
fn wait_until(is_met: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !is_met() {
        if start.elapsed() > LONG {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Returns the processes with this variable in their environment. One that has ended has none.
fn marked(mark: &str) -> Vec<Pid> {
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let is_marked = |process: &PathBuf| {
        let variables = std::fs::read(process.join("environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    let processes = entries.map(|entry| entry.path()).filter(is_marked);
    processes.filter_map(|path| Pid::from_raw(path.file_name()?.to_str()?.parse().ok()?)).collect()
}
