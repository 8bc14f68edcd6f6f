//! Shared values: a shard's values that workers of the same host read in place, under a seqlock.
//!
//! A read needs no thread of the shard. This module defines what both sides load and store, and in
//! which order. Both sides map three memories:
//!
//! - The *values* hold the blocks. Only the shard writes them.
//! - The *block table* says which block holds which logical block, and the version of the values.
//!   Only the shard writes it.
//! - A *reader slot*, one for each connection, holds the reader's pin. A pinned block is not
//!   overwritten.
//!
//! The block table has a *sequence*. It is even and rises with every change of the table; it is odd
//! while a change is in progress. A reader
//!
//! 1. loads the sequence, and stops if it is odd;
//! 2. *pins* it: stores it in its reader slot, followed by a fence ([`AtomicWords::fence`]);
//! 3. loads what it needs from the block table, then the sequence again. If the sequence differs,
//!    the reader unpins and starts again. Otherwise everything it loaded is of one version, and the
//!    shard sees the pin;
//! 4. copies from the blocks;
//! 5. checks that its pin was valid to the end. The pin must not have been *revoked*, which happens
//!    to a reader that delays updates for too long. The same process must still own the values
//!    ([`Geometry::owner_generation_word`]). The reader then unpins. If a check failed, it discards
//!    its copy.
//!
//! After the shard has committed a change, it makes the sequence odd, followed by a fence. It
//! stores the changes, makes the sequence even, and only then scans the pins. A block held a
//! logical block from sequence `born` until sequence `freed`. The shard overwrites it only when no
//! pin [`holds`] it. A reader that pins too late for that scan finds another sequence in step 3.
//! Values that are changed in place are changed while the sequence is odd, and only if no pin is
//! visible after the fence.
//!
//! Neither side waits for the other, and neither can harm the other. A reader that stores arbitrary
//! words in its slot holds memory until it is revoked. A shard that dies during a change leaves an
//! odd sequence, and readers go back to their connection.

mod block_table;
mod geometry;
mod reader;
mod reader_slot;

pub use block_table::{BlockTable, ValueCounts, block_table_words};
pub use geometry::{Geometry, InvalidGeometry};
pub use reader::{PinError, SharedValuesReader};
pub use reader_slot::{READER_SLOT_WORDS, ReaderSlot, holds};

/// Memory that another process has mapped too, as 8-byte little-endian words.
pub trait AtomicWords {
    /// Loads a word with acquire ordering: stores that precede the loaded store are visible
    /// afterwards.
    ///
    /// # Panics
    /// If there is no such word.
    fn load(&self, word: usize) -> u64;

    /// Stores a word atomically with release ordering, after all earlier stores.
    ///
    /// # Panics
    /// If there is no such word.
    fn store(&self, word: usize, value: u64);

    /// Orders all earlier loads and stores before all later ones: a sequentially consistent fence.
    fn fence(&self);
}
