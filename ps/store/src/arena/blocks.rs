//! Blocks of equal size that readers can pin while the owner keeps writing other blocks.
//!
//! A block can have several parts, one in each region of the memory. A region holds the same part
//! of all blocks, so reading one part block by block is sequential.
//!
//! This is one of the few files that may contain `unsafe` code. A pinned block is never borrowed
//! for writing.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Weak};

use pushpull_common::shared_values::Geometry;

use super::grid::Grid;
use super::memory::{Memory, copy_non_temporal, page_bytes, touched_pages, whole_pages};
use crate::cache::prefetch;
use crate::layout::PAGE_BYTES;
use crate::testing::store_trace;

/// Blocks of equal size, addressed by number.
///
/// A block can be pinned. It is then not writable until all its pins are gone. A holder of a pin
/// reads the block without borrowing the `Blocks`.
#[derive(Debug)]
pub(crate) struct Blocks {
    shared: Arc<SharedBlocks>,
    /// The sets of blocks that are pinned together, one bit per block. A set expires when its
    /// holder drops it.
    pinned_sets: Vec<Weak<[u64]>>,
}

#[derive(Debug)]
struct SharedBlocks {
    memory: Memory,
    grid: Grid,
    /// The number of pins of each block. Empty if blocks are only pinned in sets. Only the owner of
    /// the [`Blocks`] pins; any thread unpins.
    pins: Box<[AtomicU32]>,
}

impl SharedBlocks {
    #[inline]
    fn start(&self, block: u32, part: usize) -> usize {
        let grid = &self.grid;
        assert!((block as usize) < grid.count, "block {block} of {}", grid.count);
        assert!(part < grid.parts, "part {part} of {}", grid.parts);
        grid.offset + part * grid.region + block as usize * grid.stride
    }

    #[inline]
    fn pointer(&self, block: u32, part: usize) -> *mut u8 {
        // SAFETY: `start` checks the block and part numbers, and the mapping contains all blocks
        // and parts.
        unsafe { (self.memory.address() as *mut u8).add(self.start(block, part)) }
    }

    /// Reports to the store trace that a part is borrowed for writing.
    fn trace_write(&self, block: u32, part: usize) {
        store_trace::borrowed(
            self.memory.address(),
            self.start(block, part),
            self.grid.block_bytes,
        );
    }

    /// Reports to the store trace that a range is written with non-temporal stores.
    fn trace_streaming(&self, block: u32, part: usize, within: Range<usize>) {
        let start = self.start(block, part) + within.start;
        store_trace::streaming(self.memory.address(), start, within.len());
    }
}

impl Blocks {
    /// Creates blocks in this memory, with a pin counter for each.
    ///
    /// # Panics
    /// If the memory is too short, or parts of the grid overlap.
    pub(crate) fn new(memory: Memory, grid: Grid) -> Blocks {
        assert!(grid.fits(memory.len()));
        let pins = (0..grid.count).map(|_| AtomicU32::new(0)).collect();
        Blocks::of(memory, grid, pins)
    }

    /// Creates very many small blocks, which only [`Blocks::pin_set`] can pin.
    ///
    /// Checking a pin counter per block would cost as much as reading the block.
    ///
    /// # Panics
    /// If the memory is too short, or parts of the grid overlap.
    pub(crate) fn with_pinned_sets(memory: Memory, grid: Grid) -> Blocks {
        assert!(grid.fits(memory.len()));
        Blocks::of(memory, grid, Box::default())
    }

    fn of(memory: Memory, grid: Grid, pins: Box<[AtomicU32]>) -> Blocks {
        Blocks { shared: Arc::new(SharedBlocks { memory, grid, pins }), pinned_sets: Vec::new() }
    }

    #[inline]
    pub(crate) fn is_pinned(&self, block: u32) -> bool {
        // Pins and pinned sets hold `shared` too. Usually there are none, and the counters need not
        // be checked.
        if Arc::strong_count(&self.shared) == 1 {
            // Dropping `shared` is a release: the reader's loads happen before any later write.
            fence(Ordering::Acquire);
            return false;
        }
        self.has_pin(block)
    }

    fn has_pin(&self, block: u32) -> bool {
        // Acquire: the reader's loads before it unpins happen before any later write.
        let pins = self.shared.pins.get(block as usize);
        pins.is_some_and(|pins| pins.load(Ordering::Acquire) > 0) || self.is_in_pinned_set(block)
    }

    fn is_in_pinned_set(&self, block: u32) -> bool {
        let is_in = |set: &Weak<[u64]>| set.upgrade().is_some_and(|bits| has(&bits, block));
        self.pinned_sets.iter().any(is_in)
    }

    /// Returns whether any pinned set is still held.
    pub(crate) fn has_pinned_sets(&mut self) -> bool {
        self.pinned_sets.retain(|set| set.strong_count() > 0);
        // The loads of the former holders happen before any later write.
        fence(Ordering::Acquire);
        !self.pinned_sets.is_empty()
    }

    /// Pins very many blocks at once, one bit per block, until the result is dropped.
    pub(crate) fn pin_set(&mut self, bits: Vec<u64>) -> PinnedSet {
        let bits: Arc<[u64]> = bits.into();
        self.pinned_sets.push(Arc::downgrade(&bits));
        PinnedSet { shared: self.shared.clone(), bits }
    }

    /// Returns a block, or its first part.
    #[inline]
    pub(crate) fn read(&self, block: u32) -> &[u8] {
        self.read_part(block, 0)
    }

    /// Returns a part of a block.
    #[inline]
    pub(crate) fn read_part(&self, block: u32, part: usize) -> &[u8] {
        let bytes = self.shared.grid.block_bytes;
        // SAFETY: `pointer` stays inside the mapping. Writing requires `&mut self`.
        unsafe { std::slice::from_raw_parts(self.shared.pointer(block, part), bytes) }
    }

    /// Prefetches a byte range of a part into the cache.
    ///
    /// # Panics
    /// If the range is not inside the part.
    #[inline]
    pub(crate) fn prefetch(&self, block: u32, part: usize, within: Range<usize>) {
        prefetch(&self.read_part(block, part)[within]);
    }

    /// Borrows a block, or its first part, for writing.
    ///
    /// # Panics
    /// If the block is pinned. The caller must use another block then.
    #[inline]
    pub(crate) fn write(&mut self, block: u32) -> &mut [u8] {
        self.write_part(block, 0)
    }

    /// Borrows a part of a block for writing.
    ///
    /// # Panics
    /// If the block is pinned. The caller must use another block then.
    #[inline]
    pub(crate) fn write_part(&mut self, block: u32, part: usize) -> &mut [u8] {
        self.assert_not_pinned(block);
        let bytes = self.shared.grid.block_bytes;
        self.shared.trace_write(block, part);
        // SAFETY: as in `read_part`. `&mut self` excludes other borrows of this `Blocks`, which is
        // the only one of its mapping. The assertion excludes readers that hold a pin.
        unsafe { std::slice::from_raw_parts_mut(self.shared.pointer(block, part), bytes) }
    }

    /// Borrows the first `parts` parts of a block for writing; the remaining slices are empty.
    ///
    /// # Panics
    /// If the block is pinned, or has fewer parts.
    #[inline]
    pub(crate) fn write_parts<const N: usize>(
        &mut self,
        block: u32,
        parts: usize,
    ) -> [&mut [u8]; N] {
        self.assert_not_pinned(block);
        let bytes = self.shared.grid.block_bytes;
        std::array::from_fn(|part| {
            if part >= parts {
                return Default::default();
            }
            self.shared.trace_write(block, part);
            // SAFETY: as in `write_part`. The parts of a block do not overlap, and each is borrowed
            // once.
            unsafe { std::slice::from_raw_parts_mut(self.shared.pointer(block, part), bytes) }
        })
    }

    #[inline]
    fn assert_not_pinned(&self, block: u32) {
        assert!(!self.is_pinned(block), "cannot write block {block}: it is pinned");
    }

    /// Copies bytes into a part of a block with non-temporal stores; see [`Memory::stream`].
    ///
    /// # Panics
    /// If the block is pinned, or the bytes do not fit.
    pub(crate) fn stream(&mut self, block: u32, part: usize, start: usize, source: &[u8]) {
        let bytes = self.shared.grid.block_bytes;
        self.assert_not_pinned(block);
        assert!(
            start <= bytes && source.len() <= bytes - start,
            "cannot write at {start}: the part has {bytes} bytes"
        );
        self.shared.trace_streaming(block, part, start..start + source.len());
        // SAFETY: as in `write_part`. The assertion keeps the bytes inside the part. `source` may
        // be another block of this mapping, but not this block: `&mut self` and the absence of pins
        // make this block exclusively ours.
        unsafe { copy_non_temporal(self.shared.pointer(block, part).add(start), source) };
    }

    /// Copies a byte range of a part from one block to the same range of another, with non-temporal
    /// stores. Does nothing if `from == to`.
    ///
    /// # Panics
    /// If the block to write is pinned, or the range is not inside the part.
    pub(crate) fn stream_from(&mut self, from: u32, to: u32, part: usize, within: Range<usize>) {
        if from == to || within.is_empty() {
            return;
        }
        let pointer = self.shared.pointer(from, part);
        // SAFETY: as in `read_part`. The range is written to another block, and blocks do not
        // overlap.
        let from = unsafe { std::slice::from_raw_parts(pointer, self.shared.grid.block_bytes) };
        self.stream(to, part, within.start, &from[within]);
    }

    /// Borrows a byte range of the first `parts` parts of two blocks: `from` for reading and `to`
    /// for non-temporal stores. The remaining slices are empty.
    ///
    /// # Panics
    /// If the blocks are the same, the block to write is pinned, or there is no such range or part.
    pub(crate) fn read_and_stream<const N: usize>(
        &mut self,
        from: u32,
        to: u32,
        parts: usize,
        within: Range<usize>,
    ) -> ([&[u8]; N], [&mut [u8]; N]) {
        assert_ne!(from, to, "cannot read and write the same block");
        self.assert_not_pinned(to);
        let bytes = self.shared.grid.block_bytes;
        assert!(within.start <= within.end && within.end <= bytes, "{within:?} of {bytes}");
        let mut read: [&[u8]; N] = std::array::from_fn(|_| Default::default());
        let mut written: [&mut [u8]; N] = std::array::from_fn(|_| Default::default());
        for part in 0..parts {
            self.shared.trace_streaming(to, part, within.clone());
            let from = self.shared.pointer(from, part);
            let to = self.shared.pointer(to, part);
            // SAFETY: as in `read_part` and `write_part`. The range is inside a part. The slices
            // are of different blocks or different parts, which do not overlap.
            unsafe {
                let from = from.add(within.start);
                let to = to.add(within.start);
                read[part] = std::slice::from_raw_parts(from, within.len());
                written[part] = std::slice::from_raw_parts_mut(to, within.len());
            }
        }
        (read, written)
    }

    /// Returns the geometry to announce to readers in other processes, for `logical_blocks` logical
    /// blocks.
    pub(crate) fn geometry(&self, logical_blocks: usize) -> Geometry {
        self.shared.grid.geometry(logical_blocks)
    }

    /// Returns a descriptor through which another process can map the memory read-only, and its
    /// length in bytes.
    ///
    /// # Errors
    /// If the memory cannot be shared.
    pub(crate) fn read_only_descriptor(&self) -> std::io::Result<(OwnedFd, u64)> {
        let file = self.shared.memory.read_only_descriptor()?;
        Ok((file.into(), self.shared.memory.len() as u64))
    }

    /// Reserves the memory of adjacent blocks; see [`Memory::occupy`].
    pub(crate) fn occupy(&self, blocks: Range<u32>) -> std::io::Result<()> {
        let all = 0..self.parts();
        let mut ranges = all.map(|part| self.range(&blocks, part));
        ranges.try_for_each(|within| self.shared.memory.occupy(within))
    }

    /// Returns the memory of adjacent blocks to the system; see [`Memory::vacate`].
    ///
    /// # Panics
    /// If a block is pinned.
    pub(crate) fn vacate(&mut self, blocks: Range<u32>) -> bool {
        blocks.clone().for_each(|block| self.assert_not_pinned(block));
        (0..self.parts()).map(|part| self.range(&blocks, part)).all(|within| {
            // SAFETY: `range` is inside the mapping. `&mut self` excludes borrows of blocks that
            // are not pinned, and nothing between two blocks is borrowed.
            unsafe { self.shared.memory.vacate_unborrowed(within) }
        })
    }

    /// Returns whether a file surely has memory for all blocks except these runs of adjacent blocks,
    /// in ascending order, which were vacated; see [`Memory::are_occupied`].
    pub(crate) fn are_occupied_but(&self, vacated: &[Range<u32>]) -> bool {
        let starts = std::iter::once(0).chain(vacated.iter().map(|run| run.end));
        let ends = vacated.iter().map(|run| run.start).chain([self.count()]);
        let others = starts.zip(ends).map(|(start, end)| start..end);
        let of_part = |part| {
            let ranges = others.clone().map(move |run| touched_pages(self.range(&run, part)).len());
            ranges.sum::<usize>()
        };
        let needed = PAGE_BYTES + (0..self.parts()).map(of_part).sum::<usize>();
        let ranges = self.parts() * (vacated.len() + 1);
        let of_a_block = whole_pages(self.range(&(0..1), 0), page_bytes()).len();
        self.shared.memory.are_occupied(needed, ranges, of_a_block)
    }

    /// Returns the position of a part of adjacent blocks in the memory.
    fn range(&self, blocks: &Range<u32>, part: usize) -> Range<usize> {
        let Some(last) = blocks.end.checked_sub(1).filter(|&last| last >= blocks.start) else {
            return 0..0;
        };
        let end = self.shared.start(last, part) + self.shared.grid.block_bytes;
        self.shared.start(blocks.start, part)..end
    }

    /// Returns the bytes of memory of each block.
    pub(crate) fn bytes_of_each(&self) -> u64 {
        (self.shared.grid.stride * self.parts()) as u64
    }

    /// Returns a word of the memory that is not part of any block.
    ///
    /// # Panics
    /// If the index is out of range.
    pub(crate) fn word(&self, word: usize) -> u64 {
        self.shared.memory.load(word)
    }

    /// Returns the number of blocks.
    pub(crate) fn count(&self) -> u32 {
        self.shared.grid.count as u32
    }

    /// Returns the number of parts of each block.
    pub(crate) fn parts(&self) -> usize {
        self.shared.grid.parts
    }

    /// Returns the byte offset of a block, or of its first part, in its file.
    pub(crate) fn offset(&self, block: u32) -> usize {
        self.shared.start(block, 0)
    }

    /// Copies a block to another block.
    ///
    /// # Panics
    /// If the blocks are the same, or the block to write is pinned.
    pub(crate) fn copy(&mut self, from: u32, to: u32) {
        assert_ne!(from, to, "cannot read and write the same block");
        let bytes = self.shared.grid.block_bytes;
        for part in 0..self.parts() {
            let pointer = self.shared.pointer(from, part);
            // SAFETY: as in `read_part`. The destination is another block, and blocks do not
            // overlap.
            let from = unsafe { std::slice::from_raw_parts(pointer, bytes) };
            self.write_part(to, part).copy_from_slice(from);
        }
    }

    /// Pins blocks until the result is dropped.
    pub(crate) fn pin(&self, blocks: Vec<u32>) -> Pins {
        for &block in &blocks {
            self.shared.pins[block as usize].fetch_add(1, Ordering::Relaxed);
        }
        Pins { shared: self.shared.clone(), blocks }
    }
}

/// Pinned blocks, readable on any thread until this is dropped.
#[derive(Debug)]
pub(crate) struct Pins {
    shared: Arc<SharedBlocks>,
    blocks: Vec<u32>,
}

impl Pins {
    /// Returns the `index`-th pinned block, or its first part.
    pub(crate) fn read(&self, index: usize) -> &[u8] {
        self.read_part(index, 0)
    }

    /// Returns a part of the `index`-th pinned block.
    pub(crate) fn read_part(&self, index: usize, part: usize) -> &[u8] {
        let bytes = self.shared.grid.block_bytes;
        // SAFETY: `pointer` stays inside the mapping. The block is pinned while `self` lives, so it
        // is never borrowed for writing.
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

/// A set of blocks pinned together, readable on any thread until this is dropped.
#[derive(Debug)]
pub(crate) struct PinnedSet {
    shared: Arc<SharedBlocks>,
    bits: Arc<[u64]>,
}

fn has(bits: &[u64], block: u32) -> bool {
    bits.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
}

impl PinnedSet {
    /// Returns the pinned blocks in ascending order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &[u8]> {
        let numbers = 0..self.shared.grid.count as u32;
        numbers.filter(|&block| has(&self.bits, block)).map(|block| {
            let bytes = self.shared.grid.block_bytes;
            // SAFETY: `pointer` stays inside the mapping. The block is pinned while `self` lives,
            // so it is never borrowed for writing.
            unsafe { std::slice::from_raw_parts(self.shared.pointer(block, 0), bytes) }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    #[test]
    fn blocks_of_a_pinned_set_are_read_only_while_it_is_held() {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 64, count: 70, parts: 1, region: 0 };
        let mut blocks = Blocks::with_pinned_sets(Memory::anonymous(8 + 70 * 64).unwrap(), grid);
        (0..70).for_each(|block| blocks.write(block).fill(block as u8));
        let set = blocks.pin_set(vec![1 << 3, 1 << 5]);
        assert!(blocks.is_pinned(3) && blocks.is_pinned(69) && !blocks.is_pinned(5));
        blocks.write(5).fill(0);
        let read = std::thread::spawn(move || set.blocks().map(|b| b[63]).collect::<Vec<_>>());
        assert_eq!(read.join().unwrap(), [3, 69]);
        assert!(!blocks.is_pinned(3) && !blocks.has_pinned_sets());
        let one = blocks.pin_set(vec![1]);
        let other = blocks.pin_set(vec![2]);
        drop(one);
        assert!(!blocks.is_pinned(0) && blocks.is_pinned(1) && blocks.has_pinned_sets());
        drop(other);
        assert!(!blocks.has_pinned_sets());
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
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            blocks.write(1);
        }));
        assert!(result.is_err());
        std::thread::spawn(move || assert_eq!(pins.read(1)[63], 7)).join().unwrap();
        blocks.write(1).fill(9);
    }

    /// Two blocks of three parts each, with gaps between blocks and between regions.
    fn parted() -> Blocks {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 72, count: 2, parts: 3, region: 160 };
        assert_eq!(grid.need(), 8 + 2 * 160 + 144);
        Blocks::new(Memory::anonymous(8 + 2 * 160 + 144).unwrap(), grid)
    }

    #[test]
    fn a_region_holds_the_same_part_of_all_blocks() {
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
    fn a_copy_moves_each_part_to_the_same_part() {
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
    fn a_block_without_memory_is_noticed() {
        const BLOCK: usize = 64 << 10;
        let file = tempfile::tempfile().unwrap();
        file.set_len((PAGE_BYTES + 8 * BLOCK) as u64).unwrap();
        let offset = PAGE_BYTES;
        let grid =
            Grid { offset, block_bytes: BLOCK, stride: BLOCK, count: 8, parts: 1, region: 0 };
        let memory = Memory::of_file(file).unwrap();
        memory.occupy(0..PAGE_BYTES).unwrap();
        let mut blocks = Blocks::new(memory, grid);
        let (first, middle, last) = (2..4, 6..7, 7..8);
        assert!(!blocks.are_occupied_but(&[]));
        blocks.occupy(0..7).unwrap();
        assert!(!blocks.are_occupied_but(&[]) && blocks.are_occupied_but(from_ref(&last)));
        blocks.occupy(last).unwrap();
        assert!(blocks.are_occupied_but(&[]));
        if !(blocks.vacate(first.clone()) && blocks.vacate(middle.clone())) {
            println!("skipped: the file system of temporary files makes no holes");
            return;
        }
        assert!(blocks.are_occupied_but(&[first.clone(), middle.clone()]));
        assert!(
            !blocks.are_occupied_but(from_ref(&first))
                && !blocks.are_occupied_but(from_ref(&middle))
        );
        blocks.occupy(middle).unwrap();
        assert!(blocks.are_occupied_but(from_ref(&first)) && !blocks.are_occupied_but(&[]));
    }

    #[test]
    fn overlapping_parts_are_rejected() {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 72, count: 2, parts: 3, region: 136 };
        let memory = Memory::anonymous(1024).unwrap();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Blocks::new(memory, grid);
        }));
        assert!(result.is_err());
    }
}
