//! [`Clock`] and [`UseHistory`]: which work of streams is ordered, and who used memory last.

use std::collections::BTreeMap;
use std::ops::Range;

/// For each stream, the last work that is known to be done: a vector clock.
///
/// Work knows the work before it in its stream, what an event that the stream has waited for knew,
/// and what the host had waited for when it queued the work. Threads of the host count as one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    done: BTreeMap<u64, u64>,
}

impl Clock {
    pub(crate) fn join(&mut self, other: &Clock) {
        for (&stream, &number) in &other.done {
            self.advance(stream, number);
        }
    }

    pub(crate) fn advance(&mut self, stream: u64, number: u64) {
        let known = self.done.entry(stream).or_insert(0);
        *known = number.max(*known);
    }

    fn knows(&self, stream: u64, number: u64) -> bool {
        self.done.get(&stream).is_some_and(|&known| known >= number)
    }
}

/// The history of the work that used the parts of an allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct UseHistory {
    uses: Vec<Use>,
}

/// A use of an allocation by work of a stream.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    pub(crate) stream: u64,
    pub(crate) number: u64,
    pub(crate) writes: bool,
    /// Offsets in the allocation, sorted and apart.
    pub(crate) ranges: Vec<Range<usize>>,
    /// The description of the work, for messages.
    pub(crate) what: String,
}

impl UseHistory {
    /// Notes a use. Returns an earlier use that nothing orders with it, if they touch the same
    /// bytes and one writes, with the first such byte.
    pub(crate) fn note(&mut self, new: Use, clock: &Clock) -> Option<(String, usize)> {
        let mut conflict = None;
        self.uses.retain(|old| {
            let ordered = old.stream == new.stream || clock.knows(old.stream, old.number);
            if !ordered
                && (old.writes || new.writes)
                && let Some(at) = overlap(&old.ranges, &new.ranges)
            {
                conflict.get_or_insert((old.what.clone(), at));
            }
            // Work that conflicts with a replaced use conflicts with the new one, too.
            let replaced =
                ordered && (new.writes || !old.writes) && covers(&new.ranges, &old.ranges);
            !replaced
        });
        if self.uses.len() == USES_MAX {
            self.uses.remove(0);
        }
        self.uses.push(new);
        conflict
    }

    /// A use that is not known to be done.
    pub(crate) fn unknown(&self, clock: &Clock) -> Option<&str> {
        let unknown = self.uses.iter().find(|old| !clock.knows(old.stream, old.number));
        unknown.map(|old| old.what.as_str())
    }
}

/// The first place that is in both of two sorted lists.
fn overlap(left: &[Range<usize>], right: &[Range<usize>]) -> Option<usize> {
    let mut i = 0;
    let mut j = 0;
    while let (Some(a), Some(b)) = (left.get(i), right.get(j)) {
        if a.start < b.end && b.start < a.end {
            return Some(a.start.max(b.start));
        }
        if a.end <= b.end { i += 1 } else { j += 1 }
    }
    None
}

/// Whether each range of a sorted list is inside of one of another.
fn covers(outer: &[Range<usize>], inner: &[Range<usize>]) -> bool {
    let mut at = 0;
    inner.iter().all(|inner| {
        while outer.get(at).is_some_and(|outer| outer.end < inner.end) {
            at += 1;
        }
        outer.get(at).is_some_and(|outer| outer.start <= inner.start)
    })
}

/// The most uses of an allocation that are kept. Streams that do the same again replace their own.
const USES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn used(stream: u64, number: u64, writes: bool, range: Range<usize>) -> Use {
        Use { stream, number, writes, ranges: vec![range], what: format!("{stream}.{number}") }
    }

    #[test]
    fn uses_that_nothing_orders_conflict() {
        let mut history = UseHistory::default();
        let mut clock = Clock::default();
        assert_eq!(history.note(used(1, 1, true, 0..8), &clock), None);
        assert_eq!(history.note(used(1, 2, true, 0..8), &clock), None);
        assert_eq!(history.uses.len(), 1);
        assert_eq!(history.note(used(2, 1, false, 8..16), &clock), None);
        assert_eq!(history.note(used(2, 2, false, 4..16), &clock), Some(("1.2".to_owned(), 4)));
        clock.advance(1, 2);
        assert_eq!(history.note(used(2, 3, false, 4..16), &clock), None);
        // A write must know of the reads, and a read need not.
        assert_eq!(history.note(used(3, 1, false, 0..16), &clock), None);
        assert_eq!(history.note(used(4, 1, true, 15..16), &clock), Some(("2.3".to_owned(), 15)));
        assert_eq!(history.unknown(&clock), Some("2.3"));
        for (stream, number) in [(2, 3), (3, 1), (4, 1)] {
            clock.advance(stream, number);
        }
        assert_eq!(history.unknown(&clock), None);
    }

    #[test]
    fn lists_of_ranges_are_compared() {
        assert_eq!(overlap(&[0..4, 8..12], &[4..8, 11..20]), Some(11));
        assert_eq!(overlap(&[0..4, 8..12], &[4..8, 12..20]), None);
        assert!(covers(&[0..4, 8..12], &[1..3, 9..12]));
        assert!(!covers(&[0..4, 8..12], &[3..9, 10..11]));
    }
}
