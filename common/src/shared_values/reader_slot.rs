//! A desk: where one reader says what it reads, and is told that it has read for too long.

use super::AtomicWords;

/// Where the words stand. There is room for more behind them.
const PIN: usize = 0;
const PULLS: usize = 1;
const BYTES: usize = 2;
/// Of another cache line, as it is the shard that writes it.
const REVOKED: usize = 8;

/// How many words a desk has.
pub const READER_SLOT_WORDS: usize = 512;

/// Whether a pin keeps a block as it is that held a place from the turn `born` on, and does not since
/// the turn `freed`. A pin of 0 is none.
pub fn holds(pin: u64, born: u64, freed: u64) -> bool {
    born <= pin && pin < freed && pin != 0
}

/// A desk. The words of a side are what it says: nothing that the other relies on.
#[derive(Debug)]
pub struct ReaderSlot<W: AtomicWords>(W);

impl<W: AtomicWords> ReaderSlot<W> {
    /// A desk on [`READER_SLOT_WORDS`] words, all 0 at first.
    pub fn new(words: W) -> ReaderSlot<W> {
        ReaderSlot(words)
    }

    /// The turn that the reader has pinned, or 0; whatever a hostile one has stored.
    pub fn pinned(&self) -> u64 {
        self.0.load(PIN)
    }

    /// Tells the reader that its pin is honoured no longer: behind this, what it may be reading can be
    /// overwritten.
    pub fn revoke(&self) {
        self.0.store(REVOKED, 1);
        self.0.fence();
    }

    /// How many pulls the reader says to have made, and how many bytes they had.
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
    fn a_pin_holds_what_was_there_at_its_turn_and_nothing_else() {
        assert!(holds(4, 4, 6) && holds(4, 0, 6) && holds(4, 2, 8));
        assert!(!holds(4, 6, 8), "it came later");
        assert!(!holds(4, 2, 4), "it had gone");
        assert!(!holds(0, 0, 6), "there is no pin");
        // A block that was never shown is held by nobody.
        assert!(!holds(4, 0, 0) && !holds(u64::MAX, 0, 0));
    }
}
