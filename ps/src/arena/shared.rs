//! Memory that another process has mapped, too: reached by words, each in one piece, or loaded as
//! bytes that may change meanwhile.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use pushpull_common::shared_values::AtomicWords;

use super::Memory;
use crate::volatile::Volatile;

/// Words that are lent, all 0 at first.
#[derive(Debug)]
pub(crate) struct SharedWords(Memory);

impl SharedWords {
    /// So many words; an error where memory cannot be lent.
    pub(crate) fn new(words: usize) -> io::Result<SharedWords> {
        Memory::shareable(words * 8).map(SharedWords)
    }

    /// Words that somebody was lent.
    #[cfg(test)]
    pub(crate) fn of(memory: Memory) -> SharedWords {
        SharedWords(memory)
    }

    /// A descriptor by which another process can map them, to read them and no more.
    pub(crate) fn to_read(&self) -> io::Result<OwnedFd> {
        self.0.to_read().map(OwnedFd::from)
    }

    /// A descriptor by which another process can map them, to read and to write them.
    pub(crate) fn to_write(&self) -> io::Result<OwnedFd> {
        self.0.to_write().map(OwnedFd::from)
    }

    /// The same words, without their descriptor held open: they are lent to nobody else.
    pub(crate) fn shared(self) -> SharedWords {
        SharedWords(self.0.without_file())
    }

    /// How many bytes they are.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Bytes that another process writes, all 0 at first: nothing of them is borrowed.
#[derive(Debug)]
pub(crate) struct SharedBytes(Memory);

impl SharedBytes {
    /// So many bytes, and a descriptor by which another process can map them, to read and to write them;
    /// an error where memory cannot be lent.
    pub(crate) fn new(bytes: usize) -> io::Result<(SharedBytes, OwnedFd)> {
        let memory = Memory::shareable(bytes)?;
        let descriptor = memory.to_write()?.into();
        // It is lent to nobody else.
        Ok((SharedBytes(memory.without_file()), descriptor))
    }

    /// So many of them, from this one on.
    ///
    /// # Panics
    /// If there are not so many.
    pub(crate) fn bytes(&self, from: usize, bytes: usize) -> Volatile<'_> {
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
    fn what_another_writes_is_copied_and_nobody_makes_it_shorter() {
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
    fn nothing_behind_it_is_reached() {
        let (bytes, _descriptor) = SharedBytes::new(8192).unwrap();
        bytes.bytes(8169, 24);
    }
}
