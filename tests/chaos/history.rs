//! What a worker has done, by its own word: written by it line by line outside of the servers'
//! state, read by whoever judges.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::setting::SHARDS;

/// The writing end. A line is one write, so it is there whole however the worker dies.
#[derive(Debug)]
pub(crate) struct Log(File);

impl Log {
    pub(crate) fn open(path: &Path) -> io::Result<Log> {
        OpenOptions::new().create(true).append(true).open(path).map(Log)
    }

    /// A process begins: whatever was open before it has no answer, and gets none.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        self.line("start")
    }

    /// A push is about to be made. Written before, so that no push is unknown to the log.
    pub(crate) fn invoke(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("invoke {push}"))
    }

    /// A push is acknowledged.
    pub(crate) fn acknowledged(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("ok {push}"))
    }

    /// A push came too late: it is nowhere.
    pub(crate) fn stale(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("stale {push}"))
    }

    /// A push was refused because its token was another's by then: it is nowhere.
    pub(crate) fn refused(&mut self, push: u64) -> io::Result<()> {
        self.line(&format!("refused {push}"))
    }

    /// A checkpoint was restored: what is there of earlier pushes is what it had.
    pub(crate) fn restored(&mut self) -> io::Result<()> {
        self.line("restored")
    }

    /// The worker has seen what must not be, or has failed.
    pub(crate) fn fault(&mut self, what: &str) -> io::Result<()> {
        self.line(&format!("fault {}", what.replace('\n', " ")))
    }

    fn line(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes())
    }
}

/// What pushes since the last restore have come to at one element of a ledger. More than one push meets
/// there only in runs that are longer than the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) invoked: u64,
    pub(crate) acknowledged: u64,
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct History {
    path: PathBuf,
    file: Option<File>,
    partial: Vec<u8>,
    /// One for each element of the worker's ledger.
    pub(crate) entries: Vec<Entry>,
    /// The push that has no answer yet, of the process that lives.
    pub(crate) open: Option<u64>,
    /// How many processes there have been.
    pub(crate) starts: u64,
    pub(crate) invoked: u64,
    pub(crate) acknowledged: u64,
    /// Pushes that came too late for their synchronous step.
    pub(crate) stale: u64,
    /// Pushes that were refused, as their tokens had expired.
    pub(crate) refused: u64,
    /// Pushes from here on were begun after the last restore.
    pub(crate) restored_at: u64,
    /// What the last restore has found, for each element and on each shard.
    pub(crate) base: Vec<[f32; SHARDS]>,
    pub(crate) faults: Vec<String>,
}

impl History {
    /// Of a log that need not be there yet.
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

    /// Reads what has been written since.
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

    /// The number of the next push: past everything that was ever begun.
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
        assert_eq!(self.open.take(), Some(push), "what is acknowledged was open");
        self.acknowledged += 1;
        self.entry(push).acknowledged += 1;
    }

    /// A push that came too late, or was refused, must not be there.
    pub(crate) fn forget(&mut self, push: u64) {
        assert_eq!(self.open.take(), Some(push), "what is refused was open");
        self.entry(push).invoked -= 1;
    }

    /// Whether this is the only push that its element has had since the ledger was begun, and it was begun
    /// after the last restore.
    pub(crate) fn is_first_there(&self, push: u64) -> bool {
        push >= self.restored_at && push < self.entries.len() as u64
    }

    /// What is there now is told in the base.
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
    text.parse().expect("a history holds numbers")
}
