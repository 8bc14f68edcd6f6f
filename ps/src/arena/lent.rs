//! Memory that another process has mapped, too: reached by words alone, each in one piece.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use pushpull_common::lending::Words;

use super::Memory;

/// Words that are lent, all 0 at first.
#[derive(Debug)]
pub(crate) struct LentWords(Memory);

impl LentWords {
    /// So many words; an error where memory cannot be lent.
    pub(crate) fn new(words: usize) -> io::Result<LentWords> {
        Memory::lendable(words * 8).map(LentWords)
    }

    /// Words that somebody was lent.
    #[cfg(test)]
    pub(crate) fn of(memory: Memory) -> LentWords {
        LentWords(memory)
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
    pub(crate) fn lent(self) -> LentWords {
        LentWords(self.0.without_file())
    }

    /// How many bytes they are.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

impl Words for LentWords {
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
