//! A storage in memory with planned failures, which also models a power cut.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{CheckpointStorage, ReadFile, StorageFault, WriteFile};

/// A kind of crash, which determines the surviving names and contents.
#[derive(Clone, Copy, Debug)]
pub(super) enum Crash {
    /// Everything survives: the process was killed.
    Kill,
    /// Names survive, and only the synced contents of files: a file system that writes names first.
    NamesFirst,
    /// Only synced names and contents survive.
    PowerCut,
}

#[derive(Clone, Debug, Default)]
pub(super) struct MemoryStorage(Arc<Mutex<StorageState>>);

#[derive(Debug, Default)]
struct StorageState {
    folders: BTreeMap<String, usize>,
    durable_folders: BTreeMap<String, usize>,
    names: Vec<FolderNames>,
    files: Vec<FileBytes>,
    /// The number of operations before all fail.
    operations_left: Option<usize>,
    failed: bool,
    /// The number of writes before one silently stores a flipped bit.
    sound_writes: Option<usize>,
}

#[derive(Debug, Default)]
struct FolderNames {
    now: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
}

#[derive(Debug, Default)]
struct FileBytes {
    now: Vec<u8>,
    durable: Vec<u8>,
}

impl StorageState {
    /// Counts one operation. Fails if none is left.
    fn operate(&mut self) -> Result<(), StorageFault> {
        match &mut self.operations_left {
            Some(0) => {
                self.failed = true;
                Err(fault("planned", io::ErrorKind::Other))
            }
            Some(operations_left) => {
                *operations_left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn names(&mut self, folder: &str) -> Result<&mut FolderNames, StorageFault> {
        let found = self.folders.get(folder).copied();
        found.map(|id| &mut self.names[id]).ok_or_else(|| fault(folder, io::ErrorKind::NotFound))
    }
}

fn fault(path: &str, kind: io::ErrorKind) -> StorageFault {
    StorageFault::new("use", path, kind.into())
}

impl MemoryStorage {
    fn state(&self) -> MutexGuard<'_, StorageState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets this many operations succeed, and none after them.
    pub(super) fn fail_after(&self, operations: usize) {
        self.state().operations_left = Some(operations);
    }

    /// Lets this many writes store their bytes, and the next one a flipped bit.
    pub(super) fn rot_after(&self, writes: usize) {
        self.state().sound_writes = Some(writes);
    }

    /// Plans no flipped bit any more. Returns whether the planned one has not been stored yet.
    pub(super) fn stop_rot(&self) -> bool {
        self.state().sound_writes.take().is_some()
    }

    /// Restarts the machine after a crash. Returns whether an operation had failed.
    pub(super) fn crash(&self, crash: Crash) -> bool {
        let mut state = self.state();
        state.operations_left = None;
        if !matches!(crash, Crash::Kill) {
            state.files.iter_mut().for_each(|file| file.now.clone_from(&file.durable));
        }
        if matches!(crash, Crash::PowerCut) {
            state.folders = state.durable_folders.clone();
            state.names.iter_mut().for_each(|names| names.now.clone_from(&names.durable));
        }
        std::mem::take(&mut state.failed)
    }

    /// Returns an independent copy.
    pub(super) fn fork(&self) -> MemoryStorage {
        let copy = MemoryStorage::default();
        for folder in self.list(None).unwrap() {
            copy.create_folder(&folder).unwrap();
            for file in self.list(Some(&folder)).unwrap() {
                copy.put(&folder, &file, self.bytes_of(&folder, &file));
            }
        }
        copy
    }

    pub(super) fn bytes_of(&self, folder: &str, file: &str) -> Vec<u8> {
        let mut state = self.state();
        let id = state.names(folder).unwrap().now[file];
        state.files[id].now.clone()
    }

    /// Stores a file, replacing an existing one.
    pub(super) fn put(&self, folder: &str, file: &str, bytes: Vec<u8>) {
        let mut state = self.state();
        let id = state.files.len();
        state.files.push(FileBytes { now: bytes.clone(), durable: bytes });
        state.names(folder).unwrap().now.insert(file.to_owned(), id);
    }

    pub(super) fn remove(&self, folder: &str, file: &str) {
        self.state().names(folder).unwrap().now.remove(file);
    }
}

impl CheckpointStorage for MemoryStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        let mut state = self.state();
        state.operate()?;
        Ok(match folder {
            None => state.folders.keys().cloned().collect(),
            Some(folder) => state.names(folder)?.now.keys().cloned().collect(),
        })
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        let mut state = self.state();
        state.operate()?;
        if state.folders.contains_key(folder) {
            return Err(fault(folder, io::ErrorKind::AlreadyExists));
        }
        let id = state.names.len();
        state.names.push(FolderNames::default());
        state.folders.insert(folder.to_owned(), id);
        Ok(())
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        let mut state = self.state();
        state.operate()?;
        let id = state.files.len();
        let names = state.names(folder)?;
        if names.now.contains_key(file) {
            return Err(fault(file, io::ErrorKind::AlreadyExists));
        }
        names.now.insert(file.to_owned(), id);
        state.files.push(FileBytes::default());
        Ok(Box::new(MemoryFile { storage: self.clone(), id, bytes: 0 }))
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let mut state = self.state();
        state.operate()?;
        let path = format!("{folder}/{file}");
        let id = state.names(folder)?.now.get(file).copied();
        let id = id.ok_or_else(|| fault(&path, io::ErrorKind::NotFound))?;
        let bytes = state.files[id].now.len() as u64;
        Ok(Box::new(MemoryFile { storage: self.clone(), id, bytes }))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        let mut state = self.state();
        state.operate()?;
        if state.folders.contains_key(to) {
            return Err(fault(to, io::ErrorKind::AlreadyExists));
        }
        let id = state.folders.remove(from).ok_or_else(|| fault(from, io::ErrorKind::NotFound))?;
        state.folders.insert(to.to_owned(), id);
        Ok(())
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        // Each file is a separate operation, so that a crash may leave some. A removed file stays
        // removed, even without a sync.
        for file in self.list(Some(folder))? {
            let mut state = self.state();
            state.operate()?;
            let names = state.names(folder)?;
            names.now.remove(&file);
            names.durable.remove(&file);
        }
        let mut state = self.state();
        state.operate()?;
        state.folders.remove(folder);
        Ok(())
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        let mut state = self.state();
        state.operate()?;
        match folder {
            None => state.durable_folders = state.folders.clone(),
            Some(folder) => {
                let names = state.names(folder)?;
                names.durable = names.now.clone();
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryFile {
    storage: MemoryStorage,
    id: usize,
    bytes: u64,
}

impl WriteFile for MemoryFile {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault> {
        let mut state = self.storage.state();
        let outcome = state.operate();
        // A write that fails stores half of its bytes.
        let written = if outcome.is_ok() { bytes.len() } else { bytes.len() / 2 };
        let mut stored = bytes[..written].to_vec();
        match &mut state.sound_writes {
            Some(0) => {
                // The last byte is flipped: in a shard's file it is data, so only a full read finds
                // it.
                stored[written - 1] ^= 4;
                state.sound_writes = None;
            }
            Some(writes) => *writes -= 1,
            None => {}
        }
        state.files[self.id].now.append(&mut stored);
        outcome
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        let mut state = self.storage.state();
        state.operate()?;
        let file = &mut state.files[self.id];
        file.durable.clone_from(&file.now);
        Ok(())
    }
}

impl ReadFile for MemoryFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        let mut state = self.storage.state();
        state.operate()?;
        let start = offset as usize;
        let bytes = state.files[self.id].now.get(start..start + out.len());
        out.copy_from_slice(bytes.ok_or_else(|| fault("file", io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }
}
