//! A shard's memory: a folder of mapped files, or anonymous mappings, lent out as typed regions.
//!
//! This is one of the few files that may hold `unsafe` code. What it lends is checked: a region
//! is borrowed like any other slice, and a block that somebody reads is not lent for writing.

use std::cell::Cell;
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use crate::error::StorageError;

/// Streams that an optimizer reads and writes together must not lie at the same offset modulo the
/// page size, or they evict each other: Adam ran 3.5 times slower in place. Each stream is skewed
/// by one more odd number of cache lines; 13 lines were measured.
pub(crate) const SKEW_BYTES: usize = 13 * 64;

/// The bytes that all shards of a task may use together.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<AtomicU64>);

impl Budget {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Budget(Arc::new(AtomicU64::new(bytes_max)))
    }

    /// The bytes nobody has taken.
    pub(crate) fn left(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes `bytes` off the budget; they come back when the loan is dropped.
    pub(crate) fn take(&self, bytes: u64) -> Result<Loan, StorageError> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match taken {
            Ok(_) => Ok(Loan { budget: self.clone(), bytes }),
            Err(limit) => Err(StorageError::DoesNotFit { need: bytes, limit }),
        }
    }
}

/// Bytes taken off a [`Budget`].
#[derive(Debug)]
pub(crate) struct Loan {
    budget: Budget,
    bytes: u64,
}

impl Loan {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

/// A state directory that this server alone uses.
#[derive(Debug)]
pub(crate) struct StateDirectory {
    path: PathBuf,
    /// Held for its lock, which the kernel releases however the process ends.
    _lock: File,
}

impl StateDirectory {
    /// Creates the directory if need be, and locks it.
    pub(crate) fn open(path: &Path) -> Result<Self, StorageError> {
        create_private(path)?;
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
        Ok(StateDirectory { path: path.to_owned(), _lock: lock })
    }

    /// The folder of one shard's arena, which must not exist yet.
    pub(crate) fn arena(&self, shard: u16) -> Result<ArenaFolder, StorageError> {
        let path = self.path.join(format!("shard-{shard}"));
        if path.symlink_metadata().is_ok() {
            return Err(StorageError::Occupied { path });
        }
        create_private(&path)?;
        Ok(ArenaFolder { path })
    }
}

/// The folder of one shard's arena; removed with its files when it is dropped.
///
/// A process that is killed leaves it behind, and the next server refuses to overwrite it.
#[derive(Debug)]
pub(crate) struct ArenaFolder {
    path: PathBuf,
}

impl Drop for ArenaFolder {
    fn drop(&mut self) {
        // Nobody is left to tell. What cannot be removed is found, and named, by the next start.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn create_private(path: &Path) -> Result<(), StorageError> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|source| io_error("create the directory", path, source))?;
    let metadata = path.metadata().map_err(|source| io_error("inspect", path, source))?;
    let refuse = |reason: String| Err(StorageError::Unsafe { path: path.to_owned(), reason });
    if !metadata.is_dir() {
        return refuse("it is not a directory".into());
    }
    if metadata.mode() & 0o022 != 0 {
        return refuse(format!("its mode {:o} lets others write", metadata.mode() & 0o777));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return refuse(format!("it belongs to user {}", metadata.uid()));
    }
    Ok(())
}

fn io_error(doing: &'static str, path: &Path, source: std::io::Error) -> StorageError {
    StorageError::Io { doing, path: path.to_owned(), source }
}

/// Where a shard's regions come from.
#[derive(Debug)]
pub(crate) enum Arena {
    /// Anonymous memory.
    Anonymous,
    /// Files in a folder.
    Folder(ArenaFolder),
}

impl Arena {
    /// Maps a zeroed region; `name` names its file. An earlier region of that name must be gone.
    fn map(&self, name: &str, bytes: usize) -> Result<MmapRaw, StorageError> {
        // An empty mapping is not possible; a shard without variables still has regions.
        let bytes = bytes.max(1);
        match self {
            Arena::Anonymous => {
                let map = MmapOptions::new().len(bytes).map_anon();
                let map = map.map_err(|e| io_error("map", Path::new("anonymous memory"), e))?;
                Ok(map.into())
            }
            Arena::Folder(folder) => {
                let path = folder.path.join(name);
                let mut options = OpenOptions::new();
                options.read(true).write(true).create_new(true).mode(0o600);
                let file = options.open(&path).map_err(|e| io_error("create", &path, e))?;
                reserve(&file, bytes as u64)
                    .map_err(|e| io_error("reserve space for", &path, e))?;
                MmapOptions::new().len(bytes).map_raw(&file).map_err(|e| io_error("map", &path, e))
            }
        }
    }

    /// Forgets the file of a region that is no longer used.
    pub(crate) fn remove(&self, name: &str) -> Result<(), StorageError> {
        let Arena::Folder(folder) = self else {
            return Ok(());
        };
        let path = folder.path.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(io_error("remove", &path, error))
            }
            _ => Ok(()),
        }
    }

    /// A zeroed region of so many bytes, skewed as the `stream`-th of its kind.
    pub(crate) fn region(
        &self,
        name: &str,
        bytes: usize,
        stream: usize,
    ) -> Result<Region, StorageError> {
        let skew = stream * SKEW_BYTES;
        let map = self.map(name, bytes + skew)?;
        Ok(Region { map, skew, bytes })
    }

    /// Zeroed blocks of equal size.
    pub(crate) fn blocks(
        &self,
        name: &str,
        block_bytes: usize,
        count: usize,
    ) -> Result<Blocks, StorageError> {
        let map = self.map(name, block_bytes * count)?;
        let pins = (0..count).map(|_| Cell::new(0)).collect();
        Ok(Blocks { shared: Rc::new(Shared { map, block_bytes, pins }) })
    }
}

/// Reserves real space, so that a full disk is an error here and not a signal at a later store.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes)?;
    #[cfg(not(target_os = "linux"))]
    file.set_len(bytes)?;
    Ok(())
}

/// A stretch of mapped memory, borrowed like a slice.
#[derive(Debug)]
pub(crate) struct Region {
    map: MmapRaw,
    skew: usize,
    bytes: usize,
}

impl Region {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `skew + bytes` long and lives as long as `self`. It is private
        // to this process: anonymous, or a file of mode 0600 in a locked directory of mode 0700,
        // which no other program is to touch. Writing needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.skew), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` makes this borrow the only one.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.skew), self.bytes) }
    }
}

/// Blocks of equal size, lent by number. A block can be pinned: then it is not lent for writing
/// until every pin on it is gone, and who holds a pin reads it without borrowing this.
#[derive(Debug)]
pub(crate) struct Blocks {
    shared: Rc<Shared>,
}

#[derive(Debug)]
struct Shared {
    map: MmapRaw,
    block_bytes: usize,
    /// How many pins each block has. Single-threaded: `Shared` is behind an `Rc`.
    pins: Box<[Cell<u32>]>,
}

impl Shared {
    fn start(&self, block: u32) -> usize {
        assert!((block as usize) < self.pins.len(), "block {block} of {}", self.pins.len());
        block as usize * self.block_bytes
    }
}

impl Blocks {
    pub(crate) fn is_pinned(&self, block: u32) -> bool {
        self.shared.pins[block as usize].get() > 0
    }

    pub(crate) fn read(&self, block: u32) -> &[u8] {
        let start = self.shared.start(block);
        // SAFETY: `start` checked the block's number, and the mapping holds them all. Writing
        // needs `&mut self`.
        unsafe {
            std::slice::from_raw_parts(self.shared.map.as_ptr().add(start), self.shared.block_bytes)
        }
    }

    /// The block for writing.
    ///
    /// # Panics
    /// If the block is pinned: the caller takes another block then.
    pub(crate) fn write(&mut self, block: u32) -> &mut [u8] {
        assert!(!self.is_pinned(block), "block {block} is not written while it is read");
        let start = self.shared.start(block);
        // SAFETY: as in `read`. `&mut self` excludes other borrows of this `Blocks`, which is the
        // only one of its mapping; the assertion excludes readers that hold a pin.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.shared.map.as_mut_ptr().add(start),
                self.shared.block_bytes,
            )
        }
    }

    /// Pins the blocks until the result is dropped.
    pub(crate) fn pin(&self, blocks: Vec<u32>) -> Pins {
        for &block in &blocks {
            let pins = &self.shared.pins[block as usize];
            pins.set(pins.get() + 1);
        }
        Pins { shared: self.shared.clone(), blocks }
    }
}

/// Pinned blocks, readable until this is dropped.
#[derive(Debug)]
pub(crate) struct Pins {
    shared: Rc<Shared>,
    blocks: Vec<u32>,
}

impl Pins {
    /// The `index`-th of the pinned blocks.
    pub(crate) fn read(&self, index: usize) -> &[u8] {
        let start = self.shared.start(self.blocks[index]);
        // SAFETY: `start` checked the block's number, and the mapping holds them all. The block
        // is pinned for as long as `self` lives, so `Blocks::write` does not lend it.
        unsafe {
            std::slice::from_raw_parts(self.shared.map.as_ptr().add(start), self.shared.block_bytes)
        }
    }

    /// The bytes of one block.
    pub(crate) fn block_bytes(&self) -> usize {
        self.shared.block_bytes
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        for &block in &self.blocks {
            let pins = &self.shared.pins[block as usize];
            pins.set(pins.get() - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_comes_back_when_the_loan_is_dropped() {
        let budget = Budget::new(100);
        let loan = budget.take(60).unwrap();
        let error = budget.take(60).unwrap_err();
        assert!(matches!(error, StorageError::DoesNotFit { need: 60, limit: 40 }));
        drop(loan);
        budget.take(100).unwrap();
    }

    #[test]
    fn a_pinned_block_is_read_only() {
        let mut blocks = Arena::Anonymous.blocks("values", 64, 2).unwrap();
        blocks.write(1).fill(7);
        let pins = blocks.pin(vec![1, 1]);
        blocks.write(0).fill(8);
        assert_eq!((pins.read(0)[0], blocks.read(0)[0]), (7, 8));
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            blocks.write(1);
        }));
        assert!(refused.is_err());
        drop(pins);
        blocks.write(1).fill(9);
    }

    #[test]
    fn a_folder_is_private_locked_never_overwritten_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("state");
        let state = StateDirectory::open(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        assert!(matches!(StateDirectory::open(&path), Err(StorageError::Locked { .. })));
        let arena = Arena::Folder(state.arena(0).unwrap());
        let mut region = arena.region("slots", 1000, 1).unwrap();
        assert_eq!(region.bytes(), [0; 1000]);
        region.bytes_mut()[999] = 1;
        assert!(matches!(state.arena(0), Err(StorageError::Occupied { .. })));
        drop((region, arena));
        state.arena(0).unwrap();

        let open = root.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
        assert!(matches!(StateDirectory::open(&open), Err(StorageError::Unsafe { .. })));
    }
}
