//! Which calls have ended: all up to a number, and some above it.

use std::collections::BTreeSet;

/// Which calls have ended.
///
/// Invariant: every number of `above` is at least `settled + 2`.
#[derive(Debug)]
pub(super) struct EndedCalls {
    settled: u64,
    above: BTreeSet<u64>,
}

impl EndedCalls {
    pub(super) fn new(settled: u64, also: impl IntoIterator<Item = u64>) -> EndedCalls {
        let mut ended = EndedCalls { settled, above: BTreeSet::new() };
        also.into_iter().for_each(|number| ended.end(number));
        ended
    }

    /// Returns the number up to which all have ended.
    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    pub(super) fn has(&self, number: u64) -> bool {
        number <= self.settled || self.above.contains(&number)
    }

    pub(super) fn end(&mut self, number: u64) {
        if number > self.settled {
            self.above.insert(number);
        }
        while self.above.first() == Some(&(self.settled + 1)) {
            self.above.pop_first();
            self.settled += 1;
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        assert!(self.above.first().is_none_or(|&first| first > self.settled + 1));
    }
}
