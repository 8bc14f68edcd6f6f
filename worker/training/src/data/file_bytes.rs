//! [`FileBytes`]: the unpacked bytes of a file, to be read at any position.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::read_at::ReadAt;

use super::SourceError;
#[cfg(feature = "csv")]
use super::data_file::InputReader;

/// The unpacked bytes of a file, in memory, on the disk or in another storage.
pub(super) struct FileBytes {
    path: PathBuf,
    len: u64,
    place: Place,
}

/// The place of the bytes: in memory, in the file or in another storage.
enum Place {
    Memory(Bytes),
    Disk(File),
    Input(Arc<dyn ReadAt>),
}

impl FileBytes {
    /// The bytes of a file that has been read.
    pub(super) fn in_memory(path: PathBuf, bytes: Vec<u8>) -> FileBytes {
        FileBytes { path, len: bytes.len() as u64, place: Place::Memory(bytes.into()) }
    }

    /// The bytes of a plain file, read when they are needed.
    pub(super) fn on_disk(path: PathBuf, file: File, len: u64) -> FileBytes {
        FileBytes { path, len, place: Place::Disk(file) }
    }

    /// The bytes of an input of another storage, read when they are needed.
    pub(super) fn of_input(path: PathBuf, input: Arc<dyn ReadAt>) -> FileBytes {
        FileBytes { path, len: input.bytes(), place: Place::Input(input) }
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the bytes are in memory, so that they never change.
    #[cfg(feature = "csv")]
    pub(super) fn is_in_memory(&self) -> bool {
        matches!(self.place, Place::Memory(_))
    }

    /// Returns `len` bytes from `start`: a part of the memory, which is not copied, or one read of
    /// the file or of the storage.
    ///
    /// The caller bounds `len`. Bytes beyond the end are [`SourceError::Length`].
    pub(super) fn read(&self, start: u64, len: usize) -> Result<Bytes, SourceError> {
        let end = start.saturating_add(len as u64);
        if end > self.len {
            return Err(self.wrong_length(self.len, end));
        }
        match &self.place {
            Place::Memory(bytes) => Ok(bytes.slice(start as usize..end as usize)),
            Place::Disk(file) => {
                let mut bytes = vec![0; len];
                match file.read_exact_at(&mut bytes, start) {
                    Ok(()) => Ok(bytes.into()),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        let now = file.metadata().map_or(start, |metadata| metadata.len());
                        Err(self.wrong_length(now, self.len))
                    }
                    Err(source) => Err(SourceError::Read { file: self.path.clone(), source }),
                }
            }
            Place::Input(input) => {
                let mut bytes = vec![0; len];
                match input.read_at(start, &mut bytes) {
                    Ok(()) => Ok(bytes.into()),
                    Err(source) => Err(SourceError::Read { file: self.path.clone(), source }),
                }
            }
        }
    }

    /// Returns a reader of all bytes, from the start.
    #[cfg(feature = "csv")]
    pub(super) fn reader(&self) -> Result<Box<dyn io::Read + '_>, SourceError> {
        match &self.place {
            Place::Memory(bytes) => Ok(Box::new(&bytes[..])),
            Place::Disk(file) => {
                let mut reader: &File = file;
                let failed = |source| SourceError::Read { file: self.path.clone(), source };
                io::Seek::rewind(&mut reader).map_err(failed)?;
                Ok(Box::new(reader))
            }
            Place::Input(input) => Ok(Box::new(InputReader::buffered(&**input))),
        }
    }

    fn wrong_length(&self, found: u64, expected: u64) -> SourceError {
        SourceError::Length { file: self.path.clone(), found, expected }
    }
}

impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_in_memory = matches!(self.place, Place::Memory(_));
        f.debug_struct("FileBytes")
            .field("path", &self.path)
            .field("len", &self.len)
            .field("is_in_memory", &is_in_memory)
            .finish()
    }
}
