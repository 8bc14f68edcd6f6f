//! A reader's side: pins what the board shows, and knows in the end whether that was honoured.

use super::block_table::{BLOCKS, Counts, OVER, SEQUENCE};
use super::reader_slot::ReaderSlot;
use super::{AtomicWords, Geometry};

/// Why nothing can be read directly now; the connection is there for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NotNow {
    /// A change is being made. Soon it will not be, unless the server was killed in the middle of it.
    #[error("a change is being made")]
    Changing,
    /// The board is kept no longer, or the pin was revoked: nothing will be read here any more.
    #[error("the values are no longer shared")]
    Over,
    /// The board names a block that does not exist.
    #[error("place {logical} is said to be held by block {block}")]
    Unsound {
        /// The place.
        logical: u32,
        /// The block.
        block: u64,
    },
}

/// One reader of what a shard lends. It has a pin, or none.
#[derive(Debug)]
pub struct Reader<W: AtomicWords> {
    block_table: W,
    reader_slot: ReaderSlot<W>,
    values: W,
    geometry: Geometry,
    owner_generation: u64,
}

impl<W: AtomicWords> Reader<W> {
    /// A reader of values that lie as the geometry says, in the hands of the process that has this
    /// tenure. The geometry has been checked, and the board has as many words as its places need.
    pub fn new(
        block_table: W,
        reader_slot: W,
        values: W,
        geometry: Geometry,
        owner_generation: u64,
    ) -> Reader<W> {
        Reader {
            block_table,
            reader_slot: ReaderSlot::new(reader_slot),
            values,
            geometry,
            owner_generation,
        }
    }

    /// The values, to be copied from while there is a pin.
    pub fn values(&self) -> &W {
        &self.values
    }

    /// Where blocks lie in them.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Tries to pin what the board shows: says what it is of, and for each of these places the number
    /// of the block that holds it. Costs a fence, and a load for each place.
    ///
    /// What was pinned is to be given back by [`Reader::unpin`]; nothing is if this fails, and then
    /// what stands in `blocks` means nothing.
    ///
    /// # Panics
    /// If there is no such place.
    pub fn pin(
        &mut self,
        logical_blocks: impl Iterator<Item = u32>,
        blocks: &mut Vec<u32>,
    ) -> Result<Counts, NotNow> {
        let sequence = self.block_table.load(SEQUENCE);
        match sequence {
            OVER => return Err(NotNow::Over),
            sequence if sequence % 2 == 1 => return Err(NotNow::Changing),
            sequence => self.reader_slot.pin(sequence),
        }
        blocks.clear();
        let counts = Counts::load(&self.block_table);
        let mut wrong = None;
        for logical in logical_blocks {
            let block = self.block_table.load(BLOCKS + logical as usize);
            match u32::try_from(block) {
                Ok(block) if block < self.geometry.blocks => blocks.push(block),
                _ => wrong = Some(NotNow::Unsound { logical, block }),
            }
        }
        // What was loaded is of one turn, and that its pin was seen in time, if nothing has begun since.
        let found = match self.block_table.load(SEQUENCE) {
            now if now == sequence => wrong.map_or(Ok(counts), Err),
            OVER => Err(NotNow::Over),
            _ => Err(NotNow::Changing),
        };
        if found.is_err() {
            self.reader_slot.unpin();
        }
        found
    }

    /// Gives the pin back without having copied anything.
    pub fn give_up(&mut self) {
        self.reader_slot.unpin();
    }

    /// Gives the pin back, after so many bytes of the values were copied. If it fails, they are of no
    /// version.
    pub fn unpin(&mut self, bytes: u64) -> Result<(), NotNow> {
        // Whoever has copied a byte that was overwritten sees that it was revoked.
        self.values.fence();
        let owner_generation = self.values.load(self.geometry.owner_generation_word());
        let honoured = !self.reader_slot.is_revoked() && owner_generation == self.owner_generation;
        if honoured {
            self.reader_slot.count(bytes);
        }
        self.reader_slot.unpin();
        honoured.then_some(()).ok_or(NotNow::Over)
    }
}
