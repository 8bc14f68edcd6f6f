//! Reads records of a TFRecord file by their index.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pushpull_common::file_kind::{FIRST_BYTES, FileKind};
use pushpull_common::local_path;
use pushpull_common::read_at::ReadAt;
use pushpull_common::record_head::{RecordHead, masked_crc32c};

use super::RECORD_BYTES_MAX;
use super::error::TfRecordError;
use pushpull_common::regular_file::not_regular;

/// Random access to the records of a TFRecord file.
///
/// Opening makes one pass over the lengths of the records and keeps an offset of 8 bytes for each.
/// It checks the checksum of each length, but reads no data. [`get`](Self::get) reads one record
/// with one system call, and checks its data.
///
/// Several threads may read at the same time. The file must not change meanwhile, except that
/// records may be appended: the reader does not see them.
#[derive(Debug)]
pub struct TfRecordReader {
    /// The path, or the name of the input.
    path: PathBuf,
    input: Arc<dyn ReadAt>,
    /// The offset of each record's frame, and last the end of the whole records.
    offsets: Vec<u64>,
    tail: Option<TornTail>,
    record_bytes_max: u64,
}

/// An incomplete record at the end of a file, which a writer leaves when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TornTail {
    /// Number of whole records before the tail.
    pub records: u64,
    /// The offset in bytes at which the tail begins.
    pub offset: u64,
    /// Size of the tail.
    pub bytes: u64,
}

impl TfRecordReader {
    /// Opens a file and builds the index of its records.
    ///
    /// An incomplete record at the end is no error; see [`torn_tail`](Self::torn_tail). Neither is
    /// an empty file, which has no records: a writer that has appended nothing leaves one.
    ///
    /// # Errors
    /// If the file cannot be read, if its first bytes are those of another format
    /// ([`TfRecordError::OtherFormat`]), or if a length differs from its checksum
    /// ([`TfRecordError::DamagedLength`]).
    pub fn open(path: impl Into<PathBuf>) -> Result<TfRecordReader, TfRecordError> {
        let path = path.into();
        // The open of a pipe would wait for a writer.
        match local_path::check(&path).and_then(fs::metadata).map(|found| not_regular(&found)) {
            Ok(Some(found)) => return Err(TfRecordError::NotRegular { path, found }),
            Ok(None) => {}
            Err(source) => return Err(TfRecordError::Open { path, source }),
        }
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, file) = match opened {
            Ok(opened) => opened,
            Err(source) => return Err(TfRecordError::Open { path, source }),
        };
        let name = path.to_string_lossy().into_owned();
        let input = Arc::new(LocalFile { name, file, bytes });
        TfRecordReader::index(path, input, FILE_WINDOW_BYTES)
    }

    /// Uses an open input of another storage, such as an object of an object store.
    ///
    /// Cost: the index of short records takes a request for each MiB, and a record takes one.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn of_input(input: Arc<dyn ReadAt>) -> Result<TfRecordReader, TfRecordError> {
        TfRecordReader::index(PathBuf::from(input.name()), input, INPUT_WINDOW_BYTES)
    }

    fn index(
        path: PathBuf,
        input: Arc<dyn ReadAt>,
        window_bytes: u64,
    ) -> Result<TfRecordReader, TfRecordError> {
        let mut index = RecordIndex {
            path: &path,
            input: &*input,
            size: input.bytes(),
            offsets: vec![0],
            window: Vec::new(),
            window_start: 0,
            window_bytes,
        };
        let tail = index.build()?;
        let offsets = index.offsets;
        Ok(TfRecordReader { path, input, offsets, tail, record_bytes_max: RECORD_BYTES_MAX })
    }

    /// Sets the longest record that is read, [`RECORD_BYTES_MAX`] by default. A longer one is an
    /// error of its own read; the others remain readable.
    #[must_use]
    pub fn record_bytes_max(mut self, bytes: u64) -> TfRecordReader {
        self.record_bytes_max = bytes;
        self
    }

    /// Returns the path of the file, or the name of the input.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of whole records.
    pub fn len(&self) -> u64 {
        self.offsets.len() as u64 - 1
    }

    /// Whether the file has no whole record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the incomplete record at the end of the file, if there is one.
    pub fn torn_tail(&self) -> Option<TornTail> {
        self.tail
    }

    /// Reads a record.
    ///
    /// # Errors
    /// If there is no such record, if it cannot be read, if it is longer than the limit, or if its
    /// data differ from their checksum.
    pub fn get(&self, record: u64) -> Result<Vec<u8>, TfRecordError> {
        let mut data = Vec::new();
        self.read_into(record, &mut data)?;
        Ok(data)
    }

    /// Reads a record into a buffer, whose contents it replaces. The buffer is empty after an
    /// error.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get).
    pub fn read_into(&self, record: u64, data: &mut Vec<u8>) -> Result<(), TfRecordError> {
        data.clear();
        let (offset, length) = self.place(record)?;
        let checksum_at = length as usize;
        data.resize(checksum_at + RecordHead::CHECKSUM_BYTES, 0);
        let at = offset + RecordHead::BYTES as u64;
        if let Err(source) = self.input.read_at(at, data) {
            data.clear();
            return Err(TfRecordError::Read { path: self.path.clone(), record, offset, source });
        }
        let (body, checksum) = data.split_at(checksum_at);
        let is_intact = masked_crc32c(body).to_le_bytes() == checksum;
        data.truncate(if is_intact { checksum_at } else { 0 });
        match is_intact {
            true => Ok(()),
            false => Err(TfRecordError::DamagedData { path: self.path.clone(), record, offset }),
        }
    }

    /// Reads all records in order. After an error the next record can still be read.
    pub fn iter(&self) -> impl Iterator<Item = Result<Vec<u8>, TfRecordError>> + '_ {
        (0..self.len()).map(|record| self.get(record))
    }

    /// Returns where a record's frame begins, and the length of its data, which the limit allows.
    fn place(&self, record: u64) -> Result<(u64, u64), TfRecordError> {
        let path = || self.path.clone();
        let index = usize::try_from(record).unwrap_or(usize::MAX);
        let frame = index.checked_add(1).and_then(|end| self.offsets.get(index..=end));
        let Some(&[offset, end]) = frame else {
            return Err(TfRecordError::NoRecord { path: path(), record, records: self.len() });
        };
        let bytes = end - offset - RecordHead::OVERHEAD_BYTES;
        let bytes_max = self.record_bytes_max;
        if bytes > bytes_max || bytes > isize::MAX as u64 - RecordHead::OVERHEAD_BYTES {
            return Err(TfRecordError::TooLongToRead {
                path: path(),
                record,
                offset,
                bytes,
                bytes_max,
            });
        }
        Ok((offset, bytes))
    }
}

/// The index of a file's records, while it is built.
struct RecordIndex<'a> {
    path: &'a Path,
    input: &'a dyn ReadAt,
    size: u64,
    offsets: Vec<u64>,
    /// A part of the file, and where it begins. Heads of short records share a read.
    window: Vec<u8>,
    window_start: u64,
    /// The most bytes of the window.
    window_bytes: u64,
}

impl RecordIndex<'_> {
    /// Walks from length to length. A length is used only if its checksum is correct and the file
    /// has that many bytes. Returns the torn tail.
    fn build(&mut self) -> Result<Option<TornTail>, TfRecordError> {
        let mut offset = 0;
        let mut length = 0;
        if (1..RecordHead::OVERHEAD_BYTES).contains(&self.size) {
            self.check_format_of_short_file()?;
        }
        while self.size - offset >= RecordHead::OVERHEAD_BYTES {
            let head = self.head(offset, length)?;
            let Some(found) = head.length() else {
                return Err(self.damaged_length(offset));
            };
            if found > self.size - offset - RecordHead::OVERHEAD_BYTES {
                break;
            }
            length = found;
            offset += RecordHead::OVERHEAD_BYTES + length;
            self.offsets.push(offset);
        }
        let bytes = self.size - offset;
        Ok((bytes > 0).then_some(TornTail { records: self.records(), offset, bytes }))
    }

    /// Refuses a file that is shorter than a record, if its first bytes tell another format. Fewer
    /// than [`TELLING_BYTES`] may as well be those of a length.
    fn check_format_of_short_file(&self) -> Result<(), TfRecordError> {
        match self.kind_at(0).filter(|kind| !kind.is_records()) {
            Some(kind) if self.size >= TELLING_BYTES => {
                let path = self.path.to_owned();
                Err(TfRecordError::OtherFormat { path, found: kind.into_text() })
            }
            _ => Ok(()),
        }
    }

    /// The error of a head whose checksum differs. The bytes may tell what begins there.
    fn damaged_length(&self, offset: u64) -> TfRecordError {
        let path = self.path.to_owned();
        let record = self.records();
        match self.kind_at(offset).map(FileKind::into_text) {
            None => TfRecordError::DamagedLength { path, record, offset },
            Some(found) if offset == 0 => TfRecordError::OtherFormat { path, found },
            Some(found) => TfRecordError::OtherData { path, record, offset, found },
        }
    }

    /// Recognizes what begins at an offset, if it can be read.
    fn kind_at(&self, offset: u64) -> Option<FileKind> {
        let mut first = vec![0; (self.size - offset).min(FIRST_BYTES as u64) as usize];
        self.input.read_at(offset, &mut first).ok()?;
        FileKind::of(&first)
    }

    /// Reads a head behind a record of a length. Behind a long record, only the head is read: the
    /// next one is far away as well.
    fn head(&mut self, offset: u64, length: u64) -> Result<RecordHead, TfRecordError> {
        let is_inside = |window: &[u8], start: u64| {
            let end = start + window.len() as u64;
            start <= offset && offset + RecordHead::BYTES as u64 <= end
        };
        if !is_inside(&self.window, self.window_start) {
            let is_short = length < self.window_bytes / 8;
            let bytes = if is_short { self.window_bytes } else { RecordHead::BYTES as u64 };
            let bytes = bytes.min(self.size - offset) as usize;
            self.window.resize(bytes, 0);
            self.window_start = offset;
            if let Err(source) = self.input.read_at(offset, &mut self.window) {
                let path = self.path.to_owned();
                let record = self.records();
                return Err(TfRecordError::Read { path, record, offset, source });
            }
        }
        let at = (offset - self.window_start) as usize;
        let mut head = RecordHead([0; RecordHead::BYTES]);
        head.0.copy_from_slice(&self.window[at..at + RecordHead::BYTES]);
        Ok(head)
    }

    fn records(&self) -> u64 {
        self.offsets.len() as u64 - 1
    }
}

/// The fewest bytes that tell what a short file is. The length of a torn record has zeros among
/// them, unless it is 16 MiB or more.
const TELLING_BYTES: u64 = 4;

/// Size of the window through which the index pass reads heads of short records of a file.
const FILE_WINDOW_BYTES: u64 = 16 << 10;

/// Size of that window for an input, each of whose reads may be a request to another machine.
const INPUT_WINDOW_BYTES: u64 = 1 << 20;

/// A regular file of this machine.
#[derive(Debug)]
struct LocalFile {
    name: String,
    file: File,
    bytes: u64,
}

impl ReadAt for LocalFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }
}

#[cfg(test)]
mod tests;
