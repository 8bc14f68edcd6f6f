//! [`Meeting`]: where the ranks of a job find their rendezvous.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Where the ranks of a job find their rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// At an address that all know. The first rank on its host serves there if nobody else does.
    Address(String),
    /// In a private folder of this host. Its file `rendezvous` has the address of the rank that
    /// came first.
    Folder(PathBuf),
}

/// The file with the address of the rendezvous.
const ADDRESS: &str = "rendezvous";
/// The file whose lock a rank holds while it replaces that file.
const LOCK: &str = "lock";
/// The first part of the names of sockets, each the address of a rank.
const SOCKET: &str = "rank-";

/// Returns the path of a rank's socket.
pub(super) fn socket(folder: &Path, incarnation: u64) -> PathBuf {
    folder.join(format!("{SOCKET}{incarnation:016x}"))
}

/// Returns the address of the rendezvous; `None` if there is none yet.
///
/// # Errors
/// Those of the file system.
pub(super) fn address(folder: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(folder.join(ADDRESS)) {
        Ok(address) => Ok(Some(address)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Replaces the address of the rendezvous by `own`, unless it has changed from `seen`. Returns
/// whether it did; false as well while another rank is about to.
///
/// # Errors
/// Those of the file system.
pub(super) fn replace(folder: &Path, seen: Option<&str>, own: &str) -> io::Result<bool> {
    let _lock = match lock(folder)? {
        Some(lock) => lock,
        None => return Ok(false),
    };
    if address(folder)?.as_deref() != seen {
        return Ok(false);
    }
    let draft = folder.join("rendezvous.new");
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(own.as_bytes())?;
    fs::rename(draft, folder.join(ADDRESS))?;
    Ok(true)
}

/// Removes a rank's socket, the address of the rendezvous if it is `own`, and the folder if nothing
/// else is in it. What cannot be removed is replaced by the next rank that meets here.
pub(super) fn leave(folder: &Path, socket: &Path, own: &str) {
    let _ = fs::remove_file(socket);
    let is_own = || address(folder).is_ok_and(|address| address.as_deref() == Some(own));
    // Taking the lock creates its file, which nobody else would remove.
    if is_own()
        && let Ok(Some(_lock)) = lock(folder)
        && is_own()
    {
        remove_orphans(folder);
        let _ = fs::remove_file(folder.join(ADDRESS));
        let _ = fs::remove_file(folder.join(LOCK));
    }
    let _ = fs::remove_dir(folder);
}

/// Removes the sockets of killed ranks.
fn remove_orphans(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_socket = entry.file_name().as_encoded_bytes().starts_with(SOCKET.as_bytes());
        let refuses = |path: &Path| {
            UnixStream::connect(path)
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        };
        if is_socket && refuses(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Takes the lock; `None` while another process has it.
fn lock(folder: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(folder.join(LOCK))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // A rank that has left may have removed the file before: another rank locks a new one.
        Ok(()) => Ok(is_at(&file, &folder.join(LOCK))?.then_some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether an open file is the one at a path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((open.dev(), open.ino()) == (found.dev(), found.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use pushpull_common::launch::Launch;
    use pushpull_net::enter_private_folder;

    use super::*;

    #[test]
    fn one_rank_replaces_what_it_has_seen() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("job");
        enter_private_folder(&folder).unwrap();
        enter_private_folder(&folder).unwrap();
        assert_eq!(address(&folder).unwrap(), None);
        assert!(replace(&folder, None, "unix:/a").unwrap());
        assert!(!replace(&folder, None, "unix:/b").unwrap(), "another rank was first");
        let held = lock(&folder).unwrap().unwrap();
        assert!(!replace(&folder, Some("unix:/a"), "unix:/b").unwrap(), "another rank is about to");
        drop(held);
        assert!(replace(&folder, Some("unix:/a"), "unix:/b").unwrap());
        leave(&folder, &socket(&folder, 1), "unix:/a");
        assert_eq!(address(&folder).unwrap().as_deref(), Some("unix:/b"));
        leave(&folder, &socket(&folder, 2), "unix:/b");
        assert!(!folder.exists());
    }

    #[test]
    fn a_lock_that_was_removed_locks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let held = lock(folder.path()).unwrap().unwrap();
        let path = folder.path().join(LOCK);
        assert!(is_at(&held, &path).unwrap());
        // The rank that leaves removes the file while another one has opened it.
        fs::remove_file(&path).unwrap();
        assert!(!is_at(&held, &path).unwrap());
        let newer = lock(folder.path()).unwrap().unwrap();
        assert!(!is_at(&held, &path).unwrap());
        assert!(is_at(&newer, &path).unwrap());
    }

    #[test]
    fn the_last_rank_that_leaves_removes_the_folder() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("job");
        for order in [[1, 2], [2, 1]] {
            enter_private_folder(&folder).unwrap();
            let sockets = [1, 2].map(|rank| UnixListener::bind(socket(&folder, rank)).unwrap());
            // A rank that is killed leaves its socket.
            drop(UnixListener::bind(socket(&folder, 3)).unwrap());
            assert!(replace(&folder, None, "unix:/1").unwrap());
            for rank in order {
                assert!(folder.exists());
                leave(&folder, &socket(&folder, rank), &format!("unix:/{rank}"));
            }
            assert!(!folder.exists(), "{order:?}");
            drop(sockets);
        }
    }

    #[test]
    fn the_longest_job_has_room_for_sockets() {
        let folder = format!("/dev/shm/pushpull-ring-{}", "k".repeat(Launch::JOB_KEY_BYTES_MAX));
        let path = socket(Path::new(&folder), u64::MAX);
        assert!(rustix::net::SocketAddrUnix::new(path).is_ok());
    }
}
