//! The history of a worker: a log of its pushes, which the worker writes and the test reads. It is
//! separate from the servers' state.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::setting::SHARDS;

/// The writing end of a history. Each line is one write, so no kill leaves a part of a line.
#[derive(Debug)]
pub(crate) struct Log(File);

impl Log {
    pub(crate) fn open(path: &Path) -> io::Result<Log> {
        OpenOptions::new().create(true).append(true).open(path).map(Log)
    }

    /// Logs the start of a process. A push that is open now will never have an outcome.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        self.line("start")
    }

    /// Logs a push before it starts, so that the log knows every push.
    pub(crate) fn invoke(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("invoke {push}"))
    }

    /// Logs that a push was acknowledged.
    pub(crate) fn acknowledged(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("ok {push}"))
    }

    /// Logs that a push was stale: no shard may have it.
    pub(crate) fn stale(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("stale {push}"))
    }

    /// Logs that a push was refused because its token had expired: no shard may have it.
    pub(crate) fn refused(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("refused {push}"))
    }

    /// Logs that a checkpoint was restored. Of earlier pushes the servers have what it contained.
    pub(crate) fn restored(&mut self) -> io::Result<()> {
        self.line("restored")
    }

    /// Logs that the worker has found an inconsistency or has failed.
    pub(crate) fn fault(&mut self, what: &str) -> io::Result<()> {
        self.line(&format!("fault {}", what.replace('\n', " ")))
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes())
    }
}

/// The counts of pushes to one element of a ledger since the last restore. An element has more than
/// one push only in runs that are longer than the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) invoked: u64,
    pub(crate) acknowledged: u64,
}

/// The reading end of a history.
#[derive(Debug)]
pub(crate) struct History {
    path: PathBuf,
    file: Option<File>,
    partial: Vec<u8>,
    /// One entry for each element of the worker's ledger.
    pub(crate) entries: Vec<Entry>,
    /// The push of the running process that has no outcome yet.
    pub(crate) open: Option<u64>,
    /// How many processes have started.
    pub(crate) starts: u64,
    pub(crate) invoked: u64,
    pub(crate) acknowledged: u64,
    /// Pushes that were stale for their synchronous step.
    pub(crate) stale: u64,
    /// Pushes that were refused because their tokens had expired.
    pub(crate) refused: u64,
    /// The first push that was started after the last restore.
    pub(crate) restored_at: u64,
    /// The ledger after the last restore: each element on each shard.
    pub(crate) base: Vec<[f32; SHARDS]>,
    pub(crate) faults: Vec<String>,
}

impl History {
    /// Returns the history of a log file, which need not exist yet.
    pub(crate) fn of(path: PathBuf, elements: u64) -> History {
        let entries = vec![Entry::default(); elements as usize];
        History {
            path,
            file: None,
            partial: Vec::new(),
            base: vec![[0.0; SHARDS]; entries.len()],
            entries,
            open: None,
            starts: 0,
            invoked: 0,
            acknowledged: 0,
            stale: 0,
            refused: 0,
            restored_at: 0,
            faults: Vec::new(),
        }
    }

    /// Reads the lines that were written since the last call.
    pub(crate) fn catch_up(&mut self) {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else { return };
        file.read_to_end(&mut self.partial).expect("a history can be read");
        let whole = self.partial.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let lines: Vec<u8> = self.partial.drain(..whole).collect();
        for line in String::from_utf8_lossy(&lines).lines() {
            self.take(line);
        }
    }

    /// Returns the number of the next push, above all that were ever started.
    pub(crate) fn next(&self) -> u64 {
        self.invoked
    }

    fn take(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "start" => {
                self.starts += 1;
                self.open = None;
            }
            "invoke" => self.invoke(number(rest)),
            "ok" => self.acknowledge(number(rest)),
            "stale" => {
                self.stale += 1;
                self.forget(number(rest));
            }
            "refused" => {
                self.refused += 1;
                self.forget(number(rest));
            }
            "restored" => self.restored(),
            _ => self.faults.push(rest.to_owned()),
        }
    }

    pub(crate) fn invoke(&mut self, push: u64) {
        assert_eq!(push, self.invoked, "pushes are numbered in order");
        self.invoked += 1;
        self.open = Some(push);
        self.entry(push).invoked += 1;
    }

    pub(crate) fn acknowledge(&mut self, push: u64) {
        assert_eq!(self.open.take(), Some(push), "an acknowledged push was open");
        self.acknowledged += 1;
        self.entry(push).acknowledged += 1;
    }

    /// Records that a push was stale or refused, so that no shard may have it.
    pub(crate) fn forget(&mut self, push: u64) {
        assert_eq!(self.open.take(), Some(push), "a refused push was open");
        self.entry(push).invoked -= 1;
    }

    /// Whether this push is the first to its element and was started after the last restore.
    pub(crate) fn is_first_there(&self, push: u64) -> bool {
        push >= self.restored_at && push < self.entries.len() as u64
    }

    /// Resets the entries after a restore. The caller puts the restored values into `base`.
    fn restored(&mut self) {
        self.restored_at = self.invoked;
        self.open = None;
        self.entries.fill(Entry::default());
    }

    fn entry(&mut self, push: u64) -> &mut Entry {
        let elements = self.entries.len() as u64;
        &mut self.entries[(push % elements) as usize]
    }
}

fn number(text: &str) -> u64 {
    text.parse().expect("a history has a number here")
}
