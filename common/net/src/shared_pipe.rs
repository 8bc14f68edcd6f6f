//! [`PipeWriter`] and [`PipeReader`]: a stream of bytes through memory that two processes share.
//!
//! This is one of the few files that may hold `unsafe` code. The other process changes the memory
//! meanwhile, so counters are atomic words, bytes are only ever copied, and nothing is borrowed.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};

/// The memory before the bytes: counters and flags, each on cache lines of its own.
const HEAD_BYTES: usize = 4096;

/// The words of the head.
const WRITTEN: usize = 0;
const READ: usize = 16;
const READER_SLEEPS: usize = 32;
const WRITER_SLEEPS: usize = 48;

/// The most bytes of one read or write. The other side goes on with them during the next one.
const STEP_BYTES: usize = 128 << 10;

/// The least and the most bytes that a pipe holds.
const CAPACITIES: std::ops::RangeInclusive<u64> = 4096..=64 << 20;

/// The end of a pipe that writes.
///
/// - **In.** Bytes, and the count of those that the reader has taken.
/// - **Out.** The bytes in order, each once.
/// - **Never.** No byte that the reader has not taken is overwritten, even if the reader
///   writes false counts.
#[derive(Debug)]
pub struct PipeWriter {
    memory: PipeMemory,
    written: u64,
}

/// The end of a pipe that reads. The writer may be hostile: it can send any bytes, and no others.
#[derive(Debug)]
pub struct PipeReader {
    memory: PipeMemory,
    read: u64,
}

impl PipeReader {
    /// Creates a pipe that holds `capacity` bytes, a power of two. Returns its reader, and the
    /// descriptor for the process that writes.
    ///
    /// # Errors
    /// If the system grants no memory, or on a system without memory that can be sealed.
    pub fn create(capacity: u64) -> io::Result<(PipeReader, OwnedFd)> {
        let file = sealed_file(HEAD_BYTES as u64 + capacity)?;
        let reader = PipeReader { memory: PipeMemory::map(&file, capacity)?, read: 0 };
        Ok((reader, file.into()))
    }

    /// Reads what is available.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if nothing is; [`io::ErrorKind::InvalidData`] if the writer
    /// counts more bytes than the pipe holds.
    pub fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut left = self.available()?.min(STEP_BYTES);
        let begin = self.read;
        for slice in slices {
            let length = slice.len().min(left);
            self.memory.copy_out(self.read, &mut slice[..length]);
            self.read += length as u64;
            left -= length;
        }
        if self.read == begin {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.memory.word(READ).store(self.read, Ordering::Release);
        Ok((self.read - begin) as usize)
    }

    fn available(&self) -> io::Result<usize> {
        let written = self.memory.word(WRITTEN).load(Ordering::Acquire);
        self.memory.checked(written.wrapping_sub(self.read))
    }

    /// Announces that this side is about to sleep. Returns whether it must not: bytes are there.
    ///
    /// # Errors
    /// Those of [`PipeReader::read`], but for the first.
    pub fn begin_sleep(&self) -> io::Result<bool> {
        self.memory.announce_sleep(READER_SLEEPS);
        Ok(self.available()? > 0)
    }

    /// Takes the announcement back.
    pub fn end_sleep(&self) {
        self.memory.word(READER_SLEEPS).store(0, Ordering::Relaxed);
    }

    /// Returns whether the writer is to be woken, once for each of its announcements. Called after
    /// a read.
    pub fn wakes_writer(&self) -> bool {
        self.memory.wakes(WRITER_SLEEPS)
    }
}

impl PipeWriter {
    /// Opens the pipe of another process that holds `capacity` bytes.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the descriptor is no such pipe; those of the system.
    pub fn open(descriptor: OwnedFd, capacity: u64) -> io::Result<PipeWriter> {
        let file = File::from(descriptor);
        check_sealed(&file)?;
        Ok(PipeWriter { memory: PipeMemory::map(&file, capacity)?, written: 0 })
    }

    /// Writes as much as there is room for.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none; [`io::ErrorKind::InvalidData`] if the reader
    /// counts bytes that were not written.
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut left = self.room()?.min(STEP_BYTES);
        let begin = self.written;
        for slice in slices {
            let length = slice.len().min(left);
            self.memory.copy_in(self.written, &slice[..length]);
            self.written += length as u64;
            left -= length;
        }
        if self.written == begin {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.memory.word(WRITTEN).store(self.written, Ordering::Release);
        Ok((self.written - begin) as usize)
    }

    fn room(&self) -> io::Result<usize> {
        let read = self.memory.word(READ).load(Ordering::Acquire);
        let unread = self.memory.checked(self.written.wrapping_sub(read))?;
        Ok(self.memory.capacity as usize - unread)
    }

    /// Announces that this side is about to sleep. Returns whether it must not: there is room.
    ///
    /// # Errors
    /// Those of [`PipeWriter::write`], but for the first.
    pub fn begin_sleep(&self) -> io::Result<bool> {
        self.memory.announce_sleep(WRITER_SLEEPS);
        Ok(self.room()? > 0)
    }

    /// Takes the announcement back.
    pub fn end_sleep(&self) {
        self.memory.word(WRITER_SLEEPS).store(0, Ordering::Relaxed);
    }

    /// Returns whether the reader is to be woken, once for each of its announcements. Called after
    /// a write.
    pub fn wakes_reader(&self) -> bool {
        self.memory.wakes(READER_SLEEPS)
    }
}

/// The mapped memory of a pipe: the head, then the bytes.
#[derive(Debug)]
struct PipeMemory {
    map: MmapRaw,
    capacity: u64,
}

impl PipeMemory {
    /// Maps a file whose length cannot change.
    fn map(file: &File, capacity: u64) -> io::Result<PipeMemory> {
        let bytes = file.metadata()?.len();
        let is_valid = capacity.is_power_of_two() && CAPACITIES.contains(&capacity);
        if !is_valid || bytes != HEAD_BYTES as u64 + capacity {
            let cause = format!("a file of {bytes} bytes is no pipe of {capacity}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        let map = MmapOptions::new().len(bytes as usize).map_raw(file)?;
        Ok(PipeMemory { map, capacity })
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < HEAD_BYTES / 8, "word {word} of the head");
        // SAFETY: the head is inside the mapping, which lives as long as `self` and starts at a
        // page, so the word is aligned. Both processes access it only as a whole atomic word.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }

    /// Checks a number of bytes that lie in the pipe by the count of the other side.
    fn checked(&self, bytes: u64) -> io::Result<usize> {
        if bytes > self.capacity {
            let cause = format!("{bytes} bytes are counted in a pipe of {}", self.capacity);
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        Ok(bytes as usize)
    }

    fn announce_sleep(&self, word: usize) {
        self.word(word).store(1, Ordering::Relaxed);
        // Either the other side sees the flag after its step, or this side sees that step.
        fence(Ordering::SeqCst);
    }

    fn wakes(&self, word: usize) -> bool {
        fence(Ordering::SeqCst);
        self.word(word).load(Ordering::Relaxed) != 0
            && self.word(word).swap(0, Ordering::Relaxed) != 0
    }

    /// Returns the place of the byte with this count, and the bytes from there to the end.
    fn place(&self, count: u64) -> (usize, usize) {
        let at = (count % self.capacity) as usize;
        (at, self.capacity as usize - at)
    }

    fn copy_in(&self, count: u64, bytes: &[u8]) {
        let (at, straight) = self.place(count);
        let (first, rest) = bytes.split_at(bytes.len().min(straight));
        self.store(at, first);
        self.store(0, rest);
    }

    fn copy_out(&self, count: u64, bytes: &mut [u8]) {
        let (at, straight) = self.place(count);
        let (first, rest) = bytes.split_at_mut(bytes.len().min(straight));
        self.load(at, first);
        self.load(0, rest);
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        let capacity = self.capacity as usize;
        assert!(at <= capacity && bytes.len() <= capacity - at, "{} bytes at {at}", bytes.len());
        // SAFETY: the assertion keeps the target inside the mapping, which lives as long as `self`.
        // The source is borrowed, and nothing in the mapping ever is, so they do not overlap. The
        // reader copies these bytes only after `WRITTEN` has passed them; one that does so before
        // gets unspecified values, and nothing else.
        unsafe {
            let target = self.map.as_mut_ptr().add(HEAD_BYTES + at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
    }

    fn load(&self, at: usize, bytes: &mut [u8]) {
        let capacity = self.capacity as usize;
        assert!(at <= capacity && bytes.len() <= capacity - at, "{} bytes at {at}", bytes.len());
        // SAFETY: the assertion keeps the source inside the mapping, which lives as long as `self`.
        // The target is borrowed mutably, and nothing in the mapping ever is, so they do not
        // overlap. Any byte is a valid `u8`; of one that a hostile writer changes meanwhile either
        // value is taken, as if it had sent that.
        unsafe {
            let source = self.map.as_ptr().add(HEAD_BYTES + at);
            std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len());
        }
    }
}

/// Creates memory whose length nobody can change.
#[cfg(target_os = "linux")]
fn sealed_file(bytes: u64) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("pushpull-pipe", flags)?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Checks that nobody can shorten the memory: an access behind its end would kill the process.
#[cfg(target_os = "linux")]
fn check_sealed(file: &File) -> io::Result<()> {
    use rustix::fs::{SealFlags, fcntl_get_seals};
    match fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "its length may change")),
    }
}

#[cfg(not(target_os = "linux"))]
fn sealed_file(_: u64) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn check_sealed(_: &File) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests;
