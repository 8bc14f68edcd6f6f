//! Values that workers of the same host read where a shard keeps them, without a thread of the shard:
//! what both sides store and load, and in which order.
//!
//! Three memories are mapped on both sides. In the *values* lie the blocks, which only the shard writes.
//! On the *board*, which only the shard writes, stands which block holds which place, and of which
//! version that is. On the *desk*, one for each connection, a reader says what it reads, so that it
//! is not overwritten meanwhile.
//!
//! The board has a *turn*. It is even and rises with every change of what the board shows; it is odd
//! while a change is made. A reader
//!
//! 1. loads the turn, and goes away if it is odd;
//! 2. *pins* it: stores it on its desk, and has that seen before it goes on ([`AtomicWords::fence`]);
//! 3. loads from the board what it needs, and then the turn again. If that is another, it unpins and
//!    begins anew. If not, all it has loaded is of one version, and the shard knows of the pin;
//! 4. copies from the blocks;
//! 5. asks whether its pin was honoured to the end: whether it was *revoked*, as a reader is that
//!    has held updates up for too long, and whether the values are in the hands of the same
//!    process still ([`Geometry::owner_generation_word`]). If so, unpins and has what it came for. If not,
//!    it throws away what it has copied.
//!
//! The shard, when it has committed a change, makes the turn odd, has that seen, stores what has
//! changed, makes the turn even, and only then looks at the pins: a block that held a place from
//! the turn `born` on and does not since the turn `freed` is written again when no pin
//! [`holds`] it. Whoever pins too late for that look finds another turn in step 3. What is changed
//! where it lies is changed while the turn is odd, and only if there is no pin at all once that is
//! seen.
//!
//! So neither side waits for the other, and neither can harm the other: a reader that stores whatever
//! it likes on its desk holds memory for changes until it is revoked, and a shard that dies in the
//! middle of a change leaves an odd turn, which sends readers back to their connection.

mod block_table;
mod geometry;
mod reader;
mod reader_slot;

pub use block_table::{BlockTable, Counts, block_table_words};
pub use geometry::{Geometry, Unsound};
pub use reader::{NotNow, Reader};
pub use reader_slot::{READER_SLOT_WORDS, ReaderSlot, holds};

/// Memory that another process has mapped, too, as words of 8 bytes. All are little-endian.
pub trait AtomicWords {
    /// A word, by its number. What its storer had stored before it is seen by all loads behind this.
    ///
    /// # Panics
    /// If there is no such word.
    fn load(&self, word: usize) -> u64;

    /// Stores a word in one piece, behind all that was stored before.
    ///
    /// # Panics
    /// If there is no such word.
    fn store(&self, word: usize, value: u64);

    /// What was stored and read before is seen, and done, before anything behind this is loaded or
    /// stored: a sequentially consistent fence.
    fn fence(&self);
}
