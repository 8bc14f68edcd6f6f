//! Abandons file operations: a flag that is checked before each operation of a storage.
//!
//! A thread that waits for a disk cannot be interrupted. So its reads and writes go through a
//! storage that checks the flag first. Abandoned work ends after the current piece, of at most 1
//! MiB.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use thiserror::Error;

use super::storage::{CheckpointStorage, ReadFile, StorageFault, WriteFile};

/// A flag that abandons the file operations of another thread. All clones are one flag.
#[derive(Clone, Debug, Default)]
pub(crate) struct GiveUp(Arc<OnceLock<&'static str>>);

impl GiveUp {
    /// Abandons all operations of the storages that this flag watches, permanently. Only the first
    /// reason is kept.
    pub(crate) fn give_up(&self, reason: &'static str) {
        let _ = self.0.set(reason);
    }

    /// Returns a storage whose operations fail once the work is abandoned.
    pub(crate) fn watch(&self, storage: Arc<dyn CheckpointStorage>) -> Arc<dyn CheckpointStorage> {
        Arc::new(WatchedStorage { storage, given_up: self.clone() })
    }

    fn check(&self, operation: &'static str, path: impl fmt::Display) -> Result<(), StorageFault> {
        match self.0.get() {
            None => Ok(()),
            Some(&reason) => {
                let source = io::Error::other(GivenUp { reason });
                Err(StorageFault::new(operation, path, source))
            }
        }
    }
}

/// The error of a watched storage whose work was abandoned.
#[derive(Debug, Error)]
#[error("abandoned because {reason}")]
pub(super) struct GivenUp {
    pub(super) reason: &'static str,
}

impl GivenUp {
    /// Returns this error if it is the cause of a storage fault.
    pub(super) fn of(fault: &StorageFault) -> Option<&GivenUp> {
        fault.source.get_ref()?.downcast_ref()
    }
}

#[derive(Debug)]
struct WatchedStorage {
    storage: Arc<dyn CheckpointStorage>,
    given_up: GiveUp,
}

impl CheckpointStorage for WatchedStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        self.given_up.check("list", folder.unwrap_or("the checkpoints"))?;
        self.storage.list(folder)
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.given_up.check("create", folder)?;
        self.storage.create_folder(folder)
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        let path = format!("{folder}/{file}");
        self.given_up.check("create", &path)?;
        let out = self.storage.create(folder, file)?;
        Ok(Box::new(WatchedFile { path, given_up: self.given_up.clone(), file: out }))
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let path = format!("{folder}/{file}");
        self.given_up.check("open", &path)?;
        let opened = self.storage.open(folder, file)?;
        Ok(Box::new(WatchedFile { path, given_up: self.given_up.clone(), file: opened }))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        self.given_up.check("rename", from)?;
        self.storage.rename_folder(from, to)
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.given_up.check("remove", folder)?;
        self.storage.remove_folder(folder)
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        // A rename that was made is always made durable: it is too late to abandon it.
        if let Some(folder) = folder {
            self.given_up.check("sync", folder)?;
        }
        self.storage.sync(folder)
    }
}

#[derive(Debug)]
struct WatchedFile<F> {
    path: String,
    given_up: GiveUp,
    file: F,
}

impl WriteFile for WatchedFile<Box<dyn WriteFile>> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault> {
        self.given_up.check("write", &self.path)?;
        self.file.write(bytes)
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        self.given_up.check("sync", &self.path)?;
        self.file.sync()
    }
}

impl ReadFile for WatchedFile<Box<dyn ReadFile>> {
    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        self.given_up.check("read", &self.path)?;
        self.file.read(offset, out)
    }
}
