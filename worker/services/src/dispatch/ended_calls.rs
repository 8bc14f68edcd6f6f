//! [`EndedCalls`]: the set of calls that have ended, as a watermark and the numbers above it.

use std::collections::BTreeSet;

use pushpull_common::effect_window::{EffectWindow, Settlement};
use pushpull_common::ids::EffectNumber;

/// The calls that have ended: all up to a watermark, and some above it. A window of the shards has
/// room for the calls under way; cancelled calls may be far ahead of them.
///
/// Invariant: every number of `above` is at least `settled + 2`.
#[derive(Debug)]
pub(super) struct EndedCalls {
    settled: u64,
    above: BTreeSet<u64>,
}

impl EndedCalls {
    /// Creates the set of the calls that have settled in a window.
    pub(super) fn new(window: EffectWindow) -> EndedCalls {
        let settled = window.settled().0;
        let newest = window.newest().0;
        let mut ended = EndedCalls { settled, above: BTreeSet::new() };
        let is_settled = |number: &u64| window.state(EffectNumber(*number)) == Settlement::Settled;
        (settled + 1..=newest).filter(is_settled).for_each(|number| ended.end(number));
        ended
    }

    /// Returns the watermark, the number up to which all calls have ended.
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
