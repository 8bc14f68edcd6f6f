//! Summaries of a training that goes on without them.

use std::fs::File;
use std::io::Write;

use super::error::SummaryError;
use super::writer::SummaryWriter;

/// Writes summaries, and counts those that are lost instead of failing.
///
/// A full disk must not end a training. So [`write`](Self::write) returns nothing;
/// [`take_error`](Self::take_error) returns the first error, once.
///
/// ```
/// use pushpull_common::error::Chain;
/// use pushpull_training::summary::{SummaryConfig, SummaryLog, SummaryWriter};
///
/// # let directory = std::env::temp_dir().join(format!("summary-log-doc-{}", std::process::id()));
/// let writer = SummaryWriter::create(&directory, SummaryConfig::default())?;
/// let mut log = SummaryLog::new(writer);
/// log.write(|summaries| summaries.scalar(1, "loss", 0.5));
/// if let Some(error) = log.take_error() {
///     eprintln!("{}", Chain(&error));
/// }
/// let report = log.close();
/// assert_eq!((report.written, report.lost), (1, 0));
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SummaryLog<W: Write = File> {
    writer: SummaryWriter<W>,
    first_error: Option<SummaryError>,
    is_failed: bool,
}

/// The fate of the summaries of a [`SummaryLog`].
#[derive(Debug)]
#[non_exhaustive]
pub struct SummaryReport {
    /// Number of summaries in the files.
    pub written: u64,
    /// Number of summaries that are not, or that the event file or the JSON lines lack.
    pub lost: u64,
    /// The first error, unless [`SummaryLog::take_error`] has returned it.
    pub first_error: Option<SummaryError>,
}

impl<W: Write> SummaryLog<W> {
    /// Writes to a writer.
    pub fn new(writer: SummaryWriter<W>) -> SummaryLog<W> {
        SummaryLog { writer, first_error: None, is_failed: false }
    }

    /// Writes summaries. Invalid ones are lost, too.
    pub fn write(&mut self, write: impl FnOnce(&mut SummaryWriter<W>) -> Result<(), SummaryError>) {
        if let Err(error) = write(&mut self.writer) {
            self.record(error);
        }
    }

    /// Returns how many summaries are lost so far. Those in the buffer are not yet counted.
    pub fn lost(&self) -> u64 {
        self.writer.attempted() - self.writer.accepted()
    }

    /// Returns the first error at the first call after it, and nothing at other calls.
    pub fn take_error(&mut self) -> Option<SummaryError> {
        self.first_error.take()
    }

    /// Writes what is buffered, and reports what is in the files.
    pub fn close(mut self) -> SummaryReport {
        if let Err(error) = self.writer.flush() {
            self.record(error);
        }
        let written = self.writer.accepted().saturating_sub(self.writer.buffered());
        let lost = self.writer.attempted() - written;
        SummaryReport { written, lost, first_error: self.first_error.take() }
    }

    fn record(&mut self, error: SummaryError) {
        if !self.is_failed {
            self.is_failed = true;
            self.first_error = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::error::Chain;

    use super::*;
    use crate::append_buffer::tests::FullDisk;

    /// Frames of the first event and of a scalar with a tag of one letter.
    const VERSION_BYTES: usize = 16 + 24;
    const SCALAR_BYTES: usize = 16 + 23;

    fn log(disk: &FullDisk) -> SummaryLog<FullDisk> {
        SummaryLog::new(SummaryWriter::with_output("disk/events", disk.clone()).unwrap())
    }

    #[test]
    fn a_full_disk_loses_summaries_and_reports_once() {
        let disk = FullDisk::with_room(VERSION_BYTES + 2 * SCALAR_BYTES + 1);
        let mut log = log(&disk);
        for step in 1..=3 {
            log.write(|summaries| summaries.scalar(step, "t", 0.5));
            log.write(SummaryWriter::flush);
        }
        assert_eq!(log.lost(), 0, "the third is in the buffer");
        let error = Chain(&log.take_error().unwrap()).to_string();
        assert!(error.starts_with("cannot write records to disk/events: "), "{error}");

        log.write(|summaries| summaries.scalar(4, "", 0.5));
        log.write(SummaryWriter::flush);
        assert_eq!(log.lost(), 1, "a summary without a tag is lost");
        assert!(log.take_error().is_none(), "only the first error is reported");

        let report = log.close();
        assert_eq!((report.written, report.lost), (2, 2));
        assert!(report.first_error.is_none());
    }

    #[test]
    fn after_a_full_disk_summaries_are_written_again() {
        let disk = FullDisk::with_room(VERSION_BYTES);
        let mut log = log(&disk);
        // More than the buffer holds.
        for step in 0..3000 {
            log.write(|summaries| summaries.scalar(step, "t", 0.5));
        }
        let lost = log.lost();
        assert!((1000..2000).contains(&lost), "{lost}");
        disk.add_room(1 << 20);
        log.write(|summaries| summaries.scalar(3000, "t", 0.5));
        let report = log.close();
        assert_eq!((report.written, report.lost), (3001 - lost, lost));
        assert!(matches!(report.first_error, Some(SummaryError::Events(_))));
    }

    #[test]
    fn a_missing_disk_is_an_error_at_once() {
        let disk = FullDisk::with_room(VERSION_BYTES - 1);
        let error = SummaryWriter::with_output("disk/events", disk).unwrap_err();
        assert!(Chain(&error).to_string().starts_with("cannot write records to disk/events: "));
    }
}
