//! Maps the memory that a server shares.
//!
//! This is one of the few files that may hold `unsafe` code. Another process changes the values, so
//! they are loaded as atomic words or copied as bytes, and never borrowed. Only this process writes
//! to buffer slots, so these are borrowed.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use pushpull_common::protocol::message::{SharedPushBuffer, SharedValues};
use pushpull_common::shared_values::{
    AtomicWords, Geometry, READER_SLOT_WORDS, SharedValuesReader, block_table_words,
};

use crate::gradients::gradient_buffer::SlotMemory;

/// A mapped file that another process shares.
#[derive(Debug)]
pub(crate) struct MappedFile {
    map: MmapRaw,
    writable: bool,
}

impl MappedFile {
    /// Maps this many bytes of a file, for reading or for reading and writing. Fails if the file is
    /// shorter or `bytes` is 0.
    fn new(file: &File, bytes: u64, writable: bool) -> io::Result<MappedFile> {
        let found = file.metadata()?.len();
        let length = usize::try_from(bytes);
        let length = length.map_err(io::Error::other)?;
        if found < bytes || length == 0 {
            return Err(io::Error::other(format!("cannot map {bytes} bytes of a file of {found}")));
        }
        let mut options = MmapOptions::new();
        let options = options.len(length);
        let map = if writable { options.map_raw(file) } else { options.map_raw_read_only(file) };
        Ok(MappedFile { map: map?, writable })
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.map.len() / 8, "word {word} of {}", self.map.len() / 8);
        // SAFETY: the assertion keeps the word inside the mapping, which lives as long as `self`.
        // The mapping starts at a page, so the word is aligned. Both processes access it only as a
        // whole atomic word. `store` rejects stores to a read-only mapping.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(word)) }
    }

    /// Copies bytes out of the mapping, starting at byte `from`.
    ///
    /// The other process overwrites them only after it has revoked the pin under which they are
    /// read. The content of the copy is unspecified then.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    pub(crate) fn copy(&self, from: usize, to: &mut [u8]) {
        let length = self.map.len();
        assert!(from <= length && to.len() <= length - from, "{} bytes at {from}", to.len());
        // SAFETY: the assertion keeps the source inside the mapping, which lives as long as `self`.
        // The target is borrowed, and nothing in the mapping ever is, so they do not overlap. Any
        // byte is a valid `u8`. Of a byte that changes during the copy either value is taken;
        // nothing depends on which, because the caller discards the copy then.
        unsafe {
            std::ptr::copy_nonoverlapping(self.map.as_ptr().add(from), to.as_mut_ptr(), to.len());
        }
    }
}

impl AtomicWords for MappedFile {
    fn load(&self, word: usize) -> u64 {
        u64::from_le(self.word(word).load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        assert!(self.writable, "a read-only mapping was written");
        self.word(word).store(value.to_le(), Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// Validates the geometry in a [`SharedValues`] and maps its files: block table, reader slot and
/// values.
pub(crate) fn map(
    shared: &SharedValues,
    descriptors: Vec<OwnedFd>,
) -> io::Result<SharedValuesReader<MappedFile>> {
    let SharedValues { offset, block_bytes, stride, blocks, logical_blocks, .. } = *shared;
    let geometry = Geometry { offset, block_bytes, stride, blocks, logical_blocks };
    geometry.check(shared.values_bytes).map_err(io::Error::other)?;
    let block_table_bytes = 8 * block_table_words(logical_blocks as usize);
    let reader_slot_bytes = 8 * READER_SLOT_WORDS;
    if shared.block_table_bytes < block_table_bytes as u64
        || shared.reader_slot_bytes < reader_slot_bytes as u64
    {
        return Err(io::Error::other("the block table or the reader slot is too short"));
    }
    let files: Vec<File> = descriptors.into_iter().map(File::from).collect();
    let [block_table, reader_slot, values] = &files[..] else {
        return Err(io::Error::other(format!("expected three descriptors, found {}", files.len())));
    };
    let block_table = MappedFile::new(block_table, shared.block_table_bytes, false)?;
    let reader_slot = MappedFile::new(reader_slot, shared.reader_slot_bytes, true)?;
    let values = MappedFile::new(values, shared.values_bytes, false)?;
    Ok(SharedValuesReader::new(block_table, reader_slot, values, geometry, shared.owner_generation))
}

/// A mapped push buffer, divided into buffer slots.
#[derive(Debug)]
pub(crate) struct MappedPushBuffer {
    /// Set by the first device that copies to it; `None` if its pages cannot be locked. Dropped
    /// before the mapping.
    #[cfg(feature = "devices")]
    lock: std::sync::OnceLock<Option<pushpull_device::PageLock>>,
    map: MmapRaw,
    slot_bytes: usize,
    /// The first byte of each buffer slot, and its number at the shard.
    push_slots: Vec<(usize, u32)>,
    /// The indices of the free buffer slots.
    free: Mutex<Vec<usize>>,
}

/// Validates the geometry in a [`SharedPushBuffer`] and maps its file.
pub(crate) fn map_push_buffer(
    shared: &SharedPushBuffer,
    descriptors: Vec<OwnedFd>,
) -> io::Result<MappedPushBuffer> {
    let SharedPushBuffer { bytes, first, stride, push_slots } = shared;
    let push_slots = push_slots.items();
    let end = stride.checked_mul(push_slots.len() as u64).and_then(|all| all.checked_add(*first));
    let aligned = first.is_multiple_of(SLOT_ALIGNMENT)
        && stride.is_multiple_of(SLOT_ALIGNMENT)
        && *stride > 0;
    if !aligned || end.is_none_or(|end| end > *bytes) || push_slots.contains(&0) {
        return Err(io::Error::other("the buffer slots are not inside the shared memory"));
    }
    let files: Vec<File> = descriptors.into_iter().map(File::from).collect();
    let [file] = &files[..] else {
        return Err(io::Error::other(format!("expected one descriptor, found {}", files.len())));
    };
    let MappedFile { map, .. } = MappedFile::new(file, *bytes, true)?;
    let start = |index: usize| *first as usize + index * *stride as usize;
    let push_slots: Vec<(usize, u32)> =
        push_slots.iter().enumerate().map(|(index, &number)| (start(index), number)).collect();
    let free = Mutex::new((0..push_slots.len()).rev().collect());
    Ok(MappedPushBuffer {
        #[cfg(feature = "devices")]
        lock: std::sync::OnceLock::new(),
        map,
        slot_bytes: *stride as usize,
        push_slots,
        free,
    })
}

/// The alignment of buffer slots, which aligns elements of every type.
const SLOT_ALIGNMENT: u64 = 4096;

impl MappedPushBuffer {
    /// Takes a free buffer slot; returns it and its number at the shard.
    pub(super) fn take(self: &Arc<Self>) -> Option<(MappedSlot, u32)> {
        let index = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        let (start, number) = self.push_slots[index];
        Some((MappedSlot { push_buffer: self.clone(), index, start }, number))
    }
}

/// A buffer slot of a push buffer. It is the only handle to its slot: the slot is taken from the
/// free list and put back on drop.
#[derive(Debug)]
pub(crate) struct MappedSlot {
    push_buffer: Arc<MappedPushBuffer>,
    index: usize,
    start: usize,
}

impl SlotMemory for MappedSlot {
    fn bytes(&self) -> &[u8] {
        let start = self.start;
        let length = self.push_buffer.slot_bytes;
        // SAFETY: `map_push_buffer` has checked that the slot is inside the mapping. The mapping
        // lives as long as the push buffer, which `self` keeps alive. In this process only `self`
        // leads to these bytes, and changing them takes `&mut self`. The server maps them too, and
        // by the protocol only reads them: it receives frames elsewhere. A server that broke this
        // could change gradients; one that truncated the file could make the system kill this
        // process. The server runs as the same user and is trusted with the model. Any byte is a
        // valid `u8`.
        unsafe { std::slice::from_raw_parts(self.push_buffer.map.as_ptr().add(start), length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.start;
        let length = self.push_buffer.slot_bytes;
        // SAFETY: as in `bytes`. `&mut self` is the only access to these bytes in this process
        // while the slice lives. The server only reads them and expects them to change: it takes
        // them as values, never as an index or a length.
        unsafe {
            std::slice::from_raw_parts_mut(self.push_buffer.map.as_mut_ptr().add(start), length)
        }
    }

    #[cfg(feature = "devices")]
    fn lock_pages(&self, device: &pushpull_device::Device) {
        let MappedPushBuffer { lock, map, .. } = &*self.push_buffer;
        // SAFETY: the push buffer drops the lock before it unmaps the pages.
        lock.get_or_init(|| unsafe { device.lock_pages(map.as_mut_ptr(), map.len()) }.ok());
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

    fn mapped(shared: &SharedValues) -> io::Result<SharedValuesReader<MappedFile>> {
        // The files have the sizes of the valid description.
        let valid = super::tests::shared();
        map(
            shared,
            vec![
                file(valid.block_table_bytes),
                file(valid.reader_slot_bytes),
                file(valid.values_bytes),
            ],
        )
    }

    #[test]
    fn shared_values_with_a_wrong_geometry_are_rejected() {
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
    fn a_push_buffer_with_a_wrong_geometry_is_rejected() {
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
    fn each_buffer_slot_has_one_holder_and_is_reused() {
        let memory = file(3 * 4096);
        let duplicate = File::from(memory.try_clone().unwrap());
        let push_buffer = Arc::new(map_push_buffer(&push_buffer(), vec![memory]).unwrap());
        let [(mut first, 7), (mut second, 9)] =
            [push_buffer.take().unwrap(), push_buffer.take().unwrap()]
        else {
            panic!("the slots are not taken in order")
        };
        assert!(push_buffer.take().is_none());
        first.bytes_mut().fill(1);
        second.bytes_mut()[4095] = 2;
        let view = MappedFile::new(&duplicate, 3 * 4096, false).unwrap();
        let mut bytes = vec![9; 3 * 4096];
        view.copy(0, &mut bytes);
        let expected = [vec![0; 4096], vec![1; 4096], vec![0; 4095], vec![2]].concat();
        assert!(bytes == expected && first.bytes() == &expected[4096..8192]);
        drop(second);
        assert_eq!(push_buffer.take().unwrap().1, 9);
    }

    #[test]
    fn bytes_are_copied_out_of_a_mapping() {
        let file = File::from(file(4096));
        let written = MappedFile::new(&file, 4096, true).unwrap();
        written.store(2, 0x0706_0504_0302_0100);
        let read = MappedFile::new(&file, 4096, false).unwrap();
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
