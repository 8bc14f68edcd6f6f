//! Where the states, the sockets and the logs of a run lie; kept when the run fails.

use std::fs;
use std::path::{Path, PathBuf};

/// A folder of the run. When it is dropped in a panic, it tells the ends of all logs, and stays.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    keep: bool,
}

/// Lines of each log that a failure shows.
const TAIL: usize = 8;

impl Place {
    /// A fresh folder, in memory if this machine has such a file system: what is tested is the
    /// death of processes, and a disk would only make it slow.
    pub(crate) fn new() -> Place {
        let prefix = "pushpull-chaos-";
        let build = |folder: &Path| tempfile::Builder::new().prefix(prefix).tempdir_in(folder);
        let folder = build(Path::new("/dev/shm")).or_else(|_| build(&std::env::temp_dir()));
        let path = folder.expect("a folder for the run").keep();
        Place { path, keep: false }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The run has failed without a panic.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }

    fn tell(&self) {
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

impl Drop for Place {
    fn drop(&mut self) {
        if self.keep || std::thread::panicking() {
            self.tell();
        } else {
            // What cannot be removed does not change what was found.
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
