//! Where checkpoints are kept: the little that all storages have in common.

use std::fmt;
use std::io;

use thiserror::Error;

/// What a storage could not do.
#[derive(Debug, Error)]
#[error("cannot {operation} {path}: {source}")]
#[non_exhaustive]
pub struct StorageFault {
    /// What was tried, such as `create`.
    pub operation: &'static str,
    /// On what: a path, or whatever names an object there.
    pub path: String,
    /// What the storage said.
    pub source: io::Error,
}

impl StorageFault {
    /// A fault of this operation on this path.
    pub fn new(operation: &'static str, path: impl fmt::Display, source: io::Error) -> Self {
        StorageFault { operation, path: path.to_string(), source }
    }

    /// Whether what was asked for is not there.
    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// A place for checkpoints: folders of files, one level deep.
///
/// A file is created once and never changed. What makes a checkpoint whole is that a folder is
/// renamed; a storage that cannot rename a folder at once must move the file `MANIFEST` last, as a
/// folder without one is no checkpoint. An operation that failed is not tried again here: after a
/// failed `sync` nobody knows what is stored.
///
/// Names are `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`; everything else is refused.
pub trait CheckpointStorage: fmt::Debug + Send + Sync {
    /// The names of all folders, or of the files in one; in any order.
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault>;

    /// Creates a folder. Fails if it is there: of two that try, one succeeds.
    fn create_folder(&self, folder: &str) -> Result<(), StorageFault>;

    /// Creates a file. Fails if it is there.
    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault>;

    /// Opens a file. It stays readable while it is open, even if it is removed.
    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault>;

    /// Renames a folder. Fails if the new name is taken.
    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault>;

    /// Removes a folder with its files.
    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault>;

    /// Makes durable which files are in a folder, or which folders there are.
    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault>;
}

/// A file that is being written, from its start to its end.
pub trait WriteFile: fmt::Debug + Send {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault>;

    /// Makes all that was written durable.
    fn sync(&mut self) -> Result<(), StorageFault>;
}

/// A file that is being read.
pub trait ReadFile: fmt::Debug + Send + Sync {
    /// Its length in bytes when it was opened.
    fn bytes(&self) -> u64;

    /// Fills `out` with the bytes from `offset` on; fails if there are fewer.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault>;
}

/// Whether a folder or file may have this name.
pub(super) fn is_valid_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let first = name.bytes().next();
    first.is_some_and(|byte| byte.is_ascii_alphanumeric())
        && name.len() <= NAME_BYTES_MAX
        && name.bytes().all(inner)
}

const NAME_BYTES_MAX: usize = 64;
