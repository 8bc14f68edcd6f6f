//! Memory that another process has mapped too: accessed as atomic words, or loaded as bytes that
//! may change concurrently.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use pushpull_common::shared_values::AtomicWords;
use pushpull_optim::volatile::Volatile;

use super::Memory;

/// Words shared with other processes, initially 0.
#[derive(Debug)]
pub struct SharedWords(Memory);

impl SharedWords {
    /// Creates `words` words.
    ///
    /// # Errors
    /// If the platform cannot share memory.
    pub(crate) fn new(words: usize) -> io::Result<SharedWords> {
        Memory::shareable(words * 8).map(SharedWords)
    }

    /// Wraps words received from another process.
    #[cfg(any(test, feature = "simulation"))]
    pub fn of(memory: Memory) -> SharedWords {
        SharedWords(memory)
    }

    /// Returns a descriptor through which another process can map the words read-only.
    pub(crate) fn read_only_descriptor(&self) -> io::Result<OwnedFd> {
        self.0.read_only_descriptor().map(OwnedFd::from)
    }

    /// Returns a descriptor through which another process can map the words for reading and
    /// writing.
    pub(crate) fn writable_descriptor(&self) -> io::Result<OwnedFd> {
        self.0.writable_descriptor().map(OwnedFd::from)
    }

    /// Closes the descriptor of the words, which can then be shared with nobody else.
    pub(crate) fn without_descriptor(self) -> SharedWords {
        SharedWords(self.0.without_file())
    }

    /// Returns the size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Bytes that another process writes, initially 0. They are never borrowed.
#[derive(Debug)]
pub struct SharedBytes(Memory);

impl SharedBytes {
    /// Creates `bytes` bytes, and a descriptor through which another process can map them for
    /// reading and writing.
    ///
    /// # Errors
    /// If the platform cannot share memory.
    pub fn new(bytes: usize) -> io::Result<(SharedBytes, OwnedFd)> {
        let memory = Memory::shareable(bytes)?;
        let descriptor = memory.writable_descriptor()?.into();
        // The memory is shared with nobody else.
        Ok((SharedBytes(memory.without_file()), descriptor))
    }

    /// Returns `bytes` bytes from offset `from`.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    #[inline]
    pub fn bytes(&self, from: usize, bytes: usize) -> Volatile<'_> {
        self.0.volatile(from, bytes)
    }
}

impl AtomicWords for SharedWords {
    fn load(&self, word: usize) -> u64 {
        u64::from_le(self.0.word(word).load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        self.0.word(word).store(value.to_le(), Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use pushpull_common::finite::Exponents;

    use super::*;

    #[test]
    fn bytes_of_another_process_are_copied_and_cannot_be_truncated() {
        let (bytes, descriptor) = SharedBytes::new(8192).unwrap();
        let file = File::from(descriptor);
        assert_eq!(file.metadata().unwrap().len(), 8192);
        assert!(file.set_len(4096).is_err() && file.set_len(16384).is_err());
        file.write_all_at(&[7; 16], 8176).unwrap();
        let mut end = [0; 24];
        assert!(!bytes.bytes(8168, 24).copy(&mut end, Exponents::NONE));
        assert_eq!((end[..8].to_vec(), end[8..].to_vec()), (vec![0; 8], vec![7; 16]));
    }

    #[test]
    #[should_panic = "24 bytes at 8169"]
    fn a_range_past_the_end_is_rejected() {
        let (bytes, _descriptor) = SharedBytes::new(8192).unwrap();
        bytes.bytes(8169, 24);
    }
}
