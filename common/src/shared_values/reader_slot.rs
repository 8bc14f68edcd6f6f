//! The reader slot: holds one reader's pin and the shard's revocation of it.

use super::AtomicWords;

/// Word indices. Later words are reserved.
const PIN: usize = 0;
const PULLS: usize = 1;
const BYTES: usize = 2;
/// In another cache line, because the shard writes it.
const REVOKED: usize = 8;

/// The words of a reader slot.
pub const READER_SLOT_WORDS: usize = 512;

/// Returns whether a pin holds a block that is in use from sequence `born` until before `freed`. A
/// pin of 0 is none.
pub fn holds(pin: u64, born: u64, freed: u64) -> bool {
    born <= pin && pin < freed && pin != 0
}

/// A reader slot. Each side writes its own words, and neither relies on the words of the other.
#[derive(Debug)]
pub struct ReaderSlot<W: AtomicWords>(W);

impl<W: AtomicWords> ReaderSlot<W> {
    /// Creates a slot on [`READER_SLOT_WORDS`] words, initially all 0.
    pub fn new(words: W) -> ReaderSlot<W> {
        ReaderSlot(words)
    }

    /// Returns the sequence that the reader has pinned, or 0. A hostile reader may store any value.
    pub fn pinned(&self) -> u64 {
        self.0.load(PIN)
    }

    /// Revokes the reader's pin: from now on, blocks that it reads may be overwritten.
    pub fn revoke(&self) {
        self.0.store(REVOKED, 1);
        self.0.fence();
    }

    /// Returns the pulls and bytes that the reader has counted, which are not verified.
    pub fn counted(&self) -> (u64, u64) {
        (self.0.load(PULLS), self.0.load(BYTES))
    }

    pub(super) fn pin(&self, sequence: u64) {
        self.0.store(PIN, sequence);
        self.0.fence();
    }

    pub(super) fn unpin(&self) {
        self.0.store(PIN, 0);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.0.load(REVOKED) != 0
    }

    pub(super) fn count(&self, bytes: u64) {
        self.0.store(PULLS, self.0.load(PULLS).wrapping_add(1));
        self.0.store(BYTES, self.0.load(BYTES).wrapping_add(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_holds_exactly_the_blocks_of_its_sequence() {
        assert!(holds(4, 4, 6) && holds(4, 0, 6) && holds(4, 2, 8));
        assert!(!holds(4, 6, 8), "published later");
        assert!(!holds(4, 2, 4), "freed earlier");
        assert!(!holds(0, 0, 6), "there is no pin");
        // A block that was never published is held by no pin.
        assert!(!holds(4, 0, 0) && !holds(u64::MAX, 0, 0));
    }
}
