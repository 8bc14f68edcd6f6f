//! The file of JSON lines beside an event file.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use super::error::SummaryError;
use crate::append_buffer::AppendBuffer;

/// Appends lines to an output. A line is accepted as a whole or refused.
#[derive(Debug)]
pub(super) struct JsonLines<W: Write = File> {
    path: PathBuf,
    output: AppendBuffer<W>,
}

impl JsonLines {
    pub(super) fn sync(&mut self) -> Result<(), SummaryError> {
        self.flush()?;
        let synced = self.output.output_mut().sync_data();
        synced.map_err(|source| self.error(source))
    }
}

impl<W: Write> JsonLines<W> {
    pub(super) fn new(path: impl Into<PathBuf>, output: W) -> JsonLines<W> {
        JsonLines { path: path.into(), output: AppendBuffer::new(output) }
    }

    pub(super) fn append(&mut self, line: &str) -> Result<(), SummaryError> {
        self.output.append(&[line.as_bytes()]).map_err(|source| self.error(source))
    }

    pub(super) fn flush(&mut self) -> Result<(), SummaryError> {
        self.output.flush().map_err(|source| self.error(source))
    }

    /// Returns the number of accepted lines that are not completely written.
    pub(super) fn buffered(&self) -> usize {
        self.output.buffered()
    }

    fn error(&self, source: io::Error) -> SummaryError {
        SummaryError::JsonLines { path: self.path.clone(), source }
    }
}

impl<W: Write> Drop for JsonLines<W> {
    fn drop(&mut self) {
        // A destructor cannot report errors: a program that needs them calls `flush`.
        let _ = self.flush();
    }
}
