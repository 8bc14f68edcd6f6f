//! The memory of a shard: a folder of mapped files, or anonymous memory.

mod blocks;
mod budget;
mod folder;
mod grid;
mod memory;
mod save_note;
mod shared;

use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) use blocks::{Blocks, PinnedSet, Pins};
pub use budget::{Budget, Promise, Reservation};
use folder::io_error;
pub use folder::{Folder, StateDirectory, is_locked};
pub(crate) use grid::Grid;
pub use memory::{Memory, fence};
pub use save_note::SaveNote;
pub use shared::{SharedBytes, SharedWords};

use crate::error::StorageError;
use crate::layout::{FORMAT, Fault, Kind, PAGE_BYTES, Page, Stamp, TEXT_AT};
use crate::testing::test_files::TestFiles;

/// Skew between the streams that an optimizer reads and writes together. At the same offset modulo
/// the page size they evict each other: Adam ran 3.5 times slower in place and 6 to 7 times slower
/// into other blocks. Each stream is skewed by one more odd number of cache lines; 13 lines were
/// measured.
pub const SKEW_BYTES: usize = 13 * 64;

/// The gap between adjacent blocks: one cache line. The hardware prefetcher of a sequential reader
/// continues over a gap this short. Over 832 bytes it did not, and updates took 10 % longer.
pub const GAP_BYTES: usize = 64;

/// The storage of a shard's files.
#[derive(Clone, Debug)]
pub enum ArenaStorage {
    /// Anonymous memory, lost with the process.
    Anonymous,
    /// Anonymous memory, lost with the process. The values can be shared with other processes.
    Shareable,
    /// Mapped files in a folder.
    Folder(Folder),
    /// The in-memory files of a test, which show what a crash would leave.
    TestFiles(TestFiles),
}

/// The files of one shard.
#[derive(Clone, Debug)]
pub struct Arena {
    /// Where the files are.
    pub storage: ArenaStorage,
    /// The identity that every file carries.
    pub stamp: Stamp,
}

/// Returns the name of a file. The generation is omitted if it is 0.
pub fn file_name(kind: Kind, generation: u64) -> String {
    match generation {
        0 => kind.name().to_owned(),
        generation => format!("{}-{generation}", kind.name()),
    }
}

/// Selects one of several files of the same kind and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The only file.
    Only,
    /// The single file of a table.
    Table(u16),
    /// One of several files of a table: table and file number.
    OfTable(u16, u32),
}

impl Part {
    pub(crate) fn file_name(self, kind: Kind, generation: u64) -> String {
        let name = file_name(kind, generation);
        match self {
            Part::Only => name,
            Part::Table(table) => format!("{name}-{table}"),
            Part::OfTable(table, part) => format!("{name}-{table}-{part}"),
        }
    }

    /// Returns the text of the file's first page, so that no file is mistaken for another.
    fn text(self) -> Vec<u8> {
        match self {
            Part::Only => Vec::new(),
            Part::Table(table) => u64::from(table).to_le_bytes().to_vec(),
            Part::OfTable(table, part) => {
                [u64::from(table), u64::from(part)].map(u64::to_le_bytes).concat()
            }
        }
    }
}

/// Returns whether a file is too large to copy.
fn is_bulk(name: &str) -> bool {
    let bulk = [Kind::Values, Kind::Slots, Kind::Inbox, Kind::Rows];
    bulk.into_iter().any(|kind| name.starts_with(kind.name()))
}

impl ArenaStorage {
    /// Returns the path of a file for error messages.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            ArenaStorage::Folder(folder) => folder.path(name),
            _ => Path::new("anonymous memory").join(name),
        }
    }

    /// Returns whether the files are in a folder.
    pub(crate) fn is_folder(&self) -> bool {
        matches!(self, ArenaStorage::Folder(_))
    }

    /// Returns whether the values are in memory that can be shared with other processes.
    pub fn is_shareable(&self) -> bool {
        matches!(self, ArenaStorage::Shareable)
    }

    /// Returns the names of the existing files.
    pub fn names(&self) -> Result<Vec<String>, StorageError> {
        match self {
            ArenaStorage::Anonymous | ArenaStorage::Shareable => Ok(Vec::new()),
            ArenaStorage::Folder(folder) => folder.names(),
            ArenaStorage::TestFiles(test_files) => Ok(test_files.names()),
        }
    }

    /// Opens a file; `None` if it does not exist. Files of a read-only folder are copied, or mapped
    /// copy-on-write if they are large.
    pub fn open(&self, name: &str) -> Result<Option<Memory>, StorageError> {
        match self {
            ArenaStorage::Anonymous | ArenaStorage::Shareable => Ok(None),
            ArenaStorage::Folder(folder) => {
                let Some(file) = folder.open(name)? else { return Ok(None) };
                let memory = match folder.is_read_only() {
                    false => Memory::of_file(file),
                    true if is_bulk(name) => Memory::view_of(&file),
                    true => Memory::copy_of(&file),
                };
                memory.map(Some).map_err(|source| io_error("map", &folder.path(name), source))
            }
            ArenaStorage::TestFiles(test_files) => Ok(test_files.open(name)),
        }
    }

    /// Creates a file of `bytes` zeros.
    pub fn create(&self, name: &str, bytes: u64) -> Result<Memory, StorageError> {
        let all = 0..usize::try_from(bytes).unwrap_or(usize::MAX);
        self.create_sparse(name, bytes, &[all])
    }

    /// Creates a file of `bytes` zeros. Only the ranges in `occupied` have memory; the owner must
    /// [occupy](Memory::occupy) others before it writes them.
    fn create_sparse(
        &self,
        name: &str,
        bytes: u64,
        occupied: &[Range<usize>],
    ) -> Result<Memory, StorageError> {
        let path = self.path(name);
        let length = usize::try_from(bytes)
            .map_err(|_| StorageError::DoesNotFit { need: bytes, limit: usize::MAX as u64 })?;
        let anonymous = || Memory::anonymous_sparse(length, occupied.iter().map(Range::len).sum());
        let memory = match self {
            // Without shareable memory, or without a free descriptor, nothing is shared.
            ArenaStorage::Shareable if name.starts_with(Kind::Values.name()) => {
                Memory::shareable(length).or_else(|_| anonymous())
            }
            ArenaStorage::Anonymous | ArenaStorage::Shareable => anonymous(),
            ArenaStorage::Folder(folder) => Memory::of_file(folder.create(name, length, occupied)?),
            ArenaStorage::TestFiles(test_files) => Ok(test_files.create(name, length)),
        };
        memory.map_err(|source| io_error("map", &path, source))
    }

    /// Renames a file, replacing one of the new name.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StorageError> {
        match self {
            ArenaStorage::Anonymous | ArenaStorage::Shareable => Ok(()),
            ArenaStorage::Folder(folder) => folder.rename(from, to),
            ArenaStorage::TestFiles(test_files) => {
                test_files.rename(from, to);
                Ok(())
            }
        }
    }

    /// Flushes the contents of a file to disk.
    pub fn sync(&self, name: &str) -> Result<(), StorageError> {
        match self {
            ArenaStorage::Anonymous | ArenaStorage::Shareable => Ok(()),
            ArenaStorage::Folder(folder) => folder.sync(name),
            ArenaStorage::TestFiles(test_files) => {
                test_files.sync(name);
                Ok(())
            }
        }
    }

    /// Flushes the names of the files to disk.
    pub fn sync_names(&self) -> Result<(), StorageError> {
        match self {
            ArenaStorage::Folder(folder) => folder.sync_names(),
            _ => Ok(()),
        }
    }

    /// Flushes the names of the files' folder and its ancestors to disk.
    pub fn sync_way(&self) -> Result<(), StorageError> {
        match self {
            ArenaStorage::Folder(folder) => folder.sync_way(),
            _ => Ok(()),
        }
    }

    /// Replaces the contents of a file, and flushes them to disk.
    pub fn write_durably(&self, name: &str, bytes: &[u8]) -> Result<(), StorageError> {
        match self {
            ArenaStorage::Anonymous | ArenaStorage::Shareable => Ok(()),
            ArenaStorage::Folder(folder) => folder.write_durably(name, bytes),
            ArenaStorage::TestFiles(test_files) => {
                test_files.write_durably(name, bytes);
                Ok(())
            }
        }
    }

    /// Removes a file that is no longer used.
    pub fn remove(&self, name: &str) -> Result<(), StorageError> {
        match self {
            ArenaStorage::Anonymous | ArenaStorage::Shareable => Ok(()),
            ArenaStorage::Folder(folder) => folder.remove(name),
            ArenaStorage::TestFiles(test_files) => {
                test_files.remove(name);
                Ok(())
            }
        }
    }

    /// Converts a fault in a file to an error that names the file.
    pub fn corrupt(&self, name: &str, fault: Fault) -> StorageError {
        let path = self.path(name);
        let Fault { offset, expected, other_format } = fault;
        // The control file is opened first. Another file of another format was put there later.
        match other_format.filter(|_| name == file_name(Kind::Control, 0)) {
            Some(found) => StorageError::OtherFormat { path, found, format: FORMAT },
            None => StorageError::Corrupt { path, offset, expected },
        }
    }
}

impl Arena {
    /// Creates a file: its first page, followed by `bytes` zeros.
    pub fn create(&self, kind: Kind, generation: u64, bytes: u64) -> Result<Memory, StorageError> {
        self.create_part(kind, generation, Part::Only, bytes)
    }

    /// Creates a file with holes: its first page, followed by `bytes` zeros, of which only the
    /// ranges in `occupied` have memory. Offsets are those of the file.
    pub fn create_sparse(
        &self,
        kind: Kind,
        generation: u64,
        bytes: u64,
        occupied: impl IntoIterator<Item = Range<usize>>,
    ) -> Result<Memory, StorageError> {
        let occupied: Vec<_> = std::iter::once(0..PAGE_BYTES).chain(occupied).collect();
        self.create_named(kind, generation, Part::Only, bytes, &occupied)
    }

    /// Creates one of several files of the same kind and generation.
    pub(crate) fn create_part(
        &self,
        kind: Kind,
        generation: u64,
        part: Part,
        bytes: u64,
    ) -> Result<Memory, StorageError> {
        let all = 0..usize::try_from(bytes).unwrap_or(usize::MAX).saturating_add(PAGE_BYTES);
        self.create_named(kind, generation, part, bytes, &[all])
    }

    fn create_named(
        &self,
        kind: Kind,
        generation: u64,
        part: Part,
        bytes: u64,
        occupied: &[Range<usize>],
    ) -> Result<Memory, StorageError> {
        let name = part.file_name(kind, generation);
        let bytes = bytes.saturating_add(PAGE_BYTES as u64);
        let mut memory = self.storage.create_sparse(&name, bytes, occupied)?;
        let page = Page { kind, stamp: self.stamp, generation, text: part.text() };
        memory.write(0, &page.encode());
        Ok(memory)
    }

    /// Opens a file that must exist, with `bytes` bytes after its first page if given, and checks
    /// its first page.
    pub fn open(
        &self,
        kind: Kind,
        generation: u64,
        bytes: Option<u64>,
    ) -> Result<Memory, StorageError> {
        self.open_part(kind, generation, Part::Only, bytes)
    }

    /// Opens one of several files of the same kind and generation, which must exist.
    pub(crate) fn open_part(
        &self,
        kind: Kind,
        generation: u64,
        part: Part,
        bytes: Option<u64>,
    ) -> Result<Memory, StorageError> {
        let name = part.file_name(kind, generation);
        let memory = self.storage.open(&name)?;
        let memory =
            memory.ok_or_else(|| StorageError::Missing { path: self.storage.path(&name) })?;
        let page = Page::decode(memory.bytes());
        let checked = page.and_then(|page| {
            page.check(kind, self.stamp, generation)?;
            if kind != Kind::Control && page.text != part.text() {
                return Err(Fault::at(TEXT_AT, format!("the file of {part:?}")));
            }
            let expected = bytes.map(|bytes| bytes.saturating_add(PAGE_BYTES as u64));
            match expected.filter(|&expected| expected != memory.len() as u64) {
                Some(expected) => {
                    let short = memory.len().min(usize::try_from(expected).unwrap_or(usize::MAX));
                    let found = memory.len();
                    Err(Fault::at(short, format!("a file of {expected} bytes, not of {found}")))
                }
                None => Ok(()),
            }
        });
        checked.map_err(|fault| self.storage.corrupt(&name, fault))?;
        Ok(memory)
    }
}
