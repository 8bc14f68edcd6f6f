//! The folder of a run, with its states, sockets and logs. It is kept if the run fails.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of a run, removed on drop.
///
/// After a failure, or if it is dropped in a panic, it prints the last lines of all logs and is
/// kept.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    keep: bool,
}

/// How many lines of each log are printed.
const TAIL: usize = 8;

impl RunFolder {
    /// Creates a folder in `/dev/shm` if possible: the test kills processes, not machines, and a
    /// disk would only slow it down.
    pub(crate) fn new() -> RunFolder {
        let prefix = "pushpull-chaos-";
        let build = |folder: &Path| tempfile::Builder::new().prefix(prefix).tempdir_in(folder);
        let folder = build(Path::new("/dev/shm")).or_else(|_| build(&std::env::temp_dir()));
        let path = folder.expect("a folder for the run").keep();
        RunFolder { path, keep: false }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Marks the run as failed, so that drop keeps the folder.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }

    fn print_logs(&self) {
        let mut logs = Vec::new();
        collect_logs(&self.path, &mut logs);
        logs.sort();
        for log in logs {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("-- {} ({} lines)", log.display(), lines.len());
            for line in &lines[lines.len().saturating_sub(TAIL)..] {
                eprintln!("   {line}");
            }
        }
        eprintln!("the states and the logs are kept in {}", self.path.display());
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if self.keep || std::thread::panicking() {
            self.print_logs();
        } else {
            // A folder that cannot be removed does not change the result.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn collect_logs(folder: &Path, logs: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect_logs(&path, logs);
        } else if path.extension().is_some_and(|extension| extension == "log") {
            logs.push(path);
        }
    }
}
