//! The state directory: private, locked, and with a folder for each shard.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pushpull_common::local_path;
use pushpull_common::permissions::{self, ProcessUser, Writers};
use rustix::process::{Gid, getegid, geteuid, getgroups};

use super::SaveNote;
use super::memory::reserve;
use crate::error::StorageError;

/// A locked state directory, which only this server uses.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    writers: Writers,
    /// Holds the lock. The kernel releases it however the process ends.
    _lock: File,
}

/// Returns whether a server holds the lock of a state directory. The check takes the lock for an
/// instant if it is free.
pub fn is_locked(directory: &Path) -> bool {
    let Ok(lock) = File::open(directory.join("lock")) else { return false };
    let shared = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockShared);
    shared == Err(rustix::io::Errno::WOULDBLOCK)
}

impl StateDirectory {
    /// Creates the directory if needed, and locks it. Nobody but this user may write to it.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        StateDirectory::open_for(path, Writers::Owner)
    }

    /// Creates the directory if needed, and locks it. Nobody but these may write to it.
    pub fn open_for(path: &Path, writers: Writers) -> Result<Self, StorageError> {
        local_path::check(path).map_err(|source| io_error("open", path, source))?;
        create_private(path, writers)?;
        let lock_path = path.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(|source| io_error("open", &lock_path, source))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |error| match error {
                rustix::io::Errno::WOULDBLOCK => StorageError::Locked { path: path.to_owned() },
                error => io_error("lock", &lock_path, error.into()),
            },
        )?;
        Ok(StateDirectory { path: path.to_owned(), writers, _lock: lock })
    }

    /// Returns the folder of one shard's arena, creating it if needed.
    pub fn shard(&self, shard: u16) -> Result<Folder, StorageError> {
        let path = self.path.join(format!("shard-{shard}"));
        create_private(&path, self.writers)?;
        Ok(Folder { path, read_only: false })
    }
}

impl StateDirectory {
    /// Returns the note about failing checkpoint saves.
    pub fn save_note(&self) -> SaveNote {
        SaveNote::of(&self.path)
    }

    /// Renames a shard's folder to `shard-N.aside`, replacing an earlier one. No server uses its
    /// contents again, but a person may want to inspect them.
    pub fn set_aside(&self, shard: u16) -> Result<(), StorageError> {
        let path = self.path.join(format!("shard-{shard}"));
        let aside = self.path.join(format!("shard-{shard}.aside"));
        match std::fs::remove_dir_all(&aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("remove", &aside, error));
            }
            _ => {}
        }
        std::fs::rename(&path, &aside).map_err(|source| io_error("put aside", &path, source))
    }
}

/// The folder of one shard's arena.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    /// Whether the folder is opened for inspection only. Another process may be using it.
    read_only: bool,
}

impl Folder {
    /// Opens a folder for inspection. Every operation that would change a file fails.
    pub fn read_only(path: &Path) -> Folder {
        Folder { path: path.to_owned(), read_only: true }
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn check_writable(&self, doing: &'static str) -> Result<(), StorageError> {
        match self.read_only {
            false => Ok(()),
            true => Err(io_error(doing, &self.path, io::ErrorKind::ReadOnlyFilesystem.into())),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the names of its files.
    pub fn names(&self) -> Result<Vec<String>, StorageError> {
        let failed = |source| io_error("list", &self.path, source);
        let entries = std::fs::read_dir(&self.path).map_err(failed)?;
        entries
            .map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned()))
            .collect()
    }

    /// Creates a file of `bytes` zeros with disk space reserved for the ranges in `occupied`.
    pub(crate) fn create(
        &self,
        name: &str,
        bytes: usize,
        occupied: &[Range<usize>],
    ) -> Result<File, StorageError> {
        self.check_writable("create a file in")?;
        let path = self.path(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(|source| io_error("create", &path, source))?;
        file.set_len(bytes as u64).map_err(|source| io_error("extend", &path, source))?;
        let reserved = occupied.iter().try_for_each(|within| reserve(&file, within.clone()));
        reserved.map_err(|source| {
            let need = occupied.iter().map(|within| within.len() as u64).sum();
            self.cannot_reserve(&path, need, source)
        })?;
        Ok(file)
    }

    /// Returns why space for a file cannot be reserved. A file system that cannot hold it beside
    /// the other files of the state, even if it held nothing else, is too small for good.
    fn cannot_reserve(&self, path: &Path, need: u64, source: io::Error) -> StorageError {
        let total = rustix::fs::statvfs(&self.path)
            .map_or(0, |found| found.f_blocks.saturating_mul(found.f_frsize));
        let limit = total.saturating_sub(self.state_bytes(path));
        // File systems without a limit of their own report a size of 0.
        match source.kind() == io::ErrorKind::StorageFull && total > 0 && need > limit {
            true => StorageError::DirectoryTooSmall { path: self.path.clone(), need, limit },
            false => io_error("reserve space for", path, source),
        }
    }

    /// Returns the bytes that the files of all shards in the state directory occupy, without one.
    fn state_bytes(&self, except: &Path) -> u64 {
        let entries = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten();
        let shards = self.path.parent().into_iter().flat_map(entries);
        let shards = shards.filter(|it| it.file_name().to_string_lossy().starts_with("shard-"));
        let files = shards.flat_map(|shard| entries(&shard.path()).collect::<Vec<_>>());
        let files = files.filter(|file| file.path() != except);
        files.filter_map(|file| Some(file.metadata().ok()?.blocks().saturating_mul(512))).sum()
    }

    /// Opens a file; `None` if it does not exist.
    ///
    /// # Errors
    /// If it is not a regular file (symbolic links are not followed) or, unless the folder is
    /// read-only, it belongs to another user or has several names.
    pub(crate) fn open(&self, name: &str) -> Result<Option<File>, StorageError> {
        let path = self.path(name);
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        let mut options = OpenOptions::new();
        options.read(true).write(!self.read_only).custom_flags(flags);
        let opened = options.open(&path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("open", &path, error)),
        };
        let metadata = file.metadata().map_err(|source| io_error("inspect", &path, source))?;
        let refuse = |reason: String| Err(StorageError::Unsafe { path: path.clone(), reason });
        if !metadata.is_file() {
            return refuse("it is not a file".into());
        }
        if self.read_only {
            return Ok(Some(file));
        }
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return refuse(format!("it belongs to user {}", metadata.uid()));
        }
        if metadata.nlink() != 1 {
            return refuse(format!("it has {} hard links", metadata.nlink()));
        }
        Ok(Some(file))
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), StorageError> {
        self.check_writable("rename a file in")?;
        let from = self.path(from);
        let to = self.path(to);
        std::fs::rename(&from, to).map_err(|source| io_error("rename", &from, source))
    }

    /// Flushes the contents of a file to disk, including its mapped pages.
    pub(crate) fn sync(&self, name: &str) -> Result<(), StorageError> {
        let path = self.path(name);
        let file = File::open(&path).map_err(|source| io_error("open", &path, source))?;
        file.sync_data().map_err(|source| io_error("flush", &path, source))
    }

    /// Replaces the contents of a file, and flushes them and the file's name to disk.
    pub(crate) fn write_durably(&self, name: &str, bytes: &[u8]) -> Result<(), StorageError> {
        let path = self.path(name);
        let failed = |doing: &'static str| {
            let path = path.clone();
            move |source| io_error(doing, &path, source)
        };
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&path).map_err(failed("open"))?;
        file.write_all(bytes).map_err(failed("write"))?;
        file.sync_all().map_err(failed("flush"))?;
        self.sync_names()
    }

    /// Flushes the names of the files to disk.
    pub(crate) fn sync_names(&self) -> Result<(), StorageError> {
        sync_directory(&self.path)
    }

    /// Flushes the path to this folder to disk: its own name and those of its ancestors, up to the
    /// first directory that this user cannot write and so cannot have created.
    ///
    /// The names are flushed every time, because the process that created them may not have got
    /// that far. A flush without changes costs nothing.
    pub(crate) fn sync_way(&self) -> Result<(), StorageError> {
        let path = self.path.canonicalize();
        let path = path.map_err(|source| io_error("find", &self.path, source))?;
        let writable = rustix::fs::Access::WRITE_OK;
        let above = path.ancestors().skip(1);
        for directory in above.take_while(|path| rustix::fs::access(*path, writable).is_ok()) {
            sync_directory(directory)?;
        }
        Ok(())
    }

    /// Returns whether the file system is in memory and lost on a reboot.
    #[cfg(target_os = "linux")]
    pub fn is_in_memory(&self) -> bool {
        const TMPFS: i64 = 0x0102_1994;
        #[allow(clippy::useless_conversion, reason = "the type differs between platforms")]
        rustix::fs::statfs(&self.path).is_ok_and(|statfs| i64::from(statfs.f_type) == TMPFS)
    }

    /// Returns `false`: this platform offers no check for a file system in memory.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn is_in_memory(&self) -> bool {
        false
    }

    /// Removes a file, if it exists.
    pub(crate) fn remove(&self, name: &str) -> Result<(), StorageError> {
        self.check_writable("remove a file of")?;
        let path = self.path(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove", &path, error))
            }
            _ => Ok(()),
        }
    }
}

fn sync_directory(path: &Path) -> Result<(), StorageError> {
    let directory = File::open(path).map_err(|source| io_error("open", path, source))?;
    directory.sync_all().map_err(|source| io_error("flush", path, source))
}

fn create_private(path: &Path, writers: Writers) -> Result<(), StorageError> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|source| io_error("create the directory", path, source))?;
    let metadata = path.metadata().map_err(|source| io_error("inspect", path, source))?;
    permissions::check(&metadata, writers, &process_user())
        .map_err(|reason| StorageError::Unsafe { path: path.to_owned(), reason })
}

/// Returns the effective user of this process, and its groups.
fn process_user() -> ProcessUser {
    let groups = getgroups().unwrap_or_default().into_iter().chain([getegid()]);
    ProcessUser { user: geteuid().as_raw(), groups: groups.map(Gid::as_raw).collect() }
}

pub(super) fn io_error(doing: &'static str, path: &Path, source: io::Error) -> StorageError {
    StorageError::Io { doing, path: path.to_owned(), source }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "one occupied range is what is meant")]
mod tests {
    use std::os::unix::fs::chown;

    use pushpull_common::error::Chain;

    use super::*;

    #[test]
    fn a_path_with_a_scheme_is_refused() {
        let error = StateDirectory::open(Path::new("s3://bucket/state")).unwrap_err();
        let error = Chain(&error).to_string();
        let expected = "the scheme \"s3\" of \"s3://bucket/state\" is not supported";
        assert!(error.contains(expected) && !Path::new("s3:").exists(), "{error}");
    }

    #[test]
    fn a_directory_is_private_and_locked() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state");
        let state = StateDirectory::open(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        assert!(matches!(StateDirectory::open(&path), Err(StorageError::Locked { .. })));
        drop(state);
        StateDirectory::open(&path).unwrap();

        let open = root.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
        assert!(matches!(StateDirectory::open(&open), Err(StorageError::Unsafe { .. })));
    }

    #[test]
    fn a_directory_of_a_foreign_group_or_owner_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o770);
        std::fs::set_permissions(root.path(), mode).unwrap();
        let foreign = 54_321;
        // Only root may give a directory away.
        if chown(root.path(), None, Some(foreign)).is_err() {
            return println!("skipped: this user may not change groups");
        }
        let refused = || match StateDirectory::open_for(root.path(), Writers::Group) {
            Err(StorageError::Unsafe { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        let said = refused();
        assert!(said.contains("its group 54321 may write"), "{said}");
        chown(root.path(), Some(foreign), Some(getegid().as_raw())).unwrap();
        assert_eq!(refused(), "it belongs to user 54321");
    }

    /// A full disk may have space again. A file system that is smaller than the state never has.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_system_that_is_too_small_is_told_from_a_full_one() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        let folder = state.shard(0).unwrap();
        let other = state.shard(1).unwrap();
        let failed = |need| {
            let full = io::ErrorKind::StorageFull.into();
            folder.cannot_reserve(&folder.path("values-1"), need, full)
        };
        assert!(matches!(failed(1), StorageError::Io { .. }));
        let StorageError::DirectoryTooSmall { need, limit: before, .. } = failed(1 << 62) else {
            panic!("no file system has as much")
        };
        assert_eq!(need, 1 << 62);
        // The other files of the state need their space for good, the file itself does not.
        other.create("values-1", 1 << 20, &[0..1 << 20]).unwrap();
        folder.create("values-1", 1 << 20, &[0..1 << 20]).unwrap();
        let StorageError::DirectoryTooSmall { limit, .. } = failed(1 << 62) else { panic!() };
        assert_eq!(before - limit, 1 << 20);
    }

    #[test]
    fn a_path_is_flushed_up_to_the_last_writable_directory() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("a/b/state")).unwrap();
        state.shard(0).unwrap().sync_way().unwrap();
        // The names are in the directory that the link points to.
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path().join("a/b/state"), &link).unwrap();
        Folder::read_only(&link.join("shard-0")).sync_way().unwrap();
        let error = Folder::read_only(&root.path().join("nowhere")).sync_way().unwrap_err();
        assert!(error.to_string().contains("nowhere"), "{error}");
    }

    #[test]
    fn a_read_only_folder_is_not_changed() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(root.path()).unwrap();
        state.shard(0).unwrap().create("values-1", 10, &[0..10]).unwrap();
        let folder = Folder::read_only(&root.path().join("shard-0"));
        assert!(folder.open("values-1").unwrap().is_some());
        assert!(folder.create("values-2", 10, &[0..10]).is_err());
        assert!(folder.rename("values-1", "values-2").is_err());
        assert!(folder.remove("values-1").is_err());
        assert_eq!(folder.names().unwrap(), ["values-1"]);
        assert!(is_locked(root.path()));
        drop(state);
        assert!(!is_locked(root.path()) && !is_locked(&root.path().join("nowhere")));
    }

    #[test]
    fn files_that_others_can_reach_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let folder = StateDirectory::open(root.path()).unwrap().shard(0).unwrap();
        folder.create("values-1", 10, &[0..10]).unwrap();
        assert_eq!(folder.path("values-1").metadata().unwrap().mode() & 0o777, 0o600);
        assert!(folder.open("values-1").unwrap().is_some());
        assert!(folder.open("values-2").unwrap().is_none());
        std::fs::hard_link(folder.path("values-1"), root.path().join("other")).unwrap();
        assert!(matches!(folder.open("values-1"), Err(StorageError::Unsafe { .. })));
        std::os::unix::fs::symlink(root.path().join("other"), folder.path("values-2")).unwrap();
        assert!(matches!(folder.open("values-2"), Err(StorageError::Io { .. })));
    }
}
