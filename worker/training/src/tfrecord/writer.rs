//! Appends records to a TFRecord file.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pushpull_common::local_path;
use pushpull_common::record_head::{RecordHead, masked_crc32c};

use super::RECORD_BYTES_MAX;
use super::error::TfRecordError;
use crate::append_buffer::AppendBuffer;

/// Writes records to a new TFRecord file, or to any [`Write`].
///
/// Records are buffered. They reach the output when the buffer is full (64 KiB), and with
/// [`flush`](Self::flush). [`sync`](TfRecordWriter::sync) makes them durable. Dropping the writer
/// flushes it and ignores errors.
///
/// An append copies the record once into the buffer and computes its CRC32C.
///
/// # Failed writes
/// A record is accepted as a whole or refused with an error. Accepted records stay in the buffer
/// until they are written. After an error the next call continues at the byte where the last one
/// stopped, so a disk that was full for some time leaves no torn record in the middle. The buffer
/// holds at most 64 KiB, or one longer record.
///
/// After a failed sync every call fails: the system may have dropped records that were written.
#[derive(Debug)]
pub struct TfRecordWriter<W: Write = File> {
    path: PathBuf,
    output: AppendBuffer<W>,
    is_sync_failed: bool,
}

impl TfRecordWriter {
    /// Creates a file. An existing file is never changed: a torn record at its end would hide the
    /// new ones.
    ///
    /// # Errors
    /// [`TfRecordError::Create`], also if the file exists.
    pub fn create(path: impl Into<PathBuf>) -> Result<TfRecordWriter, TfRecordError> {
        let path = path.into();
        let create = |path| OpenOptions::new().write(true).create_new(true).open(path);
        match local_path::check(&path).and_then(create) {
            Ok(file) => Ok(TfRecordWriter::with_output(path, file)),
            Err(source) => Err(TfRecordError::Create { path, source }),
        }
    }

    /// Writes all buffered records and makes the file durable (`fdatasync`). The file's name is
    /// durable only after a sync of its directory.
    ///
    /// # Errors
    /// If the records cannot be written, or not made durable.
    pub fn sync(&mut self) -> Result<(), TfRecordError> {
        self.flush()?;
        self.output.output_mut().sync_data().map_err(|source| {
            self.is_sync_failed = true;
            TfRecordError::Sync { path: self.path.clone(), source }
        })
    }
}

impl<W: Write> TfRecordWriter<W> {
    /// Writes to any output. The path names the output in errors. An output that fails must report
    /// how much it has written, as [`Write::write`] requires.
    pub fn with_output(path: impl Into<PathBuf>, output: W) -> TfRecordWriter<W> {
        let output = AppendBuffer::new(output);
        TfRecordWriter { path: path.into(), output, is_sync_failed: false }
    }

    /// Returns the path that names the output.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a record. It may be empty.
    ///
    /// # Errors
    /// If the record is longer than [`RECORD_BYTES_MAX`], or if the buffer is full and cannot be
    /// written. The record is not in the file then.
    pub fn append(&mut self, record: &[u8]) -> Result<(), TfRecordError> {
        let bytes = record.len() as u64;
        if bytes > RECORD_BYTES_MAX {
            let path = self.path.clone();
            let bytes_max = RECORD_BYTES_MAX;
            return Err(TfRecordError::TooLongToAppend { path, bytes, bytes_max });
        }
        self.check_sync()?;
        let head = RecordHead::new(bytes);
        let checksum = masked_crc32c(record).to_le_bytes();
        let appended = self.output.append(&[&head.0, record, &checksum]);
        appended.map_err(|source| self.write_error(source))
    }

    /// Writes all buffered records to the output, and flushes it.
    ///
    /// # Errors
    /// [`TfRecordError::Write`]. The records remain in the buffer.
    pub fn flush(&mut self) -> Result<(), TfRecordError> {
        self.check_sync()?;
        self.output.flush().map_err(|source| self.write_error(source))
    }

    /// Returns the number of accepted records that are not completely in the output.
    pub fn buffered(&self) -> usize {
        self.output.buffered()
    }

    fn check_sync(&self) -> Result<(), TfRecordError> {
        match self.is_sync_failed {
            true => Err(TfRecordError::AfterFailedSync { path: self.path.clone() }),
            false => Ok(()),
        }
    }

    fn write_error(&self, source: io::Error) -> TfRecordError {
        TfRecordError::Write { path: self.path.clone(), source }
    }
}

impl<W: Write> Drop for TfRecordWriter<W> {
    fn drop(&mut self) {
        // A destructor cannot report errors: a program that needs them calls `flush`.
        let _ = self.flush();
    }
}

#[cfg(test)]
pub(crate) mod tests;
