//! [`DataFile`]: a file of samples, plain or packed with gzip, before it is loaded.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pushpull_common::file_kind::{FIRST_BYTES, FileKind, PACKED};
use pushpull_common::local_path;

use super::SourceError;
use super::file_bytes::FileBytes;
use pushpull_common::regular_file::not_regular;

/// An open regular file. Its first bytes tell whether it is packed; its name does not matter.
pub(super) struct DataFile {
    path: PathBuf,
    file: File,
    /// The length on the disk.
    len: u64,
    is_packed: bool,
}

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
        Ok(DataFile { path: path.to_owned(), file, len, is_packed: start == GZIP_MAGIC })
    }

    /// Returns the path by which the file was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether another open file is this one, under whichever name.
    pub(super) fn is_same(&self, other: &DataFile) -> Result<bool, SourceError> {
        let id = |file: &DataFile| {
            let metadata = file.file.metadata().map_err(|source| file.failed(source))?;
            Ok((metadata.dev(), metadata.ino()))
        };
        Ok(id(self)? == id(other)?)
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
        (&self.file).rewind().map_err(|source| self.failed(source))?;
        match self.is_packed {
            false => Ok(Box::new(&self.file)),
            true => self.unpacked(),
        }
    }

    /// Loads the file into memory. A plain file of more than `memory_bytes_max` bytes stays on the
    /// disk, and a packed one is refused.
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

    /// The error of the operating system, or of the decompressor.
    pub(super) fn failed(&self, source: io::Error) -> SourceError {
        let file = self.path.clone();
        match self.is_packed && source.raw_os_error().is_none() {
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
            return Ok(FileBytes::on_disk(self.path, self.file, self.len));
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
        let packed = io::BufReader::with_capacity(1 << 16, &self.file);
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
