//! The storage interface of checkpoints: the few operations that every storage must provide.

use std::fmt;
use std::io;

use thiserror::Error;

/// A failed operation of a storage.
#[derive(Debug, Error)]
#[error("cannot {operation} {path}")]
#[non_exhaustive]
pub struct StorageFault {
    /// The operation, such as `create`.
    pub operation: &'static str,
    /// The path, or another name of the object.
    pub path: String,
    /// The error that the storage returned.
    pub source: io::Error,
}

impl StorageFault {
    /// Creates a fault of this operation on this path.
    pub fn new(operation: &'static str, path: impl fmt::Display, source: io::Error) -> Self {
        StorageFault { operation, path: path.to_string(), source }
    }

    /// Returns whether the object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// A storage for checkpoints: folders of files, one level deep.
///
/// A file is created once and never changed. A folder is created as `NAME.tmp`. Its rename to `NAME`
/// makes a checkpoint complete, and its rename back withdraws it; there are no other renames. A
/// storage that cannot rename a folder atomically must move the file `MANIFEST` last, because a
/// folder without one is not a checkpoint. A failed operation is not retried: after a failed `sync`
/// the stored contents are unknown.
///
/// Names are `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`; all others are refused.
pub trait CheckpointStorage: fmt::Debug + Send + Sync {
    /// Returns the names of all folders, or of the files in one folder, in any order.
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault>;

    /// Creates a folder. Fails if it exists: of two concurrent calls, one succeeds.
    fn create_folder(&self, folder: &str) -> Result<(), StorageFault>;

    /// Creates a file. Fails if it exists.
    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault>;

    /// Opens a file. If it is removed while it is open, it stays readable or its reads fail; they
    /// never return other bytes.
    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault>;

    /// Renames a folder. Fails if the new name is taken.
    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault>;

    /// Removes a folder with its files.
    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault>;

    /// Makes the names of the files in a folder durable, or the names of all folders.
    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault>;

    /// Claims the storage for the cluster that saves there, until the claim is dropped or its
    /// process ends. Fails with [`io::ErrorKind::WouldBlock`] if another one has it.
    ///
    /// The default claims nothing: it cannot tell another cluster, which would delete checkpoints of
    /// this one as older ones of its own.
    fn claim(&self) -> Result<StorageClaim, StorageFault> {
        Ok(StorageClaim::default())
    }
}

/// The right of a cluster to save checkpoints in a storage: see [`CheckpointStorage::claim`].
#[derive(Debug, Default)]
pub struct StorageClaim {
    _held: Option<Box<dyn fmt::Debug + Send + Sync>>,
}

impl StorageClaim {
    /// Returns a claim that lasts until this value is dropped.
    pub fn held_by(value: impl fmt::Debug + Send + Sync + 'static) -> StorageClaim {
        StorageClaim { _held: Some(Box::new(value)) }
    }
}

/// A file that is being written, from its start to its end.
pub trait WriteFile: fmt::Debug + Send {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault>;

    /// Makes all written bytes durable.
    fn sync(&mut self) -> Result<(), StorageFault>;
}

/// A file that is being read.
pub trait ReadFile: fmt::Debug + Send + Sync {
    /// Returns the length in bytes when the file was opened.
    fn bytes(&self) -> u64;

    /// Fills `out` with the bytes from `offset` on. Fails if there are fewer.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault>;
}

/// Returns whether a folder or file of a storage may have this name.
pub fn is_valid_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let first = name.bytes().next();
    first.is_some_and(|byte| byte.is_ascii_alphanumeric())
        && name.len() <= NAME_BYTES_MAX
        && name.bytes().all(inner)
}

const NAME_BYTES_MAX: usize = 64;
