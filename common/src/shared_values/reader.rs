//! The reader's side of shared values: pins a version and checks afterwards that the pin was valid.

use super::block_table::{BLOCKS, CLOSED, SEQUENCE, ValueCounts};
use super::reader_slot::ReaderSlot;
use super::{AtomicWords, Geometry};

/// The reason why values cannot be read in place now; the connection still serves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PinError {
    /// A change is in progress. It ends soon, unless the server was killed during it.
    #[error("a change is in progress")]
    Changing,
    /// The block table is closed or the pin was revoked: no further read will succeed.
    #[error("the values are no longer shared")]
    Closed,
    /// The block table names a block that does not exist.
    #[error("logical block {logical} cannot be in block {block}")]
    Unsound {
        /// The logical block.
        logical: u32,
        /// The block number.
        block: u64,
    },
}

/// A reader of a shard's values. It holds at most one pin.
#[derive(Debug)]
pub struct SharedValuesReader<W: AtomicWords> {
    block_table: W,
    reader_slot: ReaderSlot<W>,
    values: W,
    geometry: Geometry,
    owner_generation: u64,
}

impl<W: AtomicWords> SharedValuesReader<W> {
    /// Creates a reader of values that are owned by the process with this owner generation.
    ///
    /// The caller must have checked the geometry, and that the block table has enough words.
    pub fn new(
        block_table: W,
        reader_slot: W,
        values: W,
        geometry: Geometry,
        owner_generation: u64,
    ) -> SharedValuesReader<W> {
        SharedValuesReader {
            block_table,
            reader_slot: ReaderSlot::new(reader_slot),
            values,
            geometry,
            owner_generation,
        }
    }

    /// Returns the values, to be copied from while a pin is held.
    pub fn values(&self) -> &W {
        &self.values
    }

    /// Returns the positions of the blocks in the values.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Tries to pin the current version. Returns its counts and, in `blocks`, the block of each of
    /// the given logical blocks. Costs a fence and one load for each logical block.
    ///
    /// A pin must be released by [`SharedValuesReader::unpin`] or [`SharedValuesReader::give_up`].
    /// If this fails, nothing is pinned and the content of `blocks` is meaningless.
    ///
    /// # Panics
    /// If there is no such logical block.
    pub fn pin(
        &mut self,
        logical_blocks: impl Iterator<Item = u32>,
        blocks: &mut Vec<u32>,
    ) -> Result<ValueCounts, PinError> {
        let sequence = self.block_table.load(SEQUENCE);
        match sequence {
            CLOSED => return Err(PinError::Closed),
            sequence if sequence % 2 == 1 => return Err(PinError::Changing),
            sequence => self.reader_slot.pin(sequence),
        }
        blocks.clear();
        let counts = ValueCounts::load(&self.block_table);
        let mut wrong = None;
        for logical in logical_blocks {
            let block = self.block_table.load(BLOCKS + logical as usize);
            match u32::try_from(block) {
                Ok(block) if block < self.geometry.blocks => blocks.push(block),
                _ => wrong = Some(PinError::Unsound { logical, block }),
            }
        }
        // If the sequence is unchanged, everything loaded is of one version and the pin was visible
        // in time.
        let found = match self.block_table.load(SEQUENCE) {
            now if now == sequence => wrong.map_or(Ok(counts), Err),
            CLOSED => Err(PinError::Closed),
            _ => Err(PinError::Changing),
        };
        if found.is_err() {
            self.reader_slot.unpin();
        }
        found
    }

    /// Releases the pin without having copied anything.
    pub fn give_up(&mut self) {
        self.reader_slot.unpin();
    }

    /// Releases the pin after `bytes` bytes of the values were copied. If this fails, the copy is
    /// of no version and must be discarded.
    pub fn unpin(&mut self, bytes: u64) -> Result<(), PinError> {
        // After the fence, a reader that copied an overwritten byte sees that its pin was revoked.
        self.values.fence();
        let owner_generation = self.values.load(self.geometry.owner_generation_word());
        let is_valid = !self.reader_slot.is_revoked() && owner_generation == self.owner_generation;
        if is_valid {
            self.reader_slot.count(bytes);
        }
        self.reader_slot.unpin();
        is_valid.then_some(()).ok_or(PinError::Closed)
    }
}
