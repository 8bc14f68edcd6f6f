//! Abandons file operations: a flag that is checked before each operation of a storage.
//!
//! A thread that waits for a disk cannot be interrupted. So its reads and writes go through a
//! storage that checks the flag first. Abandoned work ends after the current piece, of at most 1
//! MiB.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use thiserror::Error;

use crate::storage::{CheckpointStorage, ReadFile, StorageFault, WriteFile};

/// A flag that abandons the file operations of another thread. All clones are one flag.
#[derive(Clone, Debug, Default)]
pub struct AbandonFlag(Arc<OnceLock<&'static str>>);

impl AbandonFlag {
    /// Abandons all operations of the storages that this flag watches, permanently. Only the first
    /// reason is kept.
    pub fn abandon(&self, reason: &'static str) {
        let _ = self.0.set(reason);
    }

    /// Returns why the operations were abandoned; `None` if they were not.
    pub fn reason(&self) -> Option<&'static str> {
        self.0.get().copied()
    }

    /// Returns a storage whose operations fail once the work is abandoned.
    pub fn watch(&self, storage: Arc<dyn CheckpointStorage>) -> Arc<dyn CheckpointStorage> {
        Arc::new(WatchedStorage { storage, abandon_flag: self.clone() })
    }

    fn check(&self, operation: &'static str, path: impl fmt::Display) -> Result<(), StorageFault> {
        match self.0.get() {
            None => Ok(()),
            Some(&reason) => {
                let source = io::Error::other(Abandoned { reason });
                Err(StorageFault::new(operation, path, source))
            }
        }
    }
}

/// The error of a watched storage whose work was abandoned.
#[derive(Debug, Error)]
#[error("abandoned because {reason}")]
pub(crate) struct Abandoned {
    pub(crate) reason: &'static str,
}

impl Abandoned {
    /// Returns this error if it is the cause of a storage fault.
    pub(crate) fn of(fault: &StorageFault) -> Option<&Abandoned> {
        fault.source.get_ref()?.downcast_ref()
    }
}

#[derive(Debug)]
struct WatchedStorage {
    storage: Arc<dyn CheckpointStorage>,
    abandon_flag: AbandonFlag,
}

impl CheckpointStorage for WatchedStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        self.abandon_flag.check("list", folder.unwrap_or("the checkpoints"))?;
        self.storage.list(folder)
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.abandon_flag.check("create", folder)?;
        self.storage.create_folder(folder)
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        let path = format!("{folder}/{file}");
        self.abandon_flag.check("create", &path)?;
        let out = self.storage.create(folder, file)?;
        Ok(Box::new(WatchedFile { path, abandon_flag: self.abandon_flag.clone(), file: out }))
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let path = format!("{folder}/{file}");
        self.abandon_flag.check("open", &path)?;
        let opened = self.storage.open(folder, file)?;
        Ok(Box::new(WatchedFile { path, abandon_flag: self.abandon_flag.clone(), file: opened }))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        self.abandon_flag.check("rename", from)?;
        self.storage.rename_folder(from, to)
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.abandon_flag.check("remove", folder)?;
        self.storage.remove_folder(folder)
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        // A rename that was made is always made durable: it is too late to abandon it.
        if let Some(folder) = folder {
            self.abandon_flag.check("sync", folder)?;
        }
        self.storage.sync(folder)
    }
}

#[derive(Debug)]
struct WatchedFile<F> {
    path: String,
    abandon_flag: AbandonFlag,
    file: F,
}

impl WriteFile for WatchedFile<Box<dyn WriteFile>> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault> {
        self.abandon_flag.check("write", &self.path)?;
        self.file.write(bytes)
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        self.abandon_flag.check("sync", &self.path)?;
        self.file.sync()
    }
}

impl ReadFile for WatchedFile<Box<dyn ReadFile>> {
    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        self.abandon_flag.check("read", &self.path)?;
        self.file.read(offset, out)
    }
}
