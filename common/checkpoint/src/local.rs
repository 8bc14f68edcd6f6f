//! Checkpoints in a directory of this machine, local or mounted.

use std::ffi::OsString;
use std::fs::{DirBuilder, DirEntry, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pushpull_common::local_path;
use pushpull_common::permissions::{self, ProcessUser, Writers};
use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::process::{Gid, getegid, geteuid, getgroups};

use crate::manifest::MANIFEST;
use crate::storage::{
    CheckpointStorage, ReadFile, StorageClaim, StorageFault, WriteFile, is_valid_name,
};

/// A directory that holds checkpoints.
///
/// The directory must belong to this user, and no other user may write to it. Every operation
/// checks this, unless the directory was opened for reading only. No name and no link leads out of the directory: files are opened one path component
/// at a time, and links are not followed. Every operation opens the directory again, so a directory
/// that was removed, replaced or mounted meanwhile is used as it is now. Several ps tasks may share
/// one directory that all their machines mount.
#[derive(Debug)]
pub struct LocalDirectory {
    /// The absolute path.
    path: PathBuf,
    access: DirectoryAccess,
}

/// The access that a directory is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectoryAccess {
    /// It is only read, so any user may be able to write to it.
    Read,
    /// It is written, and nobody but these may do so.
    Write(Writers),
    /// It is written, and created again if it is gone.
    Create(Writers),
}

impl LocalDirectory {
    /// Opens a directory, or creates it and its parents with mode 0700. If it is removed later, the
    /// next operation creates it again. Fails for the folder of one checkpoint.
    pub fn create(path: impl Into<PathBuf>) -> Result<LocalDirectory, StorageFault> {
        LocalDirectory::at(path.into(), DirectoryAccess::Create(Writers::Owner))
    }

    /// Opens or creates a directory as [`LocalDirectory::create`] does, and accepts that its group may
    /// write to it, if this process belongs to the group. A volume of Kubernetes with `fsGroup` is
    /// such a directory. Every member of the group can change the checkpoints.
    pub fn create_for_group(path: impl Into<PathBuf>) -> Result<LocalDirectory, StorageFault> {
        LocalDirectory::at(path.into(), DirectoryAccess::Create(Writers::Group))
    }

    /// Opens a directory for reading only. Any user may own it or write to it: what is read is
    /// verified by its checksums, and nothing is changed. Operations that write fail.
    pub fn open_read_only(path: impl Into<PathBuf>) -> Result<LocalDirectory, StorageFault> {
        LocalDirectory::at(path.into(), DirectoryAccess::Read)
    }

    /// Opens a directory. Fails if it does not exist, belongs to another user, lets others write, or
    /// is the folder of one checkpoint.
    pub fn open(path: impl Into<PathBuf>) -> Result<LocalDirectory, StorageFault> {
        LocalDirectory::at(path.into(), DirectoryAccess::Write(Writers::Owner))
    }

    fn at(path: PathBuf, access: DirectoryAccess) -> Result<LocalDirectory, StorageFault> {
        local_path::check(&path)
            .map_err(|source| StorageFault::new("open", path.display(), source))?;
        // An absolute path stays valid if the process changes its working directory.
        let path = std::path::absolute(&path)
            .map_err(|source| StorageFault::new("open", path.display(), source))?;
        let directory = LocalDirectory { path, access };
        directory.root()?;
        directory.check_parent()?;
        Ok(directory)
    }

    /// Checks that the directory is not the folder of one checkpoint, if it is to be written. It has
    /// no other checkpoints, so a training that is to resume would begin at step 0.
    fn check_parent(&self) -> Result<(), StorageFault> {
        if self.access == DirectoryAccess::Read || !is_checkpoint(&self.path) {
            return Ok(());
        }
        let parent = self.path.parent().unwrap_or(&self.path).display();
        let why = format!("it is the folder of one checkpoint: give its parent, {parent}");
        let error = io::Error::new(io::ErrorKind::InvalidInput, why);
        Err(StorageFault::new("open", self.path.display(), error))
    }

    /// Opens the directory as it is now, and checks its permissions.
    fn root(&self) -> Result<File, StorageFault> {
        let path = &self.path;
        let fault = |source| StorageFault::new("open", path.display(), source);
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(OFlags::DIRECTORY.bits() as i32);
        let creates = matches!(self.access, DirectoryAccess::Create(_));
        let root = match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && creates => {
                let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
                created.map_err(|source| StorageFault::new("create", path.display(), source))?;
                options.open(path)
            }
            opened => opened,
        };
        let root = root.map_err(fault)?;
        if let DirectoryAccess::Write(writers) | DirectoryAccess::Create(writers) = self.access {
            let metadata = root.metadata().map_err(fault)?;
            let checked = permissions::check(&metadata, writers, &process_user());
            checked.map_err(|reason| fault(io::Error::other(reason)))?;
        }
        Ok(root)
    }

    /// Checks that the directory may be changed.
    fn check_writable(&self, operation: &'static str) -> Result<(), StorageFault> {
        if self.access != DirectoryAccess::Read {
            return Ok(());
        }
        let error =
            io::Error::new(io::ErrorKind::PermissionDenied, "it was opened to be read only");
        Err(StorageFault::new(operation, self.path.display(), error))
    }

    fn folder(&self, folder: &str) -> Result<File, StorageFault> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = self.root()?;
        self.on("open", &[folder], || rustix::fs::openat(&root, folder, flags, Mode::empty()))
            .map(File::from)
    }

    /// Runs an operation on a path, if all names in it are valid.
    fn on<T>(
        &self,
        operation: &'static str,
        names: &[&str],
        act: impl FnOnce() -> rustix::io::Result<T>,
    ) -> Result<T, StorageFault> {
        let path = names.iter().fold(self.path.clone(), |path, name| path.join(name));
        let fault = |source| StorageFault::new(operation, path.display(), source);
        if !names.iter().all(|name| is_valid_name(name)) {
            return Err(fault(io::Error::new(io::ErrorKind::InvalidInput, "invalid name")));
        }
        act().map_err(|error| fault(error.into()))
    }

    fn path_of(&self, folder: &str, file: &str) -> PathBuf {
        self.path.join(folder).join(file)
    }
}

impl CheckpointStorage for LocalDirectory {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        let directory = match folder {
            Some(folder) => self.folder(folder)?,
            None => self.root()?,
        };
        let names: Vec<&str> = folder.into_iter().collect();
        let entries = self.on("list", &names, || {
            Dir::read_from(&directory)?
                .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
                .collect::<rustix::io::Result<Vec<String>>>()
        })?;
        // Entries with other names are not ours, and are not checkpoints.
        Ok(entries.into_iter().filter(|name| is_valid_name(name)).collect())
    }

    /// Locks the directory. A file system that cannot lock claims nothing.
    fn claim(&self) -> Result<StorageClaim, StorageFault> {
        let root = self.root()?;
        match rustix::fs::flock(&root, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(StorageClaim::held_by(root)),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let text = "another cluster saves its checkpoints there";
                let error = io::Error::new(io::ErrorKind::WouldBlock, text);
                Err(StorageFault::new("use", self.path.display(), error))
            }
            Err(_) => Ok(StorageClaim::default()),
        }
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.check_writable("create")?;
        let root = self.root()?;
        self.on("create", &[folder], || rustix::fs::mkdirat(&root, folder, Mode::RWXU))
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        self.check_writable("create")?;
        let parent = self.folder(folder)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let created =
            self.on("create", &[folder, file], || rustix::fs::openat(&parent, file, flags, mode))?;
        Ok(Box::new(LocalFile { path: self.path_of(folder, file), file: created.into(), bytes: 0 }))
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let parent = self.folder(folder)?;
        // Without `NONBLOCK`, opening a pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = self.on("open", &[folder, file], || {
            rustix::fs::openat(&parent, file, flags, Mode::empty())
        })?;
        let path = self.path_of(folder, file);
        let file = File::from(opened);
        let fault = |source| StorageFault::new("open", path.display(), source);
        let metadata = file.metadata().map_err(fault)?;
        if !metadata.is_file() {
            return Err(fault(io::Error::other("not a regular file")));
        }
        Ok(Box::new(LocalFile { bytes: metadata.len(), path, file }))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        self.check_writable("rename")?;
        // Renaming a directory fails if the new name is a directory with files in it.
        let root = self.root()?;
        self.on("rename", &[from, to], || rustix::fs::renameat(&root, from, &root, to))
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.check_writable("remove")?;
        let parent = self.folder(folder)?;
        for file in self.list(Some(folder))? {
            self.on("remove", &[folder, &file], || {
                rustix::fs::unlinkat(&parent, file.as_str(), AtFlags::empty())
            })?;
        }
        let root = self.root()?;
        self.on("remove", &[folder], || rustix::fs::unlinkat(&root, folder, AtFlags::REMOVEDIR))
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        match folder {
            Some(folder) => sync_to_disk(&self.folder(folder)?, &self.path.join(folder)),
            None => sync_to_disk(&self.root()?, &self.path),
        }
    }
}

/// A file outside of any checkpoint that replaces an existing file once it is complete. Until then
/// it has another name, and is removed if it is dropped.
#[derive(Debug)]
pub(crate) struct ReplacingFile {
    path: PathBuf,
    part: LocalFile,
    is_complete: bool,
}

impl ReplacingFile {
    /// Begins a file beside `path`, or beside the end of a link there. A partial file that was left
    /// there is removed. Fails in the folder of a checkpoint and in a state directory, whose files
    /// are not to be replaced.
    pub(crate) fn create(path: &Path) -> Result<ReplacingFile, StorageFault> {
        let fault = |source| StorageFault::new("create", path.display(), source);
        let invalid = |why: String| fault(io::Error::new(io::ErrorKind::InvalidInput, why));
        local_path::check(path).map_err(fault)?;
        let path = &match path.canonicalize() {
            Ok(existing) if existing.is_file() => existing,
            Ok(_) => return Err(invalid("something is there, and it is no file".to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(fault(error)),
        };
        let Some(name) = path.file_name() else {
            return Err(invalid("the path names no file".to_owned()));
        };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if let Some(kind) = precious_folder(parent) {
            let why = format!("{} is {kind}, and a file in it may be replaced", parent.display());
            return Err(invalid(why));
        }
        let mut part_name = OsString::from(".");
        part_name.push(name);
        part_name.push(".part");
        let part = path.with_file_name(part_name);
        let fault = |source| StorageFault::new("create", part.display(), source);
        match std::fs::remove_file(&part) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fault(error)),
            _ => {}
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part);
        let file = file.map_err(fault)?;
        let part = LocalFile { path: part, file, bytes: 0 };
        Ok(ReplacingFile { path: path.clone(), part, is_complete: false })
    }
}

impl Drop for ReplacingFile {
    fn drop(&mut self) {
        if !self.is_complete {
            // Its failure is that of the file, which was reported.
            let _ = std::fs::remove_file(&self.part.path);
        }
    }
}

impl WriteFile for ReplacingFile {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault> {
        self.part.write(bytes)
    }

    /// Makes the file durable and renames it. Nothing may be written afterwards.
    fn sync(&mut self) -> Result<(), StorageFault> {
        self.part.sync()?;
        let fault = |operation, source| StorageFault::new(operation, self.path.display(), source);
        std::fs::rename(&self.part.path, &self.path).map_err(|e| fault("rename to", e))?;
        self.is_complete = true;
        let parent = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        sync_to_disk(&File::open(parent).map_err(|e| fault("open the folder of", e))?, parent)
    }
}

/// Returns what a folder is if its files are a checkpoint or the state of a server.
fn precious_folder(folder: &Path) -> Option<&'static str> {
    if is_checkpoint(folder) {
        return Some("the folder of a checkpoint");
    }
    is_state(folder).then_some("the state directory of a server")
}

/// Returns whether a folder is the state directory of a server, or the folder of a shard in one.
fn is_state(folder: &Path) -> bool {
    let number = |name: &str| name.strip_prefix("shard-")?.parse::<u16>().ok();
    let is_shard = |entry: &DirEntry| {
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        is_folder && entry.file_name().to_str().and_then(number).is_some()
    };
    let has_shard = || folder.read_dir().is_ok_and(|all| all.flatten().any(|it| is_shard(&it)));
    folder.join("control").is_file() || has_shard()
}

/// Returns whether a folder is that of one complete checkpoint.
fn is_checkpoint(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file()
}

#[derive(Debug)]
struct LocalFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl WriteFile for LocalFile {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault> {
        let written = self.file.write_all(bytes);
        written.map_err(|source| StorageFault::new("write", self.path.display(), source))
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        sync_to_disk(&self.file, &self.path)?;
        forget_pages(&self.file);
        Ok(())
    }
}

impl ReadFile for LocalFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        let read = self.file.read_exact_at(out, offset);
        read.map_err(|source| StorageFault::new("read", self.path.display(), source))
    }
}

/// Returns the effective user of this process, and its groups.
fn process_user() -> ProcessUser {
    let groups = getgroups().unwrap_or_default().into_iter().chain([getegid()]);
    ProcessUser { user: geteuid().as_raw(), groups: groups.map(Gid::as_raw).collect() }
}

/// Makes a file or directory durable; the only function that does.
fn sync_to_disk(file: &File, path: &Path) -> Result<(), StorageFault> {
    file.sync_all().map_err(|source| StorageFault::new("sync", path.display(), source))
}

/// Drops the pages of a written file from the page cache. Reading the file back then reads the
/// disk, and the model is not in memory twice. This is a hint; its result does not matter.
fn forget_pages(file: impl AsFd) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}
