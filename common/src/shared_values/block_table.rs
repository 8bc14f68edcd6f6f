//! The block table: the block of each logical block, the sequence, and the counts of the values.

use super::AtomicWords;

/// Word indices. Words between `EPOCH` and `BLOCKS` are reserved.
pub(super) const SEQUENCE: usize = 0;
const VERSION: usize = 1;
const GRADIENTS: usize = 2;
const STEP: usize = 3;
const SERVES: usize = 4;
const EPOCH: usize = 5;
pub(super) const BLOCKS: usize = 16;

/// The sequence of a closed block table: odd, so that no reader uses it.
pub(super) const CLOSED: u64 = u64::MAX;

/// Returns the words of a block table with `logical_blocks` entries.
pub fn block_table_words(logical_blocks: usize) -> usize {
    BLOCKS + logical_blocks
}

/// The version and counters of the values in a block table, as in an answer to a pull.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ValueCounts {
    /// The number of pushes that the shard has applied.
    pub version: u64,
    /// The number of gradients among them.
    pub gradients: u64,
    /// The global step known to the shard; in synchronous mode the number of steps that it has
    /// applied.
    pub step: u64,
    /// The highest step for which the shard answers pulls without a wait.
    pub serves: u64,
    /// The restore epoch of the shard.
    pub epoch: u64,
}

impl ValueCounts {
    const WORDS: [usize; 5] = [VERSION, GRADIENTS, STEP, SERVES, EPOCH];

    fn words(&self) -> impl Iterator<Item = (usize, u64)> + use<> {
        let ValueCounts { version, gradients, step, serves, epoch } = *self;
        Self::WORDS.into_iter().zip([version, gradients, step, serves, epoch])
    }

    pub(super) fn load(block_table: &impl AtomicWords) -> ValueCounts {
        let [version, gradients, step, serves, epoch] =
            Self::WORDS.map(|word| block_table.load(word));
        ValueCounts { version, gradients, step, serves, epoch }
    }
}

/// The shard's side of a block table.
///
/// Invariant: the sequence word is `sequence`, or one more while a change is in progress.
#[derive(Debug)]
pub struct BlockTable<W: AtomicWords> {
    words: W,
    sequence: u64,
    changing: bool,
    counts: ValueCounts,
}

impl<W: AtomicWords> BlockTable<W> {
    /// Initializes a block table in words that no reader has mapped yet; it needs
    /// [`block_table_words`].
    ///
    /// `blocks` gives the block of each logical block, in order.
    ///
    /// # Panics
    /// If there are too few words.
    pub fn new(words: W, counts: ValueCounts, blocks: impl Iterator<Item = u32>) -> BlockTable<W> {
        for (logical, block) in blocks.enumerate() {
            words.store(BLOCKS + logical, block.into());
        }
        counts.words().for_each(|(word, value)| words.store(word, value));
        let block_table = BlockTable { words, sequence: 2, changing: false, counts };
        block_table.words.store(SEQUENCE, block_table.sequence);
        block_table
    }

    /// Returns the words.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// Returns the block number stored for a logical block.
    ///
    /// # Panics
    /// If there is no such logical block.
    pub fn block(&self, logical: usize) -> u64 {
        self.words.load(BLOCKS + logical)
    }

    /// Returns whether a change is in progress.
    pub fn is_changing(&self) -> bool {
        self.changing
    }

    /// Returns the sequence that readers can pin; during a change, the last one before it.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the counts published in the table.
    pub fn counts(&self) -> ValueCounts {
        self.counts
    }

    /// Begins a change, unless one is in progress.
    ///
    /// Readers that start later read nothing before [`BlockTable::publish`]. The pins of readers
    /// that started earlier are visible in their reader slots when this returns.
    pub fn begin(&mut self) {
        if !self.changing {
            self.changing = true;
            self.words.store(SEQUENCE, self.sequence + 1);
            self.words.fence();
        }
    }

    /// Sets the block of a logical block from the next sequence on; a change must be in progress.
    ///
    /// # Panics
    /// If there is no such logical block.
    pub fn set_block(&mut self, logical: usize, block: u32) {
        debug_assert!(self.changing, "begin a change before setting blocks");
        self.words.store(BLOCKS + logical, block.into());
    }

    /// Ends the change and returns the new sequence. Pins of earlier sequences have been visible in
    /// their reader slots since [`BlockTable::begin`].
    pub fn publish(&mut self, counts: ValueCounts) -> u64 {
        debug_assert!(self.changing, "begin a change before publishing it");
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
    /// Closes the table, so that no reader uses it.
    fn drop(&mut self) {
        self.words.store(SEQUENCE, CLOSED);
        self.words.fence();
    }
}
