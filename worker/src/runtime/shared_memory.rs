//! Memory that a server has lent, mapped.
//!
//! This is one of the few files that may hold `unsafe` code: what lies in such memory is changed by
//! another process, so it is loaded as atomic words, or copied as bytes and never borrowed.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use pushpull_common::lending::{DESK_WORDS, Geometry, Reader, Words, board_words};
use pushpull_common::protocol::message::Lent;

/// A whole file of somebody else's, mapped.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: MmapRaw,
    writable: bool,
}

impl Mapped {
    /// At least so many bytes of a file, to be read, or to be written, too.
    fn new(file: &File, bytes: u64, writable: bool) -> io::Result<Mapped> {
        let (found, length) = (file.metadata()?.len(), usize::try_from(bytes));
        let length = length.map_err(io::Error::other)?;
        if found < bytes || length == 0 {
            return Err(io::Error::other(format!("{bytes} bytes are lent, and {found} are there")));
        }
        let mut options = MmapOptions::new();
        let options = options.len(length);
        let map = if writable { options.map_raw(file) } else { options.map_raw_read_only(file) };
        Ok(Mapped { map: map?, writable })
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.map.len() / 8, "word {word} of {}", self.map.len() / 8);
        // SAFETY: the word lies inside the mapping, which starts at a page and so aligns it, and lives as
        // long as `self`. Here as in the other process it is only ever used in one piece. That it
        // may not be stored to is seen to in `store`.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }

    /// Copies bytes from somewhere in it. Should they be overwritten meanwhile, which the other process
    /// does only when it has revoked the pin under which they are read, what is copied is of any
    /// content.
    ///
    /// # Panics
    /// If they do not lie in it.
    pub(crate) fn copy(&self, from: usize, to: &mut [u8]) {
        let length = self.map.len();
        assert!(from <= length && to.len() <= length - from, "{} bytes at {from}", to.len());
        // SAFETY: the assertion keeps the source inside the mapping, which lives as long as `self`; the
        // target is borrowed, and cannot overlap a mapping of which nothing is ever borrowed. Any
        // bytes are a `u8` each: of those that change while they are copied either is taken, and
        // nothing depends on which, as all are thrown away then.
        unsafe {
            std::ptr::copy_nonoverlapping(self.map.as_ptr().add(from), to.as_mut_ptr(), to.len());
        }
    }
}

impl Words for Mapped {
    fn load(&self, word: usize) -> u64 {
        u64::from_le(self.word(word).load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        assert!(self.writable, "what is lent to be read is not written");
        self.word(word).store(value.to_le(), Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// Maps what has come with a [`Lent`], once it is known to be what that says.
pub(super) fn map(lent: &Lent, descriptors: Vec<OwnedFd>) -> io::Result<Reader<Mapped>> {
    let Lent { offset, block_bytes, stride, blocks, places, .. } = *lent;
    let geometry = Geometry { offset, block_bytes, stride, blocks, places };
    geometry.check(lent.values_bytes).map_err(io::Error::other)?;
    let (board_bytes, desk_bytes) = (8 * board_words(places as usize), 8 * DESK_WORDS);
    if lent.board_bytes < board_bytes as u64 || lent.desk_bytes < desk_bytes as u64 {
        return Err(io::Error::other("a board or a desk that is too short"));
    }
    let files: Vec<File> = descriptors.into_iter().map(File::from).collect();
    let [board, desk, values] = &files[..] else {
        return Err(io::Error::other(format!("{} descriptors and not three", files.len())));
    };
    let board = Mapped::new(board, lent.board_bytes, false)?;
    let desk = Mapped::new(desk, lent.desk_bytes, true)?;
    let values = Mapped::new(values, lent.values_bytes, false)?;
    Ok(Reader::new(board, desk, values, geometry, lent.tenure))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file(bytes: u64) -> OwnedFd {
        let file = File::from(memfd_create("lent", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file.into()
    }

    fn lent() -> Lent {
        Lent {
            lends: 1,
            tenure: 0,
            board_bytes: 8 * 20,
            desk_bytes: 4096,
            values_bytes: 4096 + 8 * 72,
            offset: 4096,
            block_bytes: 64,
            stride: 72,
            blocks: 8,
            places: 4,
        }
    }

    fn mapped(lent: &Lent) -> io::Result<Reader<Mapped>> {
        // What is there is what the sound one says.
        let there = super::tests::lent();
        map(lent, vec![file(there.board_bytes), file(there.desk_bytes), file(there.values_bytes)])
    }

    #[test]
    fn what_is_not_what_it_is_said_to_be_is_not_mapped() {
        mapped(&lent()).unwrap();
        for wrong in [
            Lent { board_bytes: 8 * 20 - 1, ..lent() },
            Lent { board_bytes: 8 * 20 + 1, ..lent() },
            Lent { desk_bytes: 4095, ..lent() },
            Lent { desk_bytes: 4097, ..lent() },
            Lent { values_bytes: 4096 + 8 * 72 + 1, ..lent() },
            Lent { values_bytes: u64::MAX, ..lent() },
            Lent { blocks: 9, ..lent() },
            Lent { block_bytes: 72, ..lent() },
            Lent { places: 5, ..lent() },
        ] {
            assert!(mapped(&wrong).is_err(), "{wrong:?}");
        }
        assert!(map(&lent(), Vec::new()).is_err());
    }

    #[test]
    fn what_lies_in_it_is_copied() {
        let file = File::from(file(4096));
        let written = Mapped::new(&file, 4096, true).unwrap();
        written.store(2, 0x0706_0504_0302_0100);
        let read = Mapped::new(&file, 4096, false).unwrap();
        let mut bytes = [0; 4];
        read.copy(18, &mut bytes);
        assert_eq!((bytes, read.load(2)), ([2, 3, 4, 5], 0x0706_0504_0302_0100));
        for (from, length) in [(4093, 4), (usize::MAX, 1), (4097, 0)] {
            let copied = std::panic::catch_unwind(|| read.copy(from, &mut vec![0; length]));
            assert!(copied.is_err());
        }
        assert!(std::panic::catch_unwind(|| read.store(0, 1)).is_err());
    }
}
