//! Memory that a server has lent, mapped.
//!
//! This is one of the few files that may hold `unsafe` code. Values are changed by another process, so
//! they are loaded as atomic words, or copied as bytes and never borrowed. What gradients are written to
//! is changed by nobody else, and borrowed.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use pushpull_common::protocol::message::{SharedPushBuffer, SharedValues};
use pushpull_common::shared_values::{
    AtomicWords, Geometry, READER_SLOT_WORDS, Reader, block_table_words,
};

use crate::push_buffers::SlotMemory;

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
            return Err(io::Error::other(format!(
                "{bytes} bytes are shared, and {found} are there"
            )));
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

impl AtomicWords for Mapped {
    fn load(&self, word: usize) -> u64 {
        u64::from_le(self.word(word).load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        assert!(self.writable, "read-only memory is not written");
        self.word(word).store(value.to_le(), Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// Maps what has come with a [`SharedValues`], once it is known to be what that says.
pub(crate) fn map(shared: &SharedValues, descriptors: Vec<OwnedFd>) -> io::Result<Reader<Mapped>> {
    let SharedValues { offset, block_bytes, stride, blocks, logical_blocks, .. } = *shared;
    let geometry = Geometry { offset, block_bytes, stride, blocks, logical_blocks };
    geometry.check(shared.values_bytes).map_err(io::Error::other)?;
    let (block_table_bytes, reader_slot_bytes) =
        (8 * block_table_words(logical_blocks as usize), 8 * READER_SLOT_WORDS);
    if shared.block_table_bytes < block_table_bytes as u64
        || shared.reader_slot_bytes < reader_slot_bytes as u64
    {
        return Err(io::Error::other("a board or a desk that is too short"));
    }
    let files: Vec<File> = descriptors.into_iter().map(File::from).collect();
    let [block_table, reader_slot, values] = &files[..] else {
        return Err(io::Error::other(format!("{} descriptors and not three", files.len())));
    };
    let block_table = Mapped::new(block_table, shared.block_table_bytes, false)?;
    let reader_slot = Mapped::new(reader_slot, shared.reader_slot_bytes, true)?;
    let values = Mapped::new(values, shared.values_bytes, false)?;
    Ok(Reader::new(block_table, reader_slot, values, geometry, shared.owner_generation))
}

/// Memory that a shard lends to write gradients into, mapped, and cut into rooms.
#[derive(Debug)]
pub(crate) struct MappedPushBuffer {
    map: MmapRaw,
    slot_bytes: usize,
    /// Where each room starts, and what names it to the shard.
    push_slots: Vec<(usize, u32)>,
    /// Those that nobody has.
    free: Mutex<Vec<usize>>,
}

/// Maps what has come with a [`SharedPushBuffer`], once it is known to be what that says.
pub(crate) fn map_push_buffer(
    shared: &SharedPushBuffer,
    descriptors: Vec<OwnedFd>,
) -> io::Result<MappedPushBuffer> {
    let SharedPushBuffer { bytes, first, stride, push_slots } = shared;
    let push_slots = push_slots.items();
    let end = stride.checked_mul(push_slots.len() as u64).and_then(|all| all.checked_add(*first));
    let aligned = first.is_multiple_of(ALIGNED) && stride.is_multiple_of(ALIGNED) && *stride > 0;
    if !aligned || end.is_none_or(|end| end > *bytes) || push_slots.contains(&0) {
        return Err(io::Error::other("slots outside the shared memory"));
    }
    let files: Vec<File> = descriptors.into_iter().map(File::from).collect();
    let [file] = &files[..] else {
        return Err(io::Error::other(format!("{} descriptors and not one", files.len())));
    };
    let Mapped { map, .. } = Mapped::new(file, *bytes, true)?;
    let start = |index: usize| *first as usize + index * *stride as usize;
    let push_slots: Vec<(usize, u32)> =
        push_slots.iter().enumerate().map(|(index, &number)| (start(index), number)).collect();
    let free = Mutex::new((0..push_slots.len()).rev().collect());
    Ok(MappedPushBuffer { map, slot_bytes: *stride as usize, push_slots, free })
}

/// Where rooms may start: elements of every type are aligned there.
const ALIGNED: u64 = 4096;

impl MappedPushBuffer {
    /// A room that nobody has, and what names it to the shard.
    pub(super) fn take(self: &Arc<Self>) -> Option<(MappedSlot, u32)> {
        let index = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        let (start, number) = self.push_slots[index];
        Some((MappedSlot { push_buffer: self.clone(), index, start }, number))
    }
}

/// A room of a tray. There is never another of the same: it was taken from those that nobody has, and is
/// back there once it is dropped.
#[derive(Debug)]
pub(crate) struct MappedSlot {
    push_buffer: Arc<MappedPushBuffer>,
    index: usize,
    start: usize,
}

impl SlotMemory for MappedSlot {
    fn bytes(&self) -> &[u8] {
        let (start, length) = (self.start, self.push_buffer.slot_bytes);
        // SAFETY: `map_push_buffer` has seen that the room lies in the mapping, which lives as long as the tray and so
        // as `self`. In this process only `self` leads to these bytes, and to change them takes `&mut
        // self`. The process that has lent them maps them too, and by the protocol only reads them: what is
        // sent to it beside them is received elsewhere. If it broke that, or cut its memory short,
        // gradients would be of other content or this process would be ended by the system; it is the
        // server that was chosen to keep the model, as the same user. Any bytes are a `u8` each.
        unsafe { std::slice::from_raw_parts(self.push_buffer.map.as_ptr().add(start), length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, length) = (self.start, self.push_buffer.slot_bytes);
        // SAFETY: as in `bytes`. `&mut self` is the only way to them in this process as long as the slice
        // lives. The other only reads them, and knows that what it reads may be changing: it is values to
        // it, and never an index or a length.
        unsafe {
            std::slice::from_raw_parts_mut(self.push_buffer.map.as_mut_ptr().add(start), length)
        }
    }
}

impl Drop for MappedSlot {
    fn drop(&mut self) {
        self.push_buffer.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::protocol::wire::List;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file(bytes: u64) -> OwnedFd {
        let file = File::from(memfd_create("shared", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file.into()
    }

    fn shared() -> SharedValues {
        SharedValues {
            shares: 1,
            owner_generation: 0,
            block_table_bytes: 8 * 20,
            reader_slot_bytes: 4096,
            values_bytes: 4096 + 8 * 72,
            offset: 4096,
            block_bytes: 64,
            stride: 72,
            blocks: 8,
            logical_blocks: 4,
        }
    }

    fn mapped(shared: &SharedValues) -> io::Result<Reader<Mapped>> {
        // What is there is what the sound one says.
        let there = super::tests::shared();
        map(
            shared,
            vec![
                file(there.block_table_bytes),
                file(there.reader_slot_bytes),
                file(there.values_bytes),
            ],
        )
    }

    #[test]
    fn what_is_not_what_it_is_said_to_be_is_not_mapped() {
        mapped(&shared()).unwrap();
        for wrong in [
            SharedValues { block_table_bytes: 8 * 20 - 1, ..shared() },
            SharedValues { block_table_bytes: 8 * 20 + 1, ..shared() },
            SharedValues { reader_slot_bytes: 4095, ..shared() },
            SharedValues { reader_slot_bytes: 4097, ..shared() },
            SharedValues { values_bytes: 4096 + 8 * 72 + 1, ..shared() },
            SharedValues { values_bytes: u64::MAX, ..shared() },
            SharedValues { blocks: 9, ..shared() },
            SharedValues { block_bytes: 72, ..shared() },
            SharedValues { logical_blocks: 5, ..shared() },
        ] {
            assert!(mapped(&wrong).is_err(), "{wrong:?}");
        }
        assert!(map(&shared(), Vec::new()).is_err());
    }

    fn push_buffer() -> SharedPushBuffer {
        let push_slots = List::new(vec![7, 9]).unwrap();
        SharedPushBuffer { bytes: 3 * 4096, first: 4096, stride: 4096, push_slots }
    }

    #[test]
    fn a_tray_that_is_not_what_it_is_said_to_be_is_not_mapped() {
        map_push_buffer(&push_buffer(), vec![file(3 * 4096)]).unwrap();
        for wrong in [
            SharedPushBuffer { bytes: 3 * 4096 + 1, ..push_buffer() },
            SharedPushBuffer { bytes: 3 * 4096 - 1, ..push_buffer() },
            SharedPushBuffer { first: 4104, ..push_buffer() },
            SharedPushBuffer { first: 8192, ..push_buffer() },
            SharedPushBuffer { first: u64::MAX - 4095, ..push_buffer() },
            SharedPushBuffer { stride: 0, ..push_buffer() },
            SharedPushBuffer { stride: 2048, ..push_buffer() },
            SharedPushBuffer { stride: 1 << 63, ..push_buffer() },
            SharedPushBuffer { push_slots: List::new(vec![7, 0]).unwrap(), ..push_buffer() },
        ] {
            assert!(map_push_buffer(&wrong, vec![file(3 * 4096)]).is_err(), "{wrong:?}");
        }
        assert!(map_push_buffer(&push_buffer(), Vec::new()).is_err());
        assert!(map_push_buffer(&push_buffer(), vec![file(3 * 4096), file(3 * 4096)]).is_err());
    }

    #[test]
    fn each_room_is_of_one_and_can_be_taken_again() {
        let there = file(3 * 4096);
        let seen = File::from(there.try_clone().unwrap());
        let push_buffer = Arc::new(map_push_buffer(&push_buffer(), vec![there]).unwrap());
        let [(mut first, 7), (mut second, 9)] =
            [push_buffer.take().unwrap(), push_buffer.take().unwrap()]
        else {
            panic!("the rooms are handed out in their order")
        };
        assert!(push_buffer.take().is_none());
        first.bytes_mut().fill(1);
        second.bytes_mut()[4095] = 2;
        let seen = Mapped::new(&seen, 3 * 4096, false).unwrap();
        let mut bytes = vec![9; 3 * 4096];
        seen.copy(0, &mut bytes);
        let expected = [vec![0; 4096], vec![1; 4096], vec![0; 4095], vec![2]].concat();
        assert!(bytes == expected && first.bytes() == &expected[4096..8192]);
        drop(second);
        assert_eq!(push_buffer.take().unwrap().1, 9);
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
