//! [`MarkedProcesses`]: the processes of a job, found by a variable of their environment.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

/// The variable that marks the processes.
const MARK: &str = "PUSHPULL_TEST_MARK";

/// The processes of one job.
pub(crate) struct MarkedProcesses {
    mark: String,
}

/// A process that was running when it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pid: Pid,
    parent: u32,
    line: Vec<String>,
}

impl MarkedProcesses {
    /// The processes of a job with a folder of its own.
    pub(crate) fn new(folder: &Path) -> MarkedProcesses {
        MarkedProcesses { mark: folder.display().to_string() }
    }

    /// Marks a process and those that it will start.
    pub(crate) fn mark(&self, command: &mut Command) {
        command.env(MARK, &self.mark);
    }

    /// Returns the trainers.
    pub(crate) fn tasks(&self) -> Vec<Process> {
        self.all().into_iter().filter(|process| process.has("--exit-with-parent")).collect()
    }

    /// Returns the nearest ancestor of a process that has this in its command line.
    pub(crate) fn ancestor(&self, process: &Process, sign: &str) -> Option<Process> {
        let all = self.all();
        let mut process = process.clone();
        while let Some(parent) = all.iter().find(|other| other.number() == process.parent) {
            if parent.line.iter().any(|word| word.contains(sign)) {
                return Some(parent.clone());
            }
            process = parent.clone();
        }
        None
    }

    /// Returns whether a process is another one, or was started by it or by one that it has started.
    pub(crate) fn is_below(&self, process: &Process, above: &Process) -> bool {
        let all = self.all();
        let mut next = Some(process);
        while let Some(process) = next {
            if process.pid == above.pid {
                return true;
            }
            next = all.iter().find(|other| other.number() == process.parent);
        }
        false
    }

    /// Returns all processes of the job. One that has ended has no environment.
    fn all(&self) -> Vec<Process> {
        let mark = format!("{MARK}={}", self.mark);
        let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let processes = entries.filter_map(|entry| {
            let folder = entry.path();
            let variables = std::fs::read(folder.join("environ")).ok()?;
            let mut variables = variables.split(|byte| *byte == 0);
            variables.any(|variable| variable == mark.as_bytes()).then_some(())?;
            Process::read(&folder)
        });
        processes.collect()
    }
}

impl Process {
    fn read(folder: &Path) -> Option<Process> {
        let pid = Pid::from_raw(folder.file_name()?.to_str()?.parse().ok()?)?;
        let line = std::fs::read(folder.join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).split('\0').map(str::to_owned).collect();
        let status = std::fs::read_to_string(folder.join("status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        Some(Process { pid, parent: parent.trim().parse().ok()?, line })
    }

    fn number(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// Returns whether this is a word of the command line.
    pub(crate) fn has(&self, word: &str) -> bool {
        self.line.iter().any(|other| other == word)
    }

    /// Returns whether the process has not ended. One that nobody has waited for has.
    pub(crate) fn lives(&self) -> bool {
        let folder = PathBuf::from(format!("/proc/{}", self.number()));
        let line = Process::read(&folder).map(|process| process.line);
        line.as_ref() == Some(&self.line)
    }

    /// Kills the process.
    pub(crate) fn kill(&self) {
        // It is one of this test, and may have ended meanwhile.
        let _ = kill_process(self.pid, Signal::KILL);
    }
}
