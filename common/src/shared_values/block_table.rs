//! The board: which block holds which place, at which turn, and what it is of.

use super::AtomicWords;

/// Where the words stand. There is room for more of them before the homes.
pub(super) const SEQUENCE: usize = 0;
const VERSION: usize = 1;
const GRADIENTS: usize = 2;
const STEP: usize = 3;
const SERVES: usize = 4;
const EPOCH: usize = 5;
pub(super) const BLOCKS: usize = 16;

/// The turn of a board that is no longer kept: odd, so that nobody reads by it.
pub(super) const OVER: u64 = u64::MAX;

/// How many words a board for so many places has.
pub fn block_table_words(logical_blocks: usize) -> usize {
    BLOCKS + logical_blocks
}

/// What the values on a board are of: what an answer to a pull says of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counts {
    /// How many pushes the shard has applied.
    pub version: u64,
    /// How many of them were gradients.
    pub gradients: u64,
    /// The global step, as far as the shard knows it; in synchronous mode the steps it has applied.
    pub step: u64,
    /// The shard answers pulls of at least this step and less without a wait.
    pub serves: u64,
    /// The restore epoch that it lives in.
    pub epoch: u64,
}

impl Counts {
    const WORDS: [usize; 5] = [VERSION, GRADIENTS, STEP, SERVES, EPOCH];

    fn words(&self) -> impl Iterator<Item = (usize, u64)> + use<> {
        let Counts { version, gradients, step, serves, epoch } = *self;
        Self::WORDS.into_iter().zip([version, gradients, step, serves, epoch])
    }

    pub(super) fn load(block_table: &impl AtomicWords) -> Counts {
        let [version, gradients, step, serves, epoch] =
            Self::WORDS.map(|word| block_table.load(word));
        Counts { version, gradients, step, serves, epoch }
    }
}

/// The board as its shard sees it: what it says is changed by turns.
///
/// Invariant: the word of the turn is `sequence`, or one more while a change is made.
#[derive(Debug)]
pub struct BlockTable<W: AtomicWords> {
    words: W,
    sequence: u64,
    changing: bool,
    counts: Counts,
}

impl<W: AtomicWords> BlockTable<W> {
    /// A board on words that nobody else sees yet, [`block_table_words`] of them: it shows that these
    /// blocks hold the places, one after the other.
    ///
    /// # Panics
    /// If the words are too few.
    pub fn new(words: W, counts: Counts, blocks: impl Iterator<Item = u32>) -> BlockTable<W> {
        for (logical, block) in blocks.enumerate() {
            words.store(BLOCKS + logical, block.into());
        }
        counts.words().for_each(|(word, value)| words.store(word, value));
        let block_table = BlockTable { words, sequence: 2, changing: false, counts };
        block_table.words.store(SEQUENCE, block_table.sequence);
        block_table
    }

    /// The words.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// The number that stands on the board for a place.
    ///
    /// # Panics
    /// If the board has no such place.
    pub fn block(&self, logical: usize) -> u64 {
        self.words.load(BLOCKS + logical)
    }

    /// Whether a change is begun.
    pub fn is_changing(&self) -> bool {
        self.changing
    }

    /// The turn that whoever pins now may pin, or the last there was while a change is made.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// What the board says its values are of.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Begins a change, unless one is begun: nobody who comes from now on reads anything before
    /// [`BlockTable::publish`]. Who has come before is seen on its desk when this returns.
    pub fn begin(&mut self) {
        if !self.changing {
            self.changing = true;
            self.words.store(SEQUENCE, self.sequence + 1);
            self.words.fence();
        }
    }

    /// A block holds a place from the next turn on; a change is begun.
    ///
    /// # Panics
    /// If the board has no such place.
    pub fn set_block(&mut self, logical: usize, block: u32) {
        debug_assert!(self.changing, "a change is begun before homes change");
        self.words.store(BLOCKS + logical, block.into());
    }

    /// Ends the change that was begun, and returns the turn that shows it. Who has come to an earlier
    /// one has been seen on its desk since [`BlockTable::begin`].
    pub fn publish(&mut self, counts: Counts) -> u64 {
        debug_assert!(self.changing, "a change is begun before it is published");
        for ((word, value), (_, old)) in counts.words().zip(self.counts.words()) {
            if value != old {
                self.words.store(word, value);
            }
        }
        self.counts = counts;
        self.sequence += 2;
        self.words.store(SEQUENCE, self.sequence);
        self.changing = false;
        self.sequence
    }
}

impl<W: AtomicWords> Drop for BlockTable<W> {
    /// Nobody reads by a board that is not kept.
    fn drop(&mut self) {
        self.words.store(SEQUENCE, OVER);
        self.words.fence();
    }
}
