//! A storage in memory that fails when told to, and knows what a power cut would leave.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::checkpoint::{CheckpointStorage, ReadFile, StorageFault, WriteFile};

/// What survives a crash.
#[derive(Clone, Copy, Debug)]
pub(super) enum Crash {
    /// Everything: the process was killed.
    Kill,
    /// Names, and of files only what was synced: a file system that writes names first.
    NamesFirst,
    /// Only what was synced.
    PowerCut,
}

#[derive(Clone, Debug, Default)]
pub(super) struct MemoryStorage(Arc<Mutex<World>>);

#[derive(Debug, Default)]
struct World {
    folders: BTreeMap<String, usize>,
    durable_folders: BTreeMap<String, usize>,
    names: Vec<Names>,
    files: Vec<Bytes>,
    /// Operations until every one fails.
    left: Option<usize>,
    failed: bool,
    /// Writes until one stores something else and says nothing.
    sound: Option<usize>,
}

#[derive(Debug, Default)]
struct Names {
    now: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
}

#[derive(Debug, Default)]
struct Bytes {
    now: Vec<u8>,
    durable: Vec<u8>,
}

impl World {
    /// Counts one operation.
    fn operate(&mut self) -> Result<(), StorageFault> {
        match &mut self.left {
            Some(0) => {
                self.failed = true;
                Err(fault("planned", io::ErrorKind::Other))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn names(&mut self, folder: &str) -> Result<&mut Names, StorageFault> {
        let found = self.folders.get(folder).copied();
        found.map(|id| &mut self.names[id]).ok_or_else(|| fault(folder, io::ErrorKind::NotFound))
    }
}

fn fault(path: &str, kind: io::ErrorKind) -> StorageFault {
    StorageFault::new("use", path, kind.into())
}

impl MemoryStorage {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets so many operations succeed, and none after them.
    pub(super) fn fail_after(&self, operations: usize) {
        self.world().left = Some(operations);
    }

    /// Lets so many writes store what they are given, and the next one a flipped bit.
    pub(super) fn rot_after(&self, writes: usize) {
        self.world().sound = Some(writes);
    }

    /// Whether that write is yet to come; none rots after this.
    pub(super) fn stop_rot(&self) -> bool {
        self.world().sound.take().is_some()
    }

    /// The machine comes back. Returns whether it had been asked for more than it could do.
    pub(super) fn crash(&self, crash: Crash) -> bool {
        let mut world = self.world();
        world.left = None;
        if !matches!(crash, Crash::Kill) {
            world.files.iter_mut().for_each(|file| file.now.clone_from(&file.durable));
        }
        if matches!(crash, Crash::PowerCut) {
            world.folders = world.durable_folders.clone();
            world.names.iter_mut().for_each(|names| names.now.clone_from(&names.durable));
        }
        std::mem::take(&mut world.failed)
    }

    /// A copy that changes on its own.
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
        let mut world = self.world();
        let id = world.names(folder).unwrap().now[file];
        world.files[id].now.clone()
    }

    /// Puts a file there, whatever was.
    pub(super) fn put(&self, folder: &str, file: &str, bytes: Vec<u8>) {
        let mut world = self.world();
        let id = world.files.len();
        world.files.push(Bytes { now: bytes.clone(), durable: bytes });
        world.names(folder).unwrap().now.insert(file.to_owned(), id);
    }

    pub(super) fn remove(&self, folder: &str, file: &str) {
        self.world().names(folder).unwrap().now.remove(file);
    }
}

impl CheckpointStorage for MemoryStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        let mut world = self.world();
        world.operate()?;
        Ok(match folder {
            None => world.folders.keys().cloned().collect(),
            Some(folder) => world.names(folder)?.now.keys().cloned().collect(),
        })
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        let mut world = self.world();
        world.operate()?;
        if world.folders.contains_key(folder) {
            return Err(fault(folder, io::ErrorKind::AlreadyExists));
        }
        let id = world.names.len();
        world.names.push(Names::default());
        world.folders.insert(folder.to_owned(), id);
        Ok(())
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        let mut world = self.world();
        world.operate()?;
        let id = world.files.len();
        let names = world.names(folder)?;
        if names.now.contains_key(file) {
            return Err(fault(file, io::ErrorKind::AlreadyExists));
        }
        names.now.insert(file.to_owned(), id);
        world.files.push(Bytes::default());
        Ok(Box::new(MemoryFile { storage: self.clone(), id, bytes: 0 }))
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let mut world = self.world();
        world.operate()?;
        let path = format!("{folder}/{file}");
        let id = world.names(folder)?.now.get(file).copied();
        let id = id.ok_or_else(|| fault(&path, io::ErrorKind::NotFound))?;
        let bytes = world.files[id].now.len() as u64;
        Ok(Box::new(MemoryFile { storage: self.clone(), id, bytes }))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        let mut world = self.world();
        world.operate()?;
        if world.folders.contains_key(to) {
            return Err(fault(to, io::ErrorKind::AlreadyExists));
        }
        let id = world.folders.remove(from).ok_or_else(|| fault(from, io::ErrorKind::NotFound))?;
        world.folders.insert(to.to_owned(), id);
        Ok(())
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        // Each file is an operation of its own, so that a crash leaves some; what is gone is gone,
        // though nothing was synced.
        for file in self.list(Some(folder))? {
            let mut world = self.world();
            world.operate()?;
            let names = world.names(folder)?;
            names.now.remove(&file);
            names.durable.remove(&file);
        }
        let mut world = self.world();
        world.operate()?;
        world.folders.remove(folder);
        Ok(())
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        let mut world = self.world();
        world.operate()?;
        match folder {
            None => world.durable_folders = world.folders.clone(),
            Some(folder) => {
                let names = world.names(folder)?;
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
        let mut world = self.storage.world();
        let outcome = world.operate();
        // A write that fails has written some.
        let written = if outcome.is_ok() { bytes.len() } else { bytes.len() / 2 };
        let mut stored = bytes[..written].to_vec();
        match &mut world.sound {
            Some(0) => {
                // The end: of a shard's file it is data, which nothing but reading all of it finds.
                stored[written - 1] ^= 4;
                world.sound = None;
            }
            Some(writes) => *writes -= 1,
            None => {}
        }
        world.files[self.id].now.append(&mut stored);
        outcome
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        let mut world = self.storage.world();
        world.operate()?;
        let file = &mut world.files[self.id];
        file.durable.clone_from(&file.now);
        Ok(())
    }
}

impl ReadFile for MemoryFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        let mut world = self.storage.world();
        world.operate()?;
        let start = offset as usize;
        let bytes = world.files[self.id].now.get(start..start + out.len());
        out.copy_from_slice(bytes.ok_or_else(|| fault("file", io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }
}
