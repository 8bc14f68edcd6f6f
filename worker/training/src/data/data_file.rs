//! [`DataFile`]: a file of samples, plain or packed with gzip, before it is loaded.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pushpull_common::file_kind::{FIRST_BYTES, FileKind, PACKED};
use pushpull_common::local_path;
use pushpull_common::read_at::ReadAt;

use super::SourceError;
use super::file_bytes::FileBytes;
use pushpull_common::regular_file::not_regular;

/// An open regular file, or an open input of another storage. Its first bytes tell whether it is
/// packed; its name does not matter.
pub(super) struct DataFile {
    /// The path, or the name of the input.
    path: PathBuf,
    origin: DataOrigin,
    /// The length, packed or plain.
    len: u64,
    is_packed: bool,
}

/// The bytes of a [`DataFile`] as they are stored.
enum DataOrigin {
    Disk(File),
    Input(Arc<dyn ReadAt>),
}

/// Reads an input from its start to its end.
pub(super) struct InputReader<'a> {
    input: &'a dyn ReadAt,
    next: u64,
}

impl<'a> InputReader<'a> {
    /// Begins at the start. The buffer makes small reads few requests.
    pub(super) fn buffered(input: &'a dyn ReadAt) -> BufReader<InputReader<'a>> {
        BufReader::with_capacity(INPUT_BUFFER_BYTES, InputReader { input, next: 0 })
    }
}

impl Read for InputReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.input.bytes().saturating_sub(self.next);
        let now = usize::try_from(left).unwrap_or(usize::MAX).min(out.len());
        self.input.read_at(self.next, &mut out[..now])?;
        self.next += now as u64;
        Ok(now)
    }
}

/// The bytes that an input is read by, from its start to its end.
const INPUT_BUFFER_BYTES: usize = 1 << 20;

impl DataFile {
    /// Opens a regular file. Opening anything else, such as a pipe, could wait without an end.
    pub(super) fn open(path: &Path) -> Result<DataFile, SourceError> {
        let failed = |source| SourceError::Read { file: path.to_owned(), source };
        local_path::check(path).map_err(failed)?;
        if let Some(found) = not_regular(&fs::metadata(path).map_err(failed)?) {
            return Err(SourceError::NotRegular { file: path.to_owned(), found });
        }
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut start = Vec::new();
        (&file).take(GZIP_MAGIC.len() as u64).read_to_end(&mut start).map_err(failed)?;
        let origin = DataOrigin::Disk(file);
        Ok(DataFile { path: path.to_owned(), origin, len, is_packed: start == GZIP_MAGIC })
    }

    /// Uses an open input.
    pub(super) fn of_input(input: Arc<dyn ReadAt>) -> Result<DataFile, SourceError> {
        let path = PathBuf::from(input.name());
        let len = input.bytes();
        let mut start = vec![0; GZIP_MAGIC.len().min(usize::try_from(len).unwrap_or(usize::MAX))];
        let read = input.read_at(0, &mut start);
        read.map_err(|source| SourceError::Read { file: path.clone(), source })?;
        let is_packed = start == GZIP_MAGIC;
        Ok(DataFile { path, origin: DataOrigin::Input(input), len, is_packed })
    }

    /// Returns the path by which the file was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether another open file is this one, under whichever name.
    pub(super) fn is_same(&self, other: &DataFile) -> Result<bool, SourceError> {
        let id = |named: &DataFile, file: &File| {
            let metadata = file.metadata().map_err(|source| named.failed(source))?;
            Ok((metadata.dev(), metadata.ino()))
        };
        match (&self.origin, &other.origin) {
            (DataOrigin::Disk(file), DataOrigin::Disk(another)) => {
                Ok(id(self, file)? == id(other, another)?)
            }
            (DataOrigin::Input(input), DataOrigin::Input(another)) => {
                Ok(input.name() == another.name())
            }
            _ => Ok(false),
        }
    }

    /// Returns the first unpacked bytes, which tell what the file is.
    pub(super) fn first_bytes(&self) -> Result<Vec<u8>, SourceError> {
        let mut first = Vec::with_capacity(FIRST_BYTES);
        let read = self.reader()?.take(FIRST_BYTES as u64).read_to_end(&mut first);
        read.map_err(|source| self.failed(source))?;
        Ok(first)
    }

    /// The error of a file of another format.
    pub(super) fn other_format(&self, kind: FileKind, expected: String) -> SourceError {
        let file = self.path.clone();
        let found = match (self.is_packed, kind.into_text()) {
            (true, text) if text == PACKED => format!("{PACKED} twice"),
            (_, text) => text,
        };
        SourceError::OtherFormat { file, found, expected }
    }

    /// Returns a reader of the unpacked bytes, from the start.
    pub(super) fn reader(&self) -> Result<Box<dyn Read + '_>, SourceError> {
        match self.is_packed {
            false => self.stored(),
            true => self.unpacked(),
        }
    }

    /// Returns a reader of the bytes as they are stored, from the start.
    fn stored(&self) -> Result<Box<dyn Read + '_>, SourceError> {
        match &self.origin {
            DataOrigin::Disk(file) => {
                let mut reader: &File = file;
                reader.rewind().map_err(|source| self.failed(source))?;
                Ok(Box::new(reader))
            }
            DataOrigin::Input(input) => Ok(Box::new(InputReader::buffered(&**input))),
        }
    }

    /// Loads the file into memory. A plain file of more than `memory_bytes_max` bytes stays where it
    /// is, and a packed one is refused.
    ///
    /// With an `expected` length the file must have this length. Memory is allocated for bytes that
    /// exist, never for an announced length.
    pub(super) fn load(
        self,
        expected: Option<u64>,
        memory_bytes_max: u64,
    ) -> Result<FileBytes, SourceError> {
        match self.is_packed {
            false => self.load_plain(expected, memory_bytes_max),
            true => self.load_packed(expected, memory_bytes_max),
        }
    }

    /// The error of the operating system or of the storage, or of the decompressor.
    pub(super) fn failed(&self, source: io::Error) -> SourceError {
        let file = self.path.clone();
        let is_of_contents = match self.origin {
            DataOrigin::Disk(_) => source.raw_os_error().is_none(),
            DataOrigin::Input(_) => {
                use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
                matches!(source.kind(), InvalidData | InvalidInput | UnexpectedEof)
            }
        };
        match self.is_packed && is_of_contents {
            true => SourceError::Unpack { file, source },
            false => SourceError::Read { file, source },
        }
    }

    fn load_plain(
        self,
        expected: Option<u64>,
        memory_bytes_max: u64,
    ) -> Result<FileBytes, SourceError> {
        self.check_length(self.len, expected)?;
        if self.len > memory_bytes_max {
            return Ok(match self.origin {
                DataOrigin::Disk(file) => FileBytes::on_disk(self.path, file, self.len),
                DataOrigin::Input(input) => FileBytes::of_input(self.path, input),
            });
        }
        let bytes = self.read_within(self.len)?;
        self.check_length(bytes.len() as u64, Some(self.len))?;
        Ok(FileBytes::in_memory(self.path, bytes))
    }

    fn load_packed(
        self,
        expected: Option<u64>,
        memory_bytes_max: u64,
    ) -> Result<FileBytes, SourceError> {
        let too_long =
            || SourceError::TooLong { file: self.path.clone(), bytes_max: memory_bytes_max };
        if expected.is_some_and(|expected| expected > memory_bytes_max) {
            return Err(too_long());
        }
        // The read beyond the end also makes the decompressor check its checksum.
        let bytes = self.read_within(expected.unwrap_or(memory_bytes_max))?;
        self.check_length(bytes.len() as u64, expected)?;
        if bytes.len() as u64 > memory_bytes_max {
            return Err(too_long());
        }
        Ok(FileBytes::in_memory(self.path, bytes))
    }

    /// Reads the unpacked bytes, but at most one more than `limit`.
    fn read_within(&self, limit: u64) -> Result<Vec<u8>, SourceError> {
        let mut bytes = Vec::new();
        let mut reader = self.reader()?.take(limit.saturating_add(1));
        reader.read_to_end(&mut bytes).map_err(|source| self.failed(source))?;
        Ok(bytes)
    }

    fn check_length(&self, found: u64, expected: Option<u64>) -> Result<(), SourceError> {
        match expected.filter(|&expected| expected != found) {
            None => Ok(()),
            Some(expected) => Err(SourceError::Length { file: self.path.clone(), found, expected }),
        }
    }

    #[cfg(feature = "gz")]
    fn unpacked(&self) -> Result<Box<dyn Read + '_>, SourceError> {
        let packed = BufReader::with_capacity(1 << 16, self.stored()?);
        Ok(Box::new(flate2::bufread::MultiGzDecoder::new(packed)))
    }

    #[cfg(not(feature = "gz"))]
    fn unpacked(&self) -> Result<Box<dyn Read + '_>, SourceError> {
        Err(SourceError::Packed { file: self.path.clone() })
    }
}

/// The first bytes of a gzip stream (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The bytes of a file that are kept in memory, unless the caller sets another limit: 1 GiB.
pub(super) const MEMORY_BYTES_MAX: u64 = 1 << 30;
