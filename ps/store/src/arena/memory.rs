//! Mapped memory: byte ranges, atomically stored words and non-temporal stores.
//!
//! This is one of the few files that may contain `unsafe` code. Its borrows are checked: a byte
//! range is borrowed like any other slice.
//!
//! A killed process leaves in a shared mapping what its stores have done, in program order. Words
//! are stored between compiler fences, so that the compiler keeps that order. Non-temporal stores
//! are followed by [`fence`] before any word may name what they wrote, so that the processor keeps
//! it too.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use memmap2::{MmapOptions, MmapRaw};
use pushpull_optim::volatile::Volatile;

use crate::layout::PAGE_BYTES;
use crate::testing::test_files::TestFile;
use crate::testing::{full_disk, store_trace};

/// A mapping: anonymous memory or a file.
#[derive(Debug)]
pub struct Memory {
    map: MmapRaw,
    bytes: usize,
    backing: Backing,
    /// The entry of a test file.
    pub(crate) test_file: Option<TestFile>,
}

/// The memory behind a mapping.
#[derive(Debug)]
enum Backing {
    /// Memory that is private to this process.
    Anonymous,
    /// Memory that can be shared: a file without a name, which gets its pages when they are
    /// written.
    Shareable(File),
    /// A file.
    File(File),
    /// A file that is closed, or another process's.
    Closed,
}

impl Memory {
    /// Maps zeroed memory that is private to this process, in huge pages where the system grants
    /// them on request.
    pub fn anonymous(bytes: usize) -> std::io::Result<Memory> {
        Memory::map_anonymous(bytes, MmapOptions::new())
    }

    /// Maps zeroed memory as [`Memory::anonymous`] does, of which only `at_once` bytes are written
    /// for now. The rest may be more than the system has.
    pub(super) fn anonymous_sparse(bytes: usize, at_once: usize) -> std::io::Result<Memory> {
        let mut options = MmapOptions::new();
        if at_once < bytes {
            // A system that has too little for what is written says so.
            drop(Memory::anonymous(at_once)?);
            options.no_reserve_swap();
        }
        Memory::map_anonymous(bytes, options)
    }

    fn map_anonymous(bytes: usize, mut options: MmapOptions) -> std::io::Result<Memory> {
        // A mapping cannot be empty.
        let map = options.len(bytes.max(1)).map_anon()?;
        // An update reads up to nine streams at once and writes as many shadows. With small pages
        // most of them miss the TLB again and again, which is slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Memory::new(map.into(), bytes, Backing::Anonymous))
    }

    /// Maps zeroed memory that can be shared with other processes: a memfd sealed against changes
    /// of its length.
    #[cfg(target_os = "linux")]
    pub(crate) fn shareable(bytes: usize) -> std::io::Result<Memory> {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("pushpull", flags)?);
        // Pages that are never written take no memory. If memory runs out when one is written, the
        // system kills a process, as for any other memory.
        file.set_len(bytes.max(1) as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let map = MmapOptions::new().len(bytes.max(1)).map_raw(&file)?;
        let memory = Memory::new(map, bytes, Backing::Shareable(file));
        // A few words would occupy a whole huge page.
        if bytes >= HUGE_PAGE_BYTES {
            let _ = memory.map.advise(memmap2::Advice::HugePage);
        }
        Ok(memory)
    }

    /// Fails: this platform cannot share memory.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn shareable(_bytes: usize) -> std::io::Result<Memory> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Returns a descriptor through which another process can map the memory read-only, and seals
    /// the memory against new writable mappings. Existing ones stay.
    #[cfg(target_os = "linux")]
    pub(super) fn read_only_descriptor(&self) -> std::io::Result<File> {
        use std::os::fd::AsRawFd;
        let file = self.file().ok_or(std::io::ErrorKind::Unsupported)?;
        // Sealing fails for a file with a name, which its user can write anyway, and on kernels
        // without this seal.
        let _ = rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::FUTURE_WRITE);
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    /// Fails: this platform cannot share memory.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn read_only_descriptor(&self) -> std::io::Result<File> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Returns a descriptor through which another process can map the memory for reading and
    /// writing.
    pub(super) fn writable_descriptor(&self) -> std::io::Result<File> {
        let file = self.file().ok_or(std::io::ErrorKind::Unsupported)?;
        file.try_clone()
    }

    /// Maps a whole file. Its disk space must be reserved: a store to a hole that a full disk
    /// cannot fill raises a signal instead of an error.
    pub fn of_file(file: File) -> std::io::Result<Memory> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        let map = MmapOptions::new().len(bytes.max(1)).map_raw(&file)?;
        Ok(Memory::new(map, bytes, Backing::File(file)))
    }

    /// Copies the current contents of another process's file into private memory.
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

    /// Maps another process's file copy-on-write, for files too long to copy. Pages that are not
    /// written here show the file's current contents; the file is never changed.
    pub fn view_of(file: &File) -> std::io::Result<Memory> {
        let bytes = usize::try_from(file.metadata()?.len()).map_err(std::io::Error::other)?;
        // SAFETY: the mapping is private, so writes stay in this process. Writes of another process
        // may or may not become visible; its words are read as plain bytes. The files of an arena
        // are never truncated.
        let map = unsafe { MmapOptions::new().len(bytes.max(1)).map_copy(file)? };
        Ok(Memory::new(map.into(), bytes, Backing::Closed))
    }

    fn new(map: MmapRaw, bytes: usize, backing: Backing) -> Memory {
        Memory { map, bytes, backing, test_file: None }
    }

    /// Returns whether the memory gets its pages when they are written, without a file that might
    /// have no space for them.
    pub fn is_anonymous(&self) -> bool {
        matches!(self.backing, Backing::Anonymous)
    }

    fn file(&self) -> Option<&File> {
        match &self.backing {
            Backing::File(file) | Backing::Shareable(file) => Some(file),
            Backing::Anonymous | Backing::Closed => None,
        }
    }

    /// Closes the file of the mapping, which can then no longer grow.
    pub(crate) fn without_file(mut self) -> Memory {
        self.backing = Backing::Closed;
        self
    }

    /// Reserves the memory of a range of a file: a full disk is an error here, and not a signal at a
    /// later store. The bytes of pages that had no memory are zeros. Other memory gets its pages
    /// when they are written. Takes 0.1 s for a GiB on a memory file system.
    pub fn occupy(&self, within: Range<usize>) -> std::io::Result<()> {
        full_disk::check()?;
        match &self.backing {
            Backing::File(file) => reserve(file, within),
            Backing::Anonymous | Backing::Shareable(_) | Backing::Closed => Ok(()),
        }
    }

    /// Returns whether `needed` bytes of a file surely have memory. They are at most `ranges` adjacent
    /// ranges, outside of which all was vacated, and what may be missing has at least `least` bytes.
    /// Reserving memory that is there already takes seconds for some GiB on a memory file system, if
    /// it was never written.
    ///
    /// The file system only tells how many bytes have memory. Besides those of the ranges, that may
    /// be pages at their ends, and some that the file system counts for itself. Together they must
    /// be fewer than what may be missing.
    pub fn are_occupied(&self, needed: usize, ranges: usize, least: usize) -> bool {
        let Backing::File(file) = &self.backing else { return true };
        let found = file.metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(512));
        let uncertain = (2 * ranges + OF_FILE_SYSTEM) * page_bytes();
        uncertain < least && found >= needed as u64
    }

    /// Returns the memory of the whole pages of a range to the system. Their bytes are unspecified
    /// until they are written again, after [`Memory::occupy`]. Returns false if the range keeps its
    /// memory: it was sealed as it was shared, or the file system makes no holes.
    pub fn vacate(&mut self, within: Range<usize>) -> bool {
        // SAFETY: `&mut self` excludes borrows of the bytes.
        unsafe { self.vacate_unborrowed(within) }
    }

    /// Does the same as [`Memory::vacate`] in memory of which other bytes may be borrowed.
    ///
    /// # Safety
    /// The bytes of the range must not be borrowed.
    pub(super) unsafe fn vacate_unborrowed(&self, within: Range<usize>) -> bool {
        assert!(within.end <= self.bytes, "bytes up to {} of {}", within.end, self.bytes);
        let pages = whole_pages(within, page_bytes());
        if pages.is_empty() {
            return true;
        }
        if self.test_file.is_some() {
            store_trace::borrowed(self.address(), pages.start, pages.len());
            // A test that reads these bytes shall notice.
            // SAFETY: the assertion keeps the pages inside the mapping. Nobody borrows them, as the
            // caller promises.
            unsafe { self.map.as_mut_ptr().add(pages.start).write_bytes(VACATED, pages.len()) };
            return true;
        }
        // SAFETY: as above.
        let released = unsafe { self.release_pages(pages) };
        // After any other error some of the pages may be gone, so that none may be relied on.
        let keeps = [std::io::ErrorKind::Unsupported, std::io::ErrorKind::PermissionDenied];
        released.map_or_else(|error| !keeps.contains(&error.kind()), |()| true)
    }

    /// Returns whole pages to the system.
    ///
    /// # Safety
    /// The pages must be inside the mapping and not borrowed.
    #[cfg(target_os = "linux")]
    unsafe fn release_pages(&self, pages: Range<usize>) -> std::io::Result<()> {
        use memmap2::UncheckedAdvice;
        use rustix::fs::FallocateFlags;
        match &self.backing {
            Backing::File(file) | Backing::Shareable(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let (from, bytes) = (pages.start as u64, pages.len() as u64);
                Ok(rustix::fs::fallocate(file, flags, from, bytes)?)
            }
            Backing::Anonymous => {
                let unused = UncheckedAdvice::DontNeed;
                // SAFETY: by the caller's promise. The mapping is private and anonymous, so the
                // pages become zeros for nobody else.
                unsafe { self.map.unchecked_advise_range(unused, pages.start, pages.len()) }
            }
            Backing::Closed => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    unsafe fn release_pages(&self, _pages: Range<usize>) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Returns the size in bytes.
    #[allow(clippy::len_without_is_empty, reason = "an empty mapping is of no use")]
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Extends the memory with zeros. The mapping may move.
    pub(crate) fn grow(&mut self, bytes: usize) -> std::io::Result<()> {
        let mut grown = match self.file() {
            Some(file) => {
                reserve(file, 0..bytes)?;
                Memory::of_file(file.try_clone()?)?
            }
            None => {
                let mut grown = Memory::anonymous(bytes)?;
                grown.bytes_mut()[..self.bytes].copy_from_slice(self.bytes());
                grown
            }
        };
        store_trace::moved(self.address(), grown.address());
        grown.test_file = self.test_file.take();
        if let Some(test_file) = &grown.test_file {
            test_file.opened_by(&grown);
        }
        *self = grown;
        Ok(())
    }

    /// Borrows all bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `bytes` long and lives as long as `self`. Only this process writes
        // it: it is anonymous, or a file of mode 0600 in a locked directory of mode 0700, which no
        // other program may touch. Receivers of a `read_only_descriptor` map it read-only. Memory
        // whose `writable_descriptor` was sent is only accessed by words or through `Volatile`
        // (`shared.rs`). Writing requires `&mut self`.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.bytes) }
    }

    /// Borrows all bytes for writing through the cache.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        store_trace::borrowed(self.address(), 0, self.bytes);
        // SAFETY: as in `bytes`. `&mut self` makes this borrow the only one.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.bytes) }
    }

    /// Returns bytes that another process may be writing.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub(super) fn volatile(&self, from: usize, bytes: usize) -> Volatile<'_> {
        assert!(from <= self.bytes && bytes <= self.bytes - from, "{bytes} bytes at {from}");
        // SAFETY: the assertion keeps the range inside the mapping, which lives as long as `self`.
        // `shared.rs` ensures that memory read this way is never borrowed.
        unsafe { Volatile::new(self.map.as_ptr().add(from), bytes) }
    }

    /// Returns a word by its index.
    ///
    /// # Panics
    /// If the index is out of range.
    #[inline]
    pub(crate) fn load(&self, word: usize) -> u64 {
        u64::from_le(self.word(word).load(Ordering::Relaxed))
    }

    /// Stores a word atomically: after a crash a reader finds either the old or the new value.
    ///
    /// # Panics
    /// If the index is out of range.
    pub fn store(&mut self, word: usize, value: u64) {
        store_trace::storing(self.address(), word * 8);
        compiler_fence(Ordering::SeqCst);
        self.word(word).store(value.to_le(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Copies bytes into the memory with non-temporal stores, which neither evict cached data nor
    /// read the lines they overwrite. The bytes are certain to be in memory only after [`fence`].
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[cfg(test)]
    pub(crate) fn stream(&mut self, start: usize, source: &[u8]) {
        assert!(
            start <= self.bytes && source.len() <= self.bytes - start,
            "cannot write at {start}: the bytes do not fit"
        );
        store_trace::streaming(self.address(), start, source.len());
        // SAFETY: the assertion keeps the destination inside the mapping, `&mut self` makes it
        // exclusively ours, and a borrowed source cannot overlap it.
        unsafe { copy_non_temporal(self.map.as_mut_ptr().add(start), source) };
    }

    /// Copies bytes into the memory through the cache, for data that is read again soon.
    pub fn write(&mut self, start: usize, source: &[u8]) {
        self.stretch_mut(start..start + source.len()).copy_from_slice(source);
    }

    /// Borrows a byte range for writing through the cache.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub(crate) fn stretch_mut(&mut self, within: Range<usize>) -> &mut [u8] {
        store_trace::borrowed(self.address(), within.start, within.len());
        // SAFETY: as in `bytes_mut`.
        let all = unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.bytes) };
        &mut all[within]
    }

    /// Returns the address of the mapping, which identifies it to the store trace and to pins.
    pub(crate) fn address(&self) -> usize {
        self.map.as_ptr() as usize
    }

    pub(super) fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.bytes / 8, "word {word} of {}", self.bytes / 8);
        // SAFETY: the word is inside the mapping, which starts at a page boundary and so aligns it,
        // and which lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(test_file) = self.test_file.take() {
            test_file.close(self.bytes());
        }
    }
}

/// Orders all earlier non-temporal stores before all later stores.
pub fn fence() {
    compiler_fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` exists on every x86-64 processor and accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    store_trace::fenced();
    compiler_fence(Ordering::SeqCst);
}

/// Copies with non-temporal stores where the destination is aligned for them, and with ordinary
/// stores elsewhere.
///
/// # Safety
/// `destination` must be valid for writes of `source.len()` bytes that nothing else refers to.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy_non_temporal(destination: *mut u8, source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let head = destination.align_offset(16).min(source.len());
    let (first, rest) = source.split_at(head);
    // SAFETY: the head is inside the destination, by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), destination, head) };
    let lines = rest.chunks_exact(16);
    let tail = lines.remainder();
    let mut at = head;
    for line in lines {
        // SAFETY: `at` is inside the destination and aligned to 16, because the head was copied.
        // The source's line is 16 bytes long. SSE2 exists on every x86-64 processor.
        unsafe {
            let value = _mm_loadu_si128(line.as_ptr().cast::<__m128i>());
            _mm_stream_si128(destination.add(at).cast::<__m128i>(), value);
        }
        at += 16;
    }
    // SAFETY: the rest of the source is as long as the rest of the destination.
    unsafe { std::ptr::copy_nonoverlapping(tail.as_ptr(), destination.add(at), tail.len()) };
}

/// Copies with ordinary stores: this target has no non-temporal ones.
///
/// # Safety
/// `destination` must be valid for writes of `source.len()` bytes that nothing else refers to.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy_non_temporal(destination: *mut u8, source: &[u8]) {
    // SAFETY: by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), destination, source.len()) };
}

/// Reserves disk space, so that a full disk is an error here and not a signal at a later store. The
/// file gets longer if the range is past its end.
pub(super) fn reserve(file: &File, within: Range<usize>) -> std::io::Result<()> {
    if within.is_empty() {
        return Ok(());
    }
    let (from, bytes) = (within.start as u64, within.len() as u64);
    #[cfg(target_os = "linux")]
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), from, bytes)?;
    #[cfg(not(target_os = "linux"))]
    if file.metadata()?.len() < from + bytes {
        file.set_len(from + bytes)?;
    }
    Ok(())
}

/// Returns the pages of a file of which a range has any bytes.
pub(super) fn touched_pages(within: Range<usize>) -> Range<usize> {
    match within.is_empty() {
        true => 0..0,
        false => (within.start & !(PAGE_BYTES - 1))..within.end.next_multiple_of(PAGE_BYTES),
    }
}

/// Returns the whole pages of a range, where pages have `page` bytes.
pub(super) fn whole_pages(within: Range<usize>, page: usize) -> Range<usize> {
    within.start.next_multiple_of(page)..within.end & !(page - 1)
}

/// Returns the size of the pages that the system gives and takes back: 4 KiB, or on some AArch64
/// systems 16 or 64.
pub(super) fn page_bytes() -> usize {
    rustix::param::page_size().max(PAGE_BYTES)
}

/// The number of pages of a file that its file system may use for itself.
const OF_FILE_SYSTEM: usize = 4;

/// The size from which shareable memory requests huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The byte that fills vacated pages of test files.
const VACATED: u8 = 0xa5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_writes_exactly_its_range_at_any_alignment() {
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
    fn pages_are_given_back_whole() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            let pages = whole_pages(5000..300_000, page);
            assert!(pages.start >= 5000 && pages.end <= 300_000, "{page}: {pages:?}");
            assert_eq!((pages.start % page, pages.end % page), (0, 0), "{page}");
            assert!(pages.len() > 295_000 - 2 * page, "{page}: {pages:?}");
            assert_eq!(whole_pages(page..3 * page, page), page..3 * page);
            assert!(whole_pages(1..page + 1, page).is_empty());
        }
    }

    #[test]
    fn memory_beside_vacated_bytes_is_kept() {
        for memory in [Memory::anonymous(1 << 20), Memory::shareable(1 << 20)] {
            let Ok(mut memory) = memory else { continue };
            memory.bytes_mut().fill(7);
            assert!(memory.vacate(100_000..900_000));
            let bytes = memory.bytes();
            assert!(bytes[..100_000].iter().chain(&bytes[900_000..]).all(|&byte| byte == 7));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn sparse_memory_may_be_more_than_the_system_has() {
        const STRICT: &str = "2";
        let policy = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
        if policy.is_ok_and(|policy| policy.trim() == STRICT) {
            println!("SKIPPED: this system commits no more memory than it has");
            return;
        }
        let mut memory = Memory::anonymous_sparse(1 << 44, 1 << 12).unwrap();
        memory.store(1 << 40, 7);
        assert_eq!((memory.load(1 << 40), memory.len()), (7, 1 << 44));
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
