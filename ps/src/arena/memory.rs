//! Mapped memory: bytes, words stored in one piece, and stores that go past the cache.
//!
//! This is one of the few files that may hold `unsafe` code. What it lends is checked: a stretch
//! is borrowed like any other slice.
//!
//! What a killed process leaves in a shared mapping is what its stores had done, in program
//! order. So that the compiler keeps that order, words are stored between compiler fences; so that
//! the processor keeps it too, non-temporal stores are followed by [`fence`] before anything
//! may name what they wrote.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use memmap2::{MmapOptions, MmapRaw};

#[cfg(test)]
use super::store_trace;
use crate::volatile::Volatile;

/// A stretch of memory: anonymous, or a mapped file.
#[derive(Debug)]
pub(crate) struct Memory {
    map: MmapRaw,
    bytes: usize,
    file: Option<File>,
    /// Where the shelf of a test finds it.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) found: Option<super::shelf::Found>,
}

impl Memory {
    /// Zeroed memory of this process alone; in huge pages, where the system gives them to who asks.
    pub(crate) fn anonymous(bytes: usize) -> std::io::Result<Memory> {
        // An empty mapping is not possible.
        let map = MmapOptions::new().len(bytes.max(1)).map_anon()?;
        // An update goes through up to nine streams at once, and through as many shadows: with small
        // pages the processor looks most of them up again and again. Without huge ones it is slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Memory::new(map.into(), bytes, None))
    }

    /// Zeroed memory that can be lent to other processes: as [`Memory::anonymous`], but for that. Nobody
    /// can make it shorter or longer.
    #[cfg(target_os = "linux")]
    pub(super) fn shareable(bytes: usize) -> std::io::Result<Memory> {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("pushpull", flags)?);
        // What is never written takes no memory. Should there be none left for what is, the system ends a
        // process, as with memory of any other kind.
        file.set_len(bytes.max(1) as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let mut memory = Memory::of_file(file)?;
        // A few words would take a whole huge page.
        if bytes >= HUGE_PAGE_BYTES {
            let _ = memory.map.advise(memmap2::Advice::HugePage);
        }
        memory.bytes = bytes;
        Ok(memory)
    }

    /// The same where memory cannot be lent.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn shareable(_bytes: usize) -> std::io::Result<Memory> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// A descriptor by which another process can map it, to read it and no more; from then on nobody maps
    /// it for writing who has not.
    #[cfg(target_os = "linux")]
    pub(super) fn to_read(&self) -> std::io::Result<File> {
        use std::os::fd::AsRawFd;
        let Some(file) = &self.file else { return Err(std::io::ErrorKind::Unsupported.into()) };
        // A file that has a name cannot be sealed; it is its user's as it is. Nor can a system that does
        // not know this seal.
        let _ = rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::FUTURE_WRITE);
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    /// The same where memory cannot be lent.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn to_read(&self) -> std::io::Result<File> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// A descriptor by which another process can map it, to read and to write it.
    pub(super) fn to_write(&self) -> std::io::Result<File> {
        let file = self.file.as_ref().ok_or(std::io::ErrorKind::Unsupported)?;
        file.try_clone()
    }

    /// A file, the whole of which is mapped. Its space must be reserved: a store to a hole that a
    /// full disk cannot fill is a signal and not an error.
    pub(crate) fn of_file(file: File) -> std::io::Result<Memory> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        let map = MmapOptions::new().len(bytes.max(1)).map_raw(&file)?;
        Ok(Memory::new(map, bytes, Some(file)))
    }

    /// What a file of somebody else holds now, as memory of this process alone.
    pub(crate) fn copy_of(file: &File) -> std::io::Result<Memory> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        let mut memory = Memory::anonymous(bytes)?;
        let mut at = 0;
        while at < bytes {
            match std::os::unix::fs::FileExt::read_at(
                file,
                &mut memory.bytes_mut()[at..],
                at as u64,
            )? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                count => at += count,
            }
        }
        Ok(memory)
    }

    /// The same for a file that is too long to be copied: what is not written here is as in the
    /// file, which this does not change.
    pub(crate) fn view_of(file: &File) -> std::io::Result<Memory> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        // SAFETY: the mapping is private: what is written here stays here. What another process
        // writes may be seen or not; its words are read as any bytes are. The files of an arena are
        // never made shorter.
        let map = unsafe { MmapOptions::new().len(bytes.max(1)).map_copy(file)? };
        Ok(Memory::new(map.into(), bytes, None))
    }

    fn new(map: MmapRaw, bytes: usize, file: Option<File>) -> Memory {
        #[cfg(any(test, feature = "simulation"))]
        let found = None;
        Memory {
            map,
            bytes,
            file,
            #[cfg(any(test, feature = "simulation"))]
            found,
        }
    }

    /// The same mapping, without its file held open: it does not grow.
    pub(crate) fn without_file(mut self) -> Memory {
        self.file = None;
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Makes it longer by zeros. Nothing else changes.
    pub(crate) fn grow(&mut self, bytes: usize) -> std::io::Result<()> {
        #[allow(unused_mut, reason = "for the shelf of a test")]
        let mut grown = match &self.file {
            Some(file) => {
                super::reserve(file, bytes as u64)?;
                Memory::of_file(file.try_clone()?)?
            }
            None => {
                let mut grown = Memory::anonymous(bytes)?;
                grown.bytes_mut()[..self.bytes].copy_from_slice(self.bytes());
                grown
            }
        };
        #[cfg(test)]
        store_trace::moved(self.address(), grown.address());
        #[cfg(any(test, feature = "simulation"))]
        {
            grown.found = self.found.take();
            if let Some(found) = &grown.found {
                found.set(super::shelf::Item::open(&grown));
            }
        }
        *self = grown;
        Ok(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `bytes` long and lives as long as `self`. Only this process writes it:
        // it is anonymous, or a file of mode 0600 in a locked directory of mode 0700, which no other
        // program is to touch. Whom it is lent to by `to_read` maps it for reading; what is lent by
        // `to_write` is reached by words, or loaded by `Volatile` (`shared.rs`). Writing needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        #[cfg(test)]
        store_trace::shared(self.address(), 0, self.bytes);
        // SAFETY: as in `bytes`; `&mut self` makes this borrow the only one.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.bytes) }
    }

    /// Bytes that another process may be writing.
    ///
    /// # Panics
    /// If there are no such bytes.
    pub(super) fn volatile(&self, from: usize, bytes: usize) -> Volatile<'_> {
        assert!(from <= self.bytes && bytes <= self.bytes - from, "{bytes} bytes at {from}");
        // SAFETY: the assertion keeps them inside the mapping, which lives as long as `self`. Of memory that
        // is read so nothing is ever borrowed, which `shared.rs` sees to.
        unsafe { Volatile::new(self.map.as_ptr().add(from), bytes) }
    }

    /// A word, by its number.
    ///
    /// # Panics
    /// If there is no such word.
    pub(crate) fn load(&self, word: usize) -> u64 {
        u64::from_le(self.word(word).load(Ordering::Relaxed))
    }

    /// Stores a word in one piece: a reader after a crash finds the old or the new one.
    ///
    /// # Panics
    /// If there is no such word.
    pub(crate) fn store(&mut self, word: usize, value: u64) {
        #[cfg(test)]
        store_trace::storing(self.address(), word * 8);
        compiler_fence(Ordering::SeqCst);
        self.word(word).store(value.to_le(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Copies bytes here past the cache, which leaves the cache to others and saves reading what
    /// is overwritten. They are in memory for sure only after [`fence`].
    ///
    /// # Panics
    /// If the bytes do not fit.
    #[cfg(test)]
    pub(crate) fn stream(&mut self, start: usize, source: &[u8]) {
        assert!(start <= self.bytes && source.len() <= self.bytes - start, "it fits");
        #[cfg(test)]
        store_trace::streaming(self.address(), start, source.len());
        // SAFETY: the assertion keeps the destination inside the mapping, `&mut self` makes it
        // ours alone, and a borrowed source cannot overlap it.
        unsafe { copy_past_cache(self.map.as_mut_ptr().add(start), source) };
    }

    /// The same through the cache, for what is soon read again.
    pub(crate) fn write(&mut self, start: usize, source: &[u8]) {
        self.stretch_mut(start..start + source.len()).copy_from_slice(source);
    }

    /// A stretch for writing, through the cache.
    ///
    /// # Panics
    /// If there is no such stretch.
    pub(crate) fn stretch_mut(&mut self, within: std::ops::Range<usize>) -> &mut [u8] {
        #[cfg(test)]
        store_trace::shared(self.address(), within.start, within.len());
        // SAFETY: as in `bytes_mut`.
        let all = unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.bytes) };
        &mut all[within]
    }

    /// Where it lies, as its name for the witness and for blocks that are pinned.
    pub(super) fn address(&self) -> usize {
        self.map.as_ptr() as usize
    }

    pub(super) fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.bytes / 8, "word {word} of {}", self.bytes / 8);
        // SAFETY: the word lies inside the mapping, which starts at a page and so aligns it, and
        // lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }
}

#[cfg(any(test, feature = "simulation"))]
impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(found) = self.found.take().filter(|found| found.is_kept()) {
            found.set(super::shelf::Item::Closed(super::shelf::Content::of(self.bytes())));
        }
    }
}

/// Waits until everything that was streamed is in memory: what is stored after it is stored later.
pub(crate) fn fence() {
    compiler_fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is part of every x86-64 processor and touches no memory of ours.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(test)]
    store_trace::fenced();
    compiler_fence(Ordering::SeqCst);
}

/// Copies with non-temporal stores where the destination is aligned for them.
///
/// # Safety
/// `destination` must be valid for writes of `source.len()` bytes that nothing else refers to.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy_past_cache(destination: *mut u8, source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let head = destination.align_offset(16).min(source.len());
    let (first, rest) = source.split_at(head);
    // SAFETY: the head lies inside the destination, by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), destination, head) };
    let lines = rest.chunks_exact(16);
    let (tail, mut at) = (lines.remainder(), head);
    for line in lines {
        // SAFETY: `at` is inside the destination and aligned to 16 since the head was copied; the
        // source's line is 16 bytes; SSE2 is part of every x86-64 processor.
        unsafe {
            let value = _mm_loadu_si128(line.as_ptr().cast::<__m128i>());
            _mm_stream_si128(destination.add(at).cast::<__m128i>(), value);
        }
        at += 16;
    }
    // SAFETY: what is left of the source is what is left of the destination.
    unsafe { std::ptr::copy_nonoverlapping(tail.as_ptr(), destination.add(at), tail.len()) };
}

/// The same where there are no such stores.
///
/// # Safety
/// `destination` must be valid for writes of `source.len()` bytes that nothing else refers to.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy_past_cache(destination: *mut u8, source: &[u8]) {
    // SAFETY: by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), destination, source.len()) };
}

/// Below this, memory is not asked for in huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_streamed_wherever_they_start_and_end() {
        let source: Vec<u8> = (1..=200).collect();
        for start in 0..40 {
            for length in [0, 1, 15, 16, 17, 31, 64, 200 - start] {
                let mut memory = Memory::anonymous(256).unwrap();
                memory.stream(start, &source[start..start + length]);
                fence();
                let bytes = memory.bytes();
                assert_eq!(&bytes[start..start + length], &source[start..start + length]);
                assert!(bytes[..start].iter().chain(&bytes[start + length..]).all(|&b| b == 0));
            }
        }
    }

    #[test]
    fn words_survive_growth() {
        let mut memory = Memory::anonymous(64).unwrap();
        memory.store(7, 42);
        memory.grow(4096).unwrap();
        assert_eq!((memory.load(7), memory.load(8), memory.len()), (42, 0, 4096));
        let mut memory = Memory::of_file(tempfile::tempfile().unwrap()).unwrap();
        memory.grow(64).unwrap();
        memory.store(7, 42);
        memory.grow(8192).unwrap();
        assert_eq!((memory.load(7), memory.load(1023)), (42, 0));
    }
}
