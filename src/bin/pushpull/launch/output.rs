//! [`Printer`]: what the launcher prints and logs, written by a thread of its own.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::lines::LineSplitter;

/// Where the launcher's own lines and those of a task go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// The standard output.
    Output,
    /// The standard error.
    Errors,
}

/// Bytes that are read from a task at once.
const READ_BYTES: usize = 16 << 10;

/// Reads of all tasks that may wait for the thread. Tasks whose output nobody takes wait then, as they
/// would without a launcher: no line is lost.
const WAITING_READS_MAX: usize = 64;

/// A piece of output.
struct Piece {
    stream: Stream,
    text: Vec<u8>,
    log: Option<usize>,
    /// Given back once the piece is written. The launcher's own lines have none: they are few for each
    /// start and end of a task.
    _room: Option<OwnedSemaphorePermit>,
}

/// Queues pieces for the thread that writes them.
#[derive(Clone, Debug)]
pub(super) struct Printer {
    pieces: Sender<Piece>,
    room: Arc<Semaphore>,
}

impl Printer {
    /// Starts the thread. It ends, and completes the receiver, once all printers are dropped.
    pub(super) fn start(logs: Vec<LogFile>) -> io::Result<(Printer, oneshot::Receiver<()>)> {
        let (pieces, received) = mpsc::channel();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("output".to_owned());
        thread.spawn(move || {
            Writer { logs, outputs: [true, true] }.write_all(&received);
            // The launcher may have stopped waiting.
            let _ = end.send(());
        })?;
        let room = Arc::new(Semaphore::new(WAITING_READS_MAX));
        Ok((Printer { pieces, room }, ended))
    }

    /// Prints a line of the launcher.
    pub(super) fn say(&self, line: &str) {
        self.print(Stream::Output, format!("{line}\n").into_bytes(), None, None);
    }

    /// Prints a line of the launcher about something that went wrong.
    pub(super) fn complain(&self, line: &str) {
        self.print(Stream::Errors, format!("pushpull: {line}\n").into_bytes(), None, None);
    }

    /// Prints what a task writes, until it has closed its end. `log` is the number of its log file.
    pub(super) async fn copy(
        self,
        mut from: impl AsyncRead + Unpin,
        stream: Stream,
        mut lines: LineSplitter,
        log: Option<usize>,
    ) {
        let mut bytes = vec![0; READ_BYTES];
        loop {
            let read = from.read(&mut bytes).await;
            let text = match &read {
                Ok(count @ 1..) => lines.take(&bytes[..*count]),
                _ => lines.finish(),
            };
            if !text.is_empty() {
                let Ok(room) = self.room.clone().acquire_owned().await else { return };
                self.print(stream, text, log, Some(room));
            }
            match read {
                Ok(1..) => {}
                Ok(0) => return,
                Err(error) => {
                    return self.complain(&format!("cannot read the output of a task: {error}"));
                }
            }
        }
    }

    fn print(
        &self,
        stream: Stream,
        text: Vec<u8>,
        log: Option<usize>,
        room: Option<OwnedSemaphorePermit>,
    ) {
        // The thread lasts as long as this printer.
        let _ = self.pieces.send(Piece { stream, text, log, _room: room });
    }
}

/// A file with the lines of one task.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    /// Nothing once a write has failed.
    file: Option<File>,
}

impl LogFile {
    /// Opens a file in a directory, to append to it.
    ///
    /// # Errors
    /// Returns the path with the error.
    pub(super) fn open(directory: &Path, name: &str) -> Result<LogFile, String> {
        let path = directory.join(format!("{}.log", name.replace(':', "-")));
        let file = File::options().append(true).create(true).open(&path);
        let file = file.map_err(|error| format!("--logs: {}: {error}", path.display()))?;
        Ok(LogFile { path, file: Some(file) })
    }
}

/// The state of the thread.
struct Writer {
    logs: Vec<LogFile>,
    /// Whether each stream of the launcher can still be written.
    outputs: [bool; 2],
}

impl Writer {
    fn write_all(&mut self, pieces: &Receiver<Piece>) {
        for Piece { stream, text, log, _room } in pieces {
            if let Some(log) = log {
                self.log(log, &text);
            }
            self.write(stream, &text);
        }
    }

    /// Writes to the standard output or error. The launch goes on if nobody reads: its tasks train.
    fn write(&mut self, stream: Stream, text: &[u8]) {
        if !self.outputs[stream as usize] {
            return;
        }
        let written = match stream {
            Stream::Output => io::stdout().write_all(text).and_then(|()| io::stdout().flush()),
            Stream::Errors => io::stderr().write_all(text),
        };
        if let Err(error) = written {
            self.outputs[stream as usize] = false;
            if stream == Stream::Output {
                let line =
                    format!("pushpull: nothing more is printed on the standard output: {error}\n");
                self.write(Stream::Errors, line.as_bytes());
            }
        }
    }

    /// Writes to a log file. The first error of a file is its last: a line may be torn.
    fn log(&mut self, log: usize, text: &[u8]) {
        let LogFile { path, file } = &mut self.logs[log];
        let Some(open) = file else { return };
        if let Err(error) = open.write_all(text) {
            *file = None;
            let line = format!("pushpull: nothing more is logged in {}: {error}\n", path.display());
            self.write(Stream::Errors, line.as_bytes());
        }
    }
}
