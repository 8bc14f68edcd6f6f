//! Writes summaries into a directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pushpull_common::local_path;

use super::config::SummaryConfig;
use super::error::SummaryError;
use super::event::{SummaryEvent, SummaryValue, encode_file_version};
use super::event_file_name::EventFileName;
use super::histogram::SummaryHistogram;
use super::hyperparameters::{Hyperparameters, RunStatus};
use super::image::SummaryImage;
use super::json_line::JsonLine;
use super::json_lines::JsonLines;
use super::protobuf_writer::ProtobufWriter;
use crate::tfrecord::TfRecordWriter;

/// Writes an event file of TensorBoard, and JSON lines if they are wanted.
///
/// Summaries are buffered (64 KiB), and flushed by the first write after
/// [`SummaryConfig::flush_every`]. Dropping the writer flushes it and ignores errors. A write that
/// only buffers makes no system call, but reads the clock.
///
/// # Errors of every write
/// The tag must have 1 to 4096 bytes, and the step must be at most 2^63 - 1. If the output fails,
/// the call returns the error. A summary is then refused if the buffer is full, and in the buffer
/// otherwise; no call leaves half of one. Use [`super::SummaryLog`] if a training must go on
/// without its summaries.
#[derive(Debug)]
pub struct SummaryWriter<W: Write = File> {
    events: TfRecordWriter<W>,
    lines: Option<JsonLines<W>>,
    flush_every_s: f64,
    /// Wall time of the last flush.
    last_flush_s: f64,
    /// Encodes one event after the other in the same memory.
    encoder: ProtobufWriter,
    attempted: u64,
    accepted: u64,
}

impl SummaryWriter {
    /// Begins a new event file in a directory, which is created if it does not exist.
    ///
    /// No existing file is changed, so an incomplete event of a process that was killed stays the
    /// last of its file. The file's name has the time, the host and the process, and comes after
    /// the names of all event files that are there. Two writers never share a file.
    ///
    /// # Errors
    /// If the directory or a file in it cannot be created, or if its first event cannot be written.
    pub fn create(
        directory: impl AsRef<Path>,
        config: SummaryConfig,
    ) -> Result<SummaryWriter, SummaryError> {
        let directory = directory.as_ref();
        let in_directory = |source| SummaryError::Directory { path: directory.to_owned(), source };
        local_path::check(directory).map_err(in_directory)?;
        fs::create_dir_all(directory).map_err(in_directory)?;
        let existing = file_names(directory).map_err(in_directory)?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let seconds = wall_time_s() as u64;
        let name = EventFileName::new(seconds, &host, std::process::id(), existing);
        let (name, events) = create_first(directory, name, EventFileName::to_string)?;
        let events = TfRecordWriter::with_output(directory.join(name.to_string()), events);
        let lines = match config.is_json_lines {
            true => {
                let (name, lines) = create_first(directory, name, EventFileName::json_lines)?;
                Some(JsonLines::new(directory.join(name.json_lines()), lines))
            }
            false => None,
        };
        SummaryWriter::begin(events, lines, config)
    }

    /// Writes all buffered summaries and makes them durable.
    ///
    /// # Errors
    /// If they cannot be written, or not made durable.
    pub fn sync(&mut self) -> Result<(), SummaryError> {
        let synced = self.events.sync();
        self.lines.as_mut().map_or(Ok(()), JsonLines::sync)?;
        Ok(synced?)
    }
}

impl<W: Write> SummaryWriter<W> {
    /// Writes events to any output. The path names the output in errors.
    ///
    /// # Errors
    /// If the first event, which names the format, cannot be written.
    pub fn with_output(
        path: impl AsRef<Path>,
        output: W,
    ) -> Result<SummaryWriter<W>, SummaryError> {
        let events = TfRecordWriter::with_output(path.as_ref(), output);
        SummaryWriter::begin(events, None, SummaryConfig::default())
    }

    /// Writes the first event.
    fn begin(
        mut events: TfRecordWriter<W>,
        lines: Option<JsonLines<W>>,
        config: SummaryConfig,
    ) -> Result<SummaryWriter<W>, SummaryError> {
        let mut encoder = ProtobufWriter::default();
        let last_flush_s = wall_time_s();
        encode_file_version(&mut encoder, last_flush_s);
        events.append(encoder.bytes())?;
        events.flush()?;
        Ok(SummaryWriter {
            events,
            lines,
            flush_every_s: config.flush_every.as_secs_f64(),
            last_flush_s,
            encoder,
            attempted: 0,
            accepted: 0,
        })
    }

    /// Returns the path of the event file.
    pub fn path(&self) -> &Path {
        self.events.path()
    }

    /// Writes a number. TensorBoard keeps it as `f32`, the JSON line as `f64`.
    ///
    /// # Errors
    /// See the type.
    pub fn scalar(
        &mut self,
        step: u64,
        tag: &str,
        value: impl Into<f64>,
    ) -> Result<(), SummaryError> {
        self.write(step, tag, SummaryValue::Scalar(value.into()))
    }

    /// Writes a distribution.
    ///
    /// # Errors
    /// See the type; also if it is larger than 256 MiB.
    pub fn histogram(
        &mut self,
        step: u64,
        tag: &str,
        histogram: &SummaryHistogram,
    ) -> Result<(), SummaryError> {
        self.write(step, tag, SummaryValue::Histogram(histogram))
    }

    /// Writes a text. TensorBoard shows it as Markdown.
    ///
    /// # Errors
    /// See the type; also if it is longer than 256 MiB.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<(), SummaryError> {
        self.write(step, tag, SummaryValue::Text(text))
    }

    /// Writes an image.
    ///
    /// # Errors
    /// See the type; also if it is larger than 256 MiB.
    pub fn image(
        &mut self,
        step: u64,
        tag: &str,
        image: &SummaryImage,
    ) -> Result<(), SummaryError> {
        self.write(step, tag, SummaryValue::Image(image))
    }

    /// Writes the hyperparameters of the run, and that it begins now. Call it once for each
    /// directory: TensorBoard shows one set for each.
    ///
    /// # Errors
    /// See the type; also if a number is not finite, or a name empty.
    pub fn begin_run(&mut self, settings: &Hyperparameters) -> Result<(), SummaryError> {
        let experiment = self.write(0, "_hparams_/experiment", SummaryValue::Experiment(settings));
        let start = self.write(0, "_hparams_/session_start_info", SummaryValue::RunStart(settings));
        experiment.and(start)
    }

    /// Writes that the run ends now, and how.
    ///
    /// # Errors
    /// See the type.
    pub fn end_run(&mut self, status: RunStatus) -> Result<(), SummaryError> {
        self.write(0, "_hparams_/session_end_info", SummaryValue::RunEnd(status))
    }

    /// Writes all buffered summaries to the files.
    ///
    /// # Errors
    /// If a file cannot be written. The summaries remain in the buffer.
    pub fn flush(&mut self) -> Result<(), SummaryError> {
        let flushed = self.events.flush();
        self.lines.as_mut().map_or(Ok(()), JsonLines::flush)?;
        Ok(flushed?)
    }

    /// Returns how many summaries the calls were to write.
    pub(super) fn attempted(&self) -> u64 {
        self.attempted
    }

    /// Returns how many summaries are in the files or in the buffers.
    pub(super) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns how many summaries are in a buffer.
    pub(super) fn buffered(&self) -> u64 {
        let lines = self.lines.as_ref().map_or(0, JsonLines::buffered);
        self.events.buffered().max(lines) as u64
    }

    fn write(&mut self, step: u64, tag: &str, value: SummaryValue<'_>) -> Result<(), SummaryError> {
        self.write_event(&SummaryEvent { wall_time_s: wall_time_s(), step, tag, value })
    }

    fn write_event(&mut self, event: &SummaryEvent<'_>) -> Result<(), SummaryError> {
        self.attempted += 1;
        event.check()?;
        self.encoder.clear(ENCODER_BYTES_MAX);
        event.encode(&mut self.encoder);
        self.events.append(self.encoder.bytes())?;
        if let Some(lines) = &mut self.lines {
            let mut line = JsonLine::new();
            event.describe(&mut line);
            lines.append(&line.finish())?;
        }
        self.accepted += 1;
        // A clock that was set back is no reason to wait until it has caught up.
        let since_flush_s = (event.wall_time_s - self.last_flush_s).abs();
        if since_flush_s >= self.flush_every_s {
            // A failed flush counts: a full disk is not tried again at every write.
            self.last_flush_s = event.wall_time_s;
            self.flush()?;
        }
        Ok(())
    }
}

/// Creates the first file in a series of names that no file has yet.
fn create_first(
    directory: &Path,
    mut name: EventFileName,
    file_name: impl Fn(&EventFileName) -> String,
) -> Result<(EventFileName, File), SummaryError> {
    for _ in 0..NAMES_TRIED_MAX {
        let path = directory.join(file_name(&name));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((name, file)),
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {
                name = name.with_next_number();
            }
            Err(source) => return Err(SummaryError::Create { path, source }),
        }
    }
    let source = io::ErrorKind::AlreadyExists.into();
    Err(SummaryError::Create { path: directory.join(file_name(&name)), source })
}

fn file_names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Returns the seconds since 1970, or 0 if the clock is before that.
fn wall_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Memory that the encoder keeps after a large summary.
const ENCODER_BYTES_MAX: usize = 64 << 10;

/// Names that are tried before a directory is given up.
const NAMES_TRIED_MAX: usize = 10_000;

#[cfg(test)]
mod tests;
