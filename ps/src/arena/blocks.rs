//! Blocks of equal size, which can be pinned: read by others while the owner goes on.
//!
//! This is one of the few files that may hold `unsafe` code. A block that somebody reads is not
//! lent for writing.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Weak};

use pushpull_common::lending::Geometry;

use super::memory::{Memory, copy_past_cache};
#[cfg(test)]
use super::witness;

/// Where blocks lie in their memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Where the first starts.
    pub(crate) offset: usize,
    /// The bytes of one.
    pub(crate) block_bytes: usize,
    /// From the start of one to the start of the next.
    pub(crate) stride: usize,
    /// How many there are.
    pub(crate) count: usize,
}

impl Grid {
    /// The bytes of memory that the blocks take, with what lies before them.
    pub(crate) fn need(&self) -> u64 {
        (self.stride as u64).saturating_mul(self.count as u64).saturating_add(self.offset as u64)
    }

    /// The same as it is told to whom the blocks are lent, when so many places are held by them.
    pub(crate) fn geometry(&self, places: usize) -> Geometry {
        Geometry {
            offset: self.offset as u64,
            block_bytes: self.block_bytes as u64,
            stride: self.stride as u64,
            // Blocks and places are numbered by 32 bits.
            blocks: self.count as u32,
            places: places as u32,
        }
    }
}

/// Has the memory that something takes fetched into the cache, as it is read soon.
#[inline]
pub(crate) fn fetch<T: ?Sized>(what: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE_BYTES: usize = 64;
        let start = std::ptr::from_ref(what).cast::<i8>();
        let end = start.wrapping_add(size_of_val(what));
        // It need not start where a line does.
        let mut line = start.wrapping_sub(start.addr() % LINE_BYTES);
        while line < end {
            // SAFETY: a prefetch reads nothing, whatever the address. SSE is part of every x86-64
            // processor.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
            line = line.wrapping_add(LINE_BYTES);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = what;
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
    fn start(&self, block: u32) -> usize {
        assert!((block as usize) < self.grid.count, "block {block} of {}", self.grid.count);
        self.grid.offset + block as usize * self.grid.stride
    }

    fn pointer(&self, block: u32) -> *mut u8 {
        // SAFETY: `start` checked the block's number, and the mapping holds them all.
        unsafe { (self.memory.address() as *mut u8).add(self.start(block)) }
    }
}

impl Blocks {
    /// Blocks in this memory.
    ///
    /// # Panics
    /// If the memory is too short for them.
    pub(crate) fn new(memory: Memory, grid: Grid) -> Blocks {
        assert!(grid.need() <= memory.len() as u64 && grid.block_bytes <= grid.stride);
        let pins = (0..grid.count).map(|_| AtomicU32::new(0)).collect();
        Blocks::of(memory, grid, pins)
    }

    /// The same for very many small ones, which are pinned by [`Blocks::pin_crowd`] alone: looking up
    /// the pins of each would cost as much as the block.
    ///
    /// # Panics
    /// If the memory is too short for them.
    pub(crate) fn of_crowds(memory: Memory, grid: Grid) -> Blocks {
        assert!(grid.need() <= memory.len() as u64 && grid.block_bytes <= grid.stride);
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

    #[inline]
    pub(crate) fn read(&self, block: u32) -> &[u8] {
        // SAFETY: `pointer` stays inside the mapping. Writing needs `&mut self`.
        unsafe {
            std::slice::from_raw_parts(self.shared.pointer(block), self.shared.grid.block_bytes)
        }
    }

    /// Has a stretch of a block fetched into the cache, as it is read soon.
    ///
    /// # Panics
    /// If the block has no such stretch.
    #[inline]
    pub(crate) fn fetch(&self, block: u32, within: std::ops::Range<usize>) {
        fetch(&self.read(block)[within]);
    }

    /// The block for writing.
    ///
    /// # Panics
    /// If the block is pinned: the caller takes another block then.
    #[inline]
    pub(crate) fn write(&mut self, block: u32) -> &mut [u8] {
        assert!(!self.is_pinned(block), "block {block} is not written while it is read");
        let bytes = self.shared.grid.block_bytes;
        #[cfg(test)]
        witness::lent(self.shared.memory.address(), self.shared.start(block), bytes);
        // SAFETY: as in `read`. `&mut self` excludes other borrows of this `Blocks`, which is the
        // only one of its mapping; the assertion excludes readers that hold a pin.
        unsafe { std::slice::from_raw_parts_mut(self.shared.pointer(block), bytes) }
    }

    /// Copies bytes into a block past the cache; see [`Memory::stream`].
    ///
    /// # Panics
    /// If the block is pinned, or the bytes do not fit.
    pub(crate) fn stream(&mut self, block: u32, start: usize, source: &[u8]) {
        let bytes = self.shared.grid.block_bytes;
        assert!(!self.is_pinned(block), "block {block} is not written while it is read");
        assert!(start <= bytes && source.len() <= bytes - start, "it fits");
        #[cfg(test)]
        witness::streaming(
            self.shared.memory.address(),
            self.shared.start(block) + start,
            source.len(),
        );
        // SAFETY: as in `write`; the assertion keeps the bytes inside the block. `source` may be
        // another block of this mapping, but not this one, which `&mut self` and the missing pin
        // make ours alone.
        unsafe { copy_past_cache(self.shared.pointer(block).add(start), source) };
    }

    /// Copies a stretch of one block to the same place of another, past the cache; nothing if they
    /// are the same.
    ///
    /// # Panics
    /// If the block to write is pinned, or there is no such stretch.
    pub(crate) fn stream_from(&mut self, from: u32, to: u32, within: std::ops::Range<usize>) {
        if from == to {
            return;
        }
        let pointer = self.shared.pointer(from);
        // SAFETY: as in `read`. The stretch is written to another block, and blocks do not overlap.
        let from = unsafe { std::slice::from_raw_parts(pointer, self.shared.grid.block_bytes) };
        self.stream(to, within.start, &from[within]);
    }

    /// Two blocks, one for reading and one for writing past the cache, and of both this stretch.
    ///
    /// # Panics
    /// If they are the same, the one to write is pinned, or there is no such stretch.
    pub(crate) fn read_and_stream(
        &mut self,
        from: u32,
        to: u32,
        within: std::ops::Range<usize>,
    ) -> (&[u8], &mut [u8]) {
        assert!(from != to && !self.is_pinned(to), "block {to} is not written while it is read");
        let bytes = self.shared.grid.block_bytes;
        #[cfg(test)]
        witness::streaming(
            self.shared.memory.address(),
            self.shared.start(to) + within.start,
            within.len(),
        );
        let (from, to) = (self.shared.pointer(from), self.shared.pointer(to));
        // SAFETY: as in `read` and `write`. The slices are of different blocks, which do not
        // overlap.
        let (from, to) = unsafe {
            (std::slice::from_raw_parts(from, bytes), std::slice::from_raw_parts_mut(to, bytes))
        };
        (&from[within.clone()], &mut to[within])
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

    /// The bytes of one block.
    pub(crate) fn block_bytes(&self) -> usize {
        self.shared.grid.block_bytes
    }

    /// Where a block lies in its file.
    pub(crate) fn offset(&self, block: u32) -> usize {
        self.shared.start(block)
    }

    /// Two blocks, one for reading and one for writing.
    ///
    /// # Panics
    /// If they are the same, or the one to write is pinned.
    pub(crate) fn read_and_write(&mut self, from: u32, to: u32) -> (&[u8], &mut [u8]) {
        assert_ne!(from, to, "a block is not read while it is written");
        let bytes = self.shared.grid.block_bytes;
        let pointer = self.shared.pointer(from);
        // SAFETY: as in `read`. The other slice is of another block, and blocks do not overlap.
        let from = unsafe { std::slice::from_raw_parts(pointer, bytes) };
        let to = self.write(to);
        (from, to)
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
    /// The `index`-th of the pinned blocks.
    pub(crate) fn read(&self, index: usize) -> &[u8] {
        // SAFETY: `pointer` stays inside the mapping. The block is pinned for as long as `self`
        // lives, so it is not lent for writing.
        unsafe {
            std::slice::from_raw_parts(
                self.shared.pointer(self.blocks[index]),
                self.shared.grid.block_bytes,
            )
        }
    }
}

impl Pins {
    /// Lets go of the blocks; the memory in which they were listed, for others.
    pub(crate) fn into_memory(mut self) -> Vec<u32> {
        self.release();
        std::mem::take(&mut self.blocks)
    }

    fn release(&mut self) {
        for block in self.blocks.drain(..) {
            self.shared.pins[block as usize].fetch_sub(1, Ordering::Release);
        }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.release();
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
            unsafe { std::slice::from_raw_parts(self.shared.pointer(block), bytes) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_crowd_are_read_only_while_somebody_has_it() {
        let grid = Grid { offset: 8, block_bytes: 64, stride: 64, count: 70 };
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
        let grid = Grid { offset: 8, block_bytes: 64, stride: 80, count: 2 };
        assert_eq!(grid.need(), 168);
        let mut blocks = Blocks::new(Memory::anonymous(168).unwrap(), grid);
        blocks.write(1).fill(7);
        let pins = blocks.pin(vec![1, 1]);
        blocks.write(0).fill(8);
        blocks.stream(0, 63, &[9]);
        assert_eq!((pins.read(0)[0], blocks.read(0)[62], blocks.read(0)[63]), (7, 8, 9));
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            blocks.write(1);
        }));
        assert!(refused.is_err());
        std::thread::spawn(move || assert_eq!(pins.read(1)[63], 7)).join().unwrap();
        blocks.write(1).fill(9);
    }
}
