//! [`MarkedJob`]: a command whose processes are found, also those that outlive it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The variable by which the processes are found.
const MARK: &str = "PUSHPULL_TEST_MARK";

/// Deadline that only ends a hang.
const LONG: Duration = Duration::from_secs(60);

/// A command that runs, and all processes that it has started. They are killed when the value is
/// dropped.
pub(crate) struct MarkedJob {
    launcher: Child,
    mark: String,
    files: tempfile::TempDir,
}

impl MarkedJob {
    /// Starts a command. Its processes print to files: one that outlives it would keep a pipe open.
    pub(crate) fn start(mut command: Command) -> MarkedJob {
        let files = tempfile::tempdir().unwrap();
        let create = |name| File::create(files.path().join(name)).unwrap();
        command.env(MARK, files.path()).stdout(create("output")).stderr(create("errors"));
        let launcher = command.spawn().unwrap();
        MarkedJob { launcher, mark: format!("{MARK}={}", files.path().display()), files }
    }

    /// Returns what the processes have printed.
    pub(crate) fn output(&self) -> String {
        self.read("output")
    }

    /// Returns what the processes have printed as errors.
    pub(crate) fn errors(&self) -> String {
        self.read("errors")
    }

    fn read(&self, name: &str) -> String {
        let path = self.files.path().join(name);
        String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()
    }

    /// Returns the processes that live.
    pub(crate) fn processes(&self) -> Vec<Pid> {
        self.found().filter_map(|path| Pid::from_raw(number(&path)?)).collect()
    }

    /// Returns a process whose program is this one.
    pub(crate) fn process_of(&self, program: &str) -> Option<Pid> {
        let runs = |path: &PathBuf| {
            std::fs::read_link(path.join("exe")).is_ok_and(|exe| exe == Path::new(program))
        };
        self.found().find(runs).and_then(|path| Pid::from_raw(number(&path)?))
    }

    /// Returns the folders of the processes in `/proc`. One that has ended has no environment.
    fn found(&self) -> impl Iterator<Item = PathBuf> {
        let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        entries.map(|entry| entry.path()).filter(|process| {
            let variables = std::fs::read(process.join("environ")).unwrap_or_default();
            variables.split(|byte| *byte == 0).any(|variable| variable == self.mark.as_bytes())
        })
    }

    /// Kills the command alone.
    pub(crate) fn kill_launcher(&mut self) {
        // It has ended already if what it started has failed.
        let _ = self.launcher.kill();
        self.launcher.wait().unwrap();
    }

    /// Waits until the command has ended.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus, String> {
        let mut status = None;
        wait_until(|| {
            status = self.launcher.try_wait().unwrap();
            status.is_some()
        });
        status.ok_or_else(|| format!("does not end:\n{}\n{}", self.output(), self.errors()))
    }
}

impl Drop for MarkedJob {
    fn drop(&mut self) {
        for process in self.processes() {
            // It may have ended meanwhile.
            let _ = kill_process(process, Signal::KILL);
        }
        self.kill_launcher();
    }
}

/// Returns the number of a process by its folder.
fn number(folder: &Path) -> Option<i32> {
    folder.file_name()?.to_str()?.parse().ok()
}

/// Waits for a condition. Returns whether it has become true.
pub(crate) fn wait_until(mut is_met: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !is_met() {
        if start.elapsed() > LONG {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
