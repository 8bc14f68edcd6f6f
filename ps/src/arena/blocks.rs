//! Blocks of equal size, which can be pinned: read by others while the owner goes on.
//!
//! A block may have parts, which lie in regions of their own: what is read block by block then lies one
//! behind the other for each part.
//!
//! This is one of the few files that may hold `unsafe` code. A block that somebody reads is not
//! lent for writing.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Weak};

use pushpull_common::shared_values::Geometry;

use super::memory::{Memory, copy_past_cache};
#[cfg(test)]
use super::store_trace;
use crate::cache::fetch;

/// Where blocks lie in their memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Where the first starts.
    pub(crate) offset: usize,
    /// The bytes of one, or of each part of one.
    pub(crate) block_bytes: usize,
    /// From the start of one to the start of the next.
    pub(crate) stride: usize,
    /// How many there are.
    pub(crate) count: usize,
    /// How many parts each has: 1, unless it is of several streams.
    pub(crate) parts: usize,
    /// From a part of a block to the next part of it: the region of a part holds that part of all
    /// blocks.
    pub(crate) region: usize,
}

impl Grid {
    /// The bytes of memory that the blocks take, with what lies before them.
    pub(crate) fn need(&self) -> u64 {
        let before = (self.region as u64).saturating_mul(self.parts.saturating_sub(1) as u64);
        let last = (self.stride as u64).saturating_mul(self.count as u64);
        before.saturating_add(last).saturating_add(self.offset as u64)
    }

    /// Whether so many bytes hold the blocks, none of whose parts lies in another.
    fn fits(&self, bytes: usize) -> bool {
        let apart = self.parts <= 1 || self.stride.saturating_mul(self.count) <= self.region;
        self.need() <= bytes as u64 && self.block_bytes <= self.stride && apart
    }

    /// The same as it is told to whom the blocks are lent, when so many places are held by them.
    pub(crate) fn geometry(&self, places: usize) -> Geometry {
        Geometry {
            offset: self.offset as u64,
            block_bytes: self.block_bytes as u64,
            stride: self.stride as u64,
            // Blocks and places are numbered by 32 bits.
            blocks: self.count as u32,
            logical_blocks: places as u32,
        }
    }
}

/// Blocks of equal size, lent by number. A block can be pinned: then it is not lent for writing
/// until every pin on it is gone, and who holds a pin reads it without borrowing this.
#[derive(Debug)]
pub(crate) struct Blocks {
    shared: Arc<Shared>,
    /// Those that are pinned together, a bit for each, for as long as somebody holds the pins.
    crowds: Vec<Weak<[u64]>>,
}

#[derive(Debug)]
struct Shared {
    memory: Memory,
    grid: Grid,
    /// How many pins each block has; none if they are pinned as crowds only. Only the owner of the
    /// [`Blocks`] pins; anybody unpins.
    pins: Box<[AtomicU32]>,
}

impl Shared {
    #[inline]
    fn start(&self, block: u32, part: usize) -> usize {
        let grid = &self.grid;
        assert!((block as usize) < grid.count, "block {block} of {}", grid.count);
        assert!(part < grid.parts, "part {part} of {}", grid.parts);
        grid.offset + part * grid.region + block as usize * grid.stride
    }

    #[inline]
    fn pointer(&self, block: u32, part: usize) -> *mut u8 {
        // SAFETY: `start` checked the numbers of the block and the part, and the mapping holds them
        // all.
        unsafe { (self.memory.address() as *mut u8).add(self.start(block, part)) }
    }

    /// Tells the witness of a test of a stretch that is lent.
    #[cfg(test)]
    fn tell_shared(&self, block: u32, part: usize) {
        store_trace::shared(self.memory.address(), self.start(block, part), self.grid.block_bytes);
    }

    /// The same of one that is written past the cache.
    #[cfg(test)]
    fn tell_streaming(&self, block: u32, part: usize, within: Range<usize>) {
        let start = self.start(block, part) + within.start;
        store_trace::streaming(self.memory.address(), start, within.len());
    }
}

impl Blocks {
    /// Blocks in this memory.
    ///
    /// # Panics
    /// If the memory is too short for them.
    pub(crate) fn new(memory: Memory, grid: Grid) -> Blocks {
        assert!(grid.fits(memory.len()));
        let pins = (0..grid.count).map(|_| AtomicU32::new(0)).collect();
        Blocks::of(memory, grid, pins)
    }

    /// The same for very many small ones, which are pinned by [`Blocks::pin_crowd`] alone: looking up
    /// the pins of each would cost as much as the block.
    ///
    /// # Panics
    /// If the memory is too short for them.
    pub(crate) fn of_crowds(memory: Memory, grid: Grid) -> Blocks {
        assert!(grid.fits(memory.len()));
        Blocks::of(memory, grid, Box::default())
    }

    fn of(memory: Memory, grid: Grid, pins: Box<[AtomicU32]>) -> Blocks {
        Blocks { shared: Arc::new(Shared { memory, grid, pins }), crowds: Vec::new() }
    }

    #[inline]
    pub(crate) fn is_pinned(&self, block: u32) -> bool {
        // A pin or a crowd holds `shared`, too. Mostly there is none, and then those of this block need
        // not be looked up.
        if Arc::strong_count(&self.shared) == 1 {
            // Letting `shared` go is a release: what was read before is not overwritten before.
            fence(Ordering::Acquire);
            return false;
        }
        self.has_a_pin(block)
    }

    fn has_a_pin(&self, block: u32) -> bool {
        // Acquire: what the reader read before it let go is not overwritten before.
        let pins = self.shared.pins.get(block as usize);
        pins.is_some_and(|pins| pins.load(Ordering::Acquire) > 0) || self.is_in_a_crowd(block)
    }

    fn is_in_a_crowd(&self, block: u32) -> bool {
        let is_in = |crowd: &Weak<[u64]>| crowd.upgrade().is_some_and(|bits| has(&bits, block));
        self.crowds.iter().any(is_in)
    }

    /// Whether somebody still holds blocks that were pinned together.
    pub(crate) fn has_crowds(&mut self) -> bool {
        self.crowds.retain(|crowd| crowd.strong_count() > 0);
        // What the readers read before they let go is not overwritten before.
        fence(Ordering::Acquire);
        !self.crowds.is_empty()
    }

    /// Pins very many blocks at once, a bit for each, until the result is dropped.
    pub(crate) fn pin_crowd(&mut self, bits: Vec<u64>) -> Crowd {
        let bits: Arc<[u64]> = bits.into();
        self.crowds.push(Arc::downgrade(&bits));
        Crowd { shared: self.shared.clone(), bits }
    }

    /// A block, or the first part of it.
    #[inline]
    pub(crate) fn read(&self, block: u32) -> &[u8] {
        self.read_part(block, 0)
    }

    /// A part of a block.
    #[inline]
    pub(crate) fn read_part(&self, block: u32, part: usize) -> &[u8] {
        let bytes = self.shared.grid.block_bytes;
        // SAFETY: `pointer` stays inside the mapping. Writing needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.shared.pointer(block, part), bytes) }
    }

    /// Has a stretch of a part of a block fetched into the cache, as it is read soon.
    ///
    /// # Panics
    /// If the block has no such stretch.
    #[inline]
    pub(crate) fn fetch(&self, block: u32, part: usize, within: Range<usize>) {
        fetch(&self.read_part(block, part)[within]);
    }

    /// The block, or the first part of it, for writing.
    ///
    /// # Panics
    /// If the block is pinned: the caller takes another block then.
    #[inline]
    pub(crate) fn write(&mut self, block: u32) -> &mut [u8] {
        self.write_part(block, 0)
    }

    /// A part of a block for writing.
    ///
    /// # Panics
    /// If the block is pinned: the caller takes another block then.
    #[inline]
    pub(crate) fn write_part(&mut self, block: u32, part: usize) -> &mut [u8] {
        self.assert_unread(block);
        let bytes = self.shared.grid.block_bytes;
        #[cfg(test)]
        self.shared.tell_shared(block, part);
        // SAFETY: as in `read_part`. `&mut self` excludes other borrows of this `Blocks`, which is the
        // only one of its mapping; the assertion excludes readers that hold a pin.
        unsafe { std::slice::from_raw_parts_mut(self.shared.pointer(block, part), bytes) }
    }

    /// The first parts of a block for writing, so many of them, and nothing behind them.
    ///
    /// # Panics
    /// If the block is pinned, or has fewer parts.
    #[inline]
    pub(crate) fn write_parts<const N: usize>(
        &mut self,
        block: u32,
        parts: usize,
    ) -> [&mut [u8]; N] {
        self.assert_unread(block);
        let bytes = self.shared.grid.block_bytes;
        std::array::from_fn(|part| {
            if part >= parts {
                return Default::default();
            }
            #[cfg(test)]
            self.shared.tell_shared(block, part);
            // SAFETY: as in `write_part`; the parts of a block do not overlap, and each is lent once.
            unsafe { std::slice::from_raw_parts_mut(self.shared.pointer(block, part), bytes) }
        })
    }

    #[inline]
    fn assert_unread(&self, block: u32) {
        assert!(!self.is_pinned(block), "block {block} is not written while it is read");
    }

    /// Copies bytes into a part of a block past the cache; see [`Memory::stream`].
    ///
    /// # Panics
    /// If the block is pinned, or the bytes do not fit.
    pub(crate) fn stream(&mut self, block: u32, part: usize, start: usize, source: &[u8]) {
        let bytes = self.shared.grid.block_bytes;
        self.assert_unread(block);
        assert!(start <= bytes && source.len() <= bytes - start, "it fits");
        #[cfg(test)]
        self.shared.tell_streaming(block, part, start..start + source.len());
        // SAFETY: as in `write_part`; the assertion keeps the bytes inside the part. `source` may be
        // of another block of this mapping, but not of this one, which `&mut self` and the missing
        // pin make ours alone.
        unsafe { copy_past_cache(self.shared.pointer(block, part).add(start), source) };
    }

    /// Copies a stretch of a part of one block to the same place of another, past the cache; nothing if
    /// they are the same.
    ///
    /// # Panics
    /// If the block to write is pinned, or there is no such stretch.
    pub(crate) fn stream_from(&mut self, from: u32, to: u32, part: usize, within: Range<usize>) {
        if from == to || within.is_empty() {
            return;
        }
        let pointer = self.shared.pointer(from, part);
        // SAFETY: as in `read_part`. The stretch is written to another block, and blocks do not
        // overlap.
        let from = unsafe { std::slice::from_raw_parts(pointer, self.shared.grid.block_bytes) };
        self.stream(to, part, within.start, &from[within]);
    }

    /// Of the first parts of two blocks, so many of them, this stretch: one block is for reading and one
    /// for writing past the cache. Behind those there is nothing.
    ///
    /// # Panics
    /// If they are the same, the one to write is pinned, or there is no such stretch or part.
    pub(crate) fn read_and_stream<const N: usize>(
        &mut self,
        from: u32,
        to: u32,
        parts: usize,
        within: Range<usize>,
    ) -> ([&[u8]; N], [&mut [u8]; N]) {
        assert_ne!(from, to, "a block is not read while it is written");
        self.assert_unread(to);
        let bytes = self.shared.grid.block_bytes;
        assert!(within.start <= within.end && within.end <= bytes, "{within:?} of {bytes}");
        let (mut read, mut written): ([&[u8]; N], [&mut [u8]; N]) = (
            std::array::from_fn(|_| Default::default()),
            std::array::from_fn(|_| Default::default()),
        );
        for part in 0..parts {
            #[cfg(test)]
            self.shared.tell_streaming(to, part, within.clone());
            let (from, to) = (self.shared.pointer(from, part), self.shared.pointer(to, part));
            // SAFETY: as in `read_part` and `write_part`; the stretch lies within a part. The slices
            // are of different blocks or different parts, which do not overlap.
            unsafe {
                let (from, to) = (from.add(within.start), to.add(within.start));
                read[part] = std::slice::from_raw_parts(from, within.len());
                written[part] = std::slice::from_raw_parts_mut(to, within.len());
            }
        }
        (read, written)
    }

    /// Where they lie, as it is told to whom they are lent, when so many places are held by them.
    pub(crate) fn geometry(&self, places: usize) -> Geometry {
        self.shared.grid.geometry(places)
    }

    /// A descriptor by which another process can map their memory, to read it and no more, and how
    /// many bytes it has; an error where memory cannot be lent.
    pub(crate) fn to_read(&self) -> std::io::Result<(OwnedFd, u64)> {
        let file = self.shared.memory.to_read()?;
        Ok((file.into(), self.shared.memory.len() as u64))
    }

    /// A word of their memory, which lies in no block.
    ///
    /// # Panics
    /// If there is no such word.
    pub(crate) fn word(&self, word: usize) -> u64 {
        self.shared.memory.load(word)
    }

    /// How many parts each has.
    pub(crate) fn parts(&self) -> usize {
        self.shared.grid.parts
    }

    /// Where a block, or the first part of it, lies in its file.
    pub(crate) fn offset(&self, block: u32) -> usize {
        self.shared.start(block, 0)
    }

    /// Has a block hold what another does.
    ///
    /// # Panics
    /// If they are the same, or the one to write is pinned.
    pub(crate) fn copy(&mut self, from: u32, to: u32) {
        assert_ne!(from, to, "a block is not read while it is written");
        let bytes = self.shared.grid.block_bytes;
        for part in 0..self.parts() {
            let pointer = self.shared.pointer(from, part);
            // SAFETY: as in `read_part`. What is written is another block, and blocks do not overlap.
            let from = unsafe { std::slice::from_raw_parts(pointer, bytes) };
            self.write_part(to, part).copy_from_slice(from);
        }
    }

    /// Pins the blocks until the result is dropped.
    pub(crate) fn pin(&self, blocks: Vec<u32>) -> Pins {
        for &block in &blocks {
            self.shared.pins[block as usize].fetch_add(1, Ordering::Relaxed);
        }
        Pins { shared: self.shared.clone(), blocks }
    }
}

/// Pinned blocks, readable until this is dropped, on any thread.
#[derive(Debug)]
pub(crate) struct Pins {
    shared: Arc<Shared>,
    blocks: Vec<u32>,
}

impl Pins {
    /// The `index`-th of the pinned blocks, or the first part of it.
    pub(crate) fn read(&self, index: usize) -> &[u8] {
        self.read_part(index, 0)
    }

    /// A part of the `index`-th of the pinned blocks.
    pub(crate) fn read_part(&self, index: usize, part: usize) -> &[u8] {
        let bytes = self.shared.grid.block_bytes;
        // SAFETY: `pointer` stays inside the mapping. The block is pinned for as long as `self`
        // lives, so it is not lent for writing.
        unsafe { std::slice::from_raw_parts(self.shared.pointer(self.blocks[index], part), bytes) }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        for &block in &self.blocks {
            self.shared.pins[block as usize].fetch_sub(1, Ordering::Release);
        }
    }
}

/// Blocks that are pinned together, readable until this is dropped, on any thread.
#[derive(Debug)]
pub(crate) struct Crowd {
    shared: Arc<Shared>,
    bits: Arc<[u64]>,
}

fn has(bits: &[u64], block: u32) -> bool {
    bits.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
}

impl Crowd {
    /// The pinned blocks, in their order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &[u8]> {
        let numbers = 0..self.shared.grid.count as u32;
        numbers.filter(|&block| has(&self.bits, block)).map(|block| {
            let bytes = self.shared.grid.block_bytes;
            // SAFETY: `pointer` stays inside the mapping. The block is pinned for as long as `self`
            // lives, so it is not lent for writing.
            unsafe { std::slice::from_raw_parts(self.shared.pointer(block, 0), bytes) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_crowd_are_read_only_while_somebody_has_it() {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 64, count: 70, parts: 1, region: 0 };
        let mut blocks = Blocks::of_crowds(Memory::anonymous(8 + 70 * 64).unwrap(), grid);
        (0..70).for_each(|block| blocks.write(block).fill(block as u8));
        let crowd = blocks.pin_crowd(vec![1 << 3, 1 << 5]);
        assert!(blocks.is_pinned(3) && blocks.is_pinned(69) && !blocks.is_pinned(5));
        blocks.write(5).fill(0);
        let read = std::thread::spawn(move || crowd.blocks().map(|b| b[63]).collect::<Vec<_>>());
        assert_eq!(read.join().unwrap(), [3, 69]);
        assert!(!blocks.is_pinned(3) && !blocks.has_crowds());
        let (one, other) = (blocks.pin_crowd(vec![1]), blocks.pin_crowd(vec![2]));
        drop(one);
        assert!(!blocks.is_pinned(0) && blocks.is_pinned(1) && blocks.has_crowds());
        drop(other);
        assert!(!blocks.has_crowds());
    }

    #[test]
    fn a_pinned_block_is_read_only() {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 80, count: 2, parts: 1, region: 0 };
        assert_eq!(grid.need(), 168);
        let mut blocks = Blocks::new(Memory::anonymous(168).unwrap(), grid);
        blocks.write(1).fill(7);
        let pins = blocks.pin(vec![1, 1]);
        blocks.write(0).fill(8);
        blocks.stream(0, 0, 63, &[9]);
        assert_eq!((pins.read(0)[0], blocks.read(0)[62], blocks.read(0)[63]), (7, 8, 9));
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            blocks.write(1);
        }));
        assert!(refused.is_err());
        std::thread::spawn(move || assert_eq!(pins.read(1)[63], 7)).join().unwrap();
        blocks.write(1).fill(9);
    }

    /// Two blocks of three parts, with gaps, in regions that are apart.
    fn parted() -> Blocks {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 72, count: 2, parts: 3, region: 160 };
        assert_eq!(grid.need(), 8 + 2 * 160 + 144);
        Blocks::new(Memory::anonymous(8 + 2 * 160 + 144).unwrap(), grid)
    }

    #[test]
    fn parts_of_a_kind_lie_one_behind_the_other() {
        let mut blocks = parted();
        for (block, part) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
            blocks.write_part(block, part).fill(10 * block as u8 + part as u8 + 1);
        }
        let memory = blocks.shared.memory.bytes();
        for (start, expected) in [(8, 1), (80, 11), (168, 2), (240, 12), (328, 3), (400, 13)] {
            assert_eq!(memory[start..start + 64], [expected; 64], "at {start}");
        }
        assert_eq!(memory.iter().filter(|&&byte| byte == 0).count(), memory.len() - 6 * 64);
        let pins = blocks.pin(vec![1]);
        assert_eq!((pins.read(0)[63], pins.read_part(0, 2)[0]), (11, 13));
        assert_eq!((blocks.read(0)[0], blocks.read_part(0, 2)[63]), (1, 3));
    }

    #[test]
    fn each_part_of_a_block_goes_to_the_same_part_of_another() {
        let mut blocks = parted();
        for (part, bytes) in blocks.write_parts::<4>(0, 3).into_iter().enumerate() {
            assert_eq!(bytes.len(), if part < 3 { 64 } else { 0 });
            bytes.fill(part as u8 + 1);
        }
        blocks.copy(0, 1);
        let parts = |blocks: &Blocks, block| {
            [0, 1, 2].map(|part| blocks.read_part(block, part)[..].to_vec())
        };
        assert_eq!(parts(&blocks, 1), [1, 2, 3].map(|byte| vec![byte; 64]));
        let (read, written) = blocks.read_and_stream::<4>(1, 0, 2, 8..24);
        assert_eq!((read[1], read[2].len(), written[2].len()), (&[2; 16][..], 0, 0));
        written[1].fill(9);
        blocks.stream_from(0, 1, 1, 20..32);
        let mut expected = vec![2; 64];
        expected[20..24].fill(9);
        assert_eq!(parts(&blocks, 1), [vec![1; 64], expected, vec![3; 64]]);
    }

    #[test]
    fn parts_that_overlap_are_no_grid() {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 72, count: 2, parts: 3, region: 136 };
        let memory = Memory::anonymous(1024).unwrap();
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Blocks::new(memory, grid);
        }));
        assert!(made.is_err());
    }
}
