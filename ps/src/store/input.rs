//! What a change takes: bytes that lie there, or bytes that are given as they are needed, or taken from memory
//! that is lent.

use std::ops::Range;

use pushpull_common::finite::Exponents;

use crate::optimizer::SharedRun;
use crate::volatile::{LINE_BYTES, Volatile};

/// How many bytes are given at a time, at most. They stay in the first cache with what they change. A loop
/// that reads memory for as long and then writes for as long is faster than one that does both at
/// once; with more than this at a time, or less, it loses that again.
const CHUNK_BYTES: usize = 2 << 10;

/// Gives bytes in the order in which they are taken.
pub(crate) trait Give {
    /// Writes the next bytes, as many as there is room for. Where something is wrong with them, who gives
    /// them knows it, and gives any.
    fn give(&mut self, to: &mut [u8]);

    /// The next bytes, if they can be taken from memory that is lent.
    fn shared(&self) -> Option<SharedInput<'_>> {
        None
    }

    /// So many of them have been taken there; whether one of the exponents was full.
    fn taken(&mut self, _bytes: usize, _full: bool) {}
}

/// Bytes that are taken from memory that is lent: a gradient, or the mean of some, which lie from the same
/// byte of each on.
pub(crate) struct SharedInput<'a> {
    pub(crate) gradients: &'a [Volatile<'a>],
    pub(crate) at: usize,
    /// What their sum is divided by.
    pub(crate) over: u32,
    /// Which exponents are to be looked at.
    pub(crate) exponents: Exponents,
}

impl SharedInput<'_> {
    /// Whether they lie so far behind a line of the cache.
    fn lie(&self, behind_line: usize) -> bool {
        let mut gradients = self.gradients.iter();
        gradients.all(|gradient| gradient.behind(self.at).offset_in(LINE_BYTES) == behind_line)
    }
}

/// What a change takes, in order.
pub(crate) enum Input<'a> {
    /// It lies there, aligned for its type.
    Bytes(&'a [u8]),
    /// It is given.
    Given(&'a mut dyn Give),
}

impl<'a> From<&'a [u8]> for Input<'a> {
    fn from(bytes: &'a [u8]) -> Input<'a> {
        Input::Bytes(bytes)
    }
}

/// What a stretch takes.
pub(super) enum Next<'a> {
    Bytes(&'a [u8]),
    Shared(SharedRun<'a>),
}

/// What was given last.
#[repr(align(64))]
struct Chunk<const BYTES: usize>([u8; BYTES]);

impl Input<'_> {
    /// Writes the next bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn fill(&mut self, to: &mut [u8]) {
        match self {
            Input::Bytes(bytes) => to.copy_from_slice(next_of(bytes, to.len())),
            Input::Given(give) => give.give(to),
        }
    }

    /// Has a stretch taken with the next bytes, aligned for every type: at once where they lie there,
    /// otherwise piece by piece.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn each(&mut self, within: Range<usize>, take: impl FnMut(Range<usize>, &[u8])) {
        self.each_of::<CHUNK_BYTES>(within, take);
    }

    /// The same for who takes bytes where they lie, too, if that is alike within the lines of the cache: those
    /// that are lent come at once.
    pub(super) fn each_next(
        &mut self,
        within: Range<usize>,
        mut take: impl FnMut(Range<usize>, Next<'_>),
    ) {
        if let Input::Given(give) = self
            && let Some(shared) =
                give.shared().filter(|shared| shared.lie(within.start % LINE_BYTES))
        {
            let (mut full, SharedInput { gradients, at, over, exponents }) = (false, shared);
            let shared = SharedRun { gradients, at, over, exponents, full: &mut full };
            take(within.clone(), Next::Shared(shared));
            return give.taken(within.len(), full);
        }
        self.each(within, |within, bytes| take(within, Next::Bytes(bytes)));
    }

    /// [`Input::each`] in pieces of so many bytes.
    pub(super) fn each_of<const BYTES: usize>(
        &mut self,
        within: Range<usize>,
        mut take: impl FnMut(Range<usize>, &[u8]),
    ) {
        let give = match self {
            Input::Bytes(bytes) => return take(within.clone(), next_of(bytes, within.len())),
            Input::Given(give) => give,
        };
        let mut chunk = Chunk([0; BYTES]);
        let mut start = within.start;
        while start < within.end {
            // The first piece may be short, and those after it start with lines of the cache.
            let end = within.end.min((start / BYTES + 1) * BYTES);
            let bytes = &mut chunk.0[..end - start];
            give.give(bytes);
            take(start..end, bytes);
            start = end;
        }
    }
}

fn next_of<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (head, rest) = bytes.split_at(length);
    *bytes = rest;
    head
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, reason = "one stretch is what is meant")]

    use super::*;

    /// Gives the bytes that follow each other from some number on.
    struct Counting(u8);

    impl Give for Counting {
        fn give(&mut self, to: &mut [u8]) {
            for byte in to {
                *byte = self.0;
                self.0 = self.0.wrapping_add(1);
            }
        }
    }

    #[test]
    fn what_is_given_is_what_lies_there() {
        let all: Vec<u8> = (0..30_000).map(|at| (at % 256) as u8).collect();
        for stretches in [
            vec![0..20_000],
            vec![0..8, 8..16, 16..5000],
            vec![2040..2048, 0..2048, 4096..4100, 100..9000],
            vec![7..7, 1..2047],
        ] {
            let taken = |mut input: Input<'_>| {
                let mut pieces = Vec::new();
                for within in &stretches {
                    let (mut at, mut bytes) = (within.start, Vec::new());
                    input.each(within.clone(), |part, given| {
                        assert_eq!((part.start, part.len()), (at, given.len()), "in order");
                        at = part.end;
                        bytes.extend_from_slice(given);
                    });
                    assert_eq!(at, within.end, "all of it");
                    pieces.push(bytes);
                }
                let mut rest = [0; 10];
                input.fill(&mut rest);
                (pieces, rest)
            };
            let (mut counting, lying) = (Counting(0), taken(Input::Bytes(&all)));
            assert_eq!(taken(Input::Given(&mut counting)), lying, "{stretches:?}");
        }
    }

    /// Gives zeros, and lends as many as there are from some byte of a line on.
    #[cfg(target_os = "linux")]
    struct SharedReaders {
        memory: Volatile<'static>,
        taken: Vec<(usize, bool)>,
    }

    #[cfg(target_os = "linux")]
    impl Give for SharedReaders {
        fn give(&mut self, to: &mut [u8]) {
            to.fill(0);
        }

        fn shared(&self) -> Option<SharedInput<'_>> {
            let gradients = std::slice::from_ref(&self.memory);
            Some(SharedInput { gradients, at: 64, over: 1, exponents: Exponents::NONE })
        }

        fn taken(&mut self, bytes: usize, full: bool) {
            self.taken.push((bytes, full));
        }
    }

    /// By loops that load whole lines.
    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_lent_is_taken_there_if_it_lies_alike_within_lines() {
        let memory = Box::leak(Box::new(crate::arena::SharedBytes::new(16384).unwrap().0));
        for (lies, starts, is_taken_there) in [(8, 8, true), (8, 136, true), (8, 0, false)] {
            let memory = memory.bytes(lies, 10_000);
            let mut shared_values = SharedReaders { memory, taken: Vec::new() };
            let mut pieces = Vec::new();
            Input::Given(&mut shared_values).each_next(starts..starts + 5000, |part, next| {
                if let Next::Shared(shared) = &next {
                    assert_eq!((shared.gradients.len(), shared.at, shared.over), (1, 64, 1));
                }
                if let Next::Shared(SharedRun { full, .. }) = next {
                    *full = true;
                    pieces.push(part);
                }
            });
            let (all, none) =
                ((vec![starts..starts + 5000], vec![(5000, true)]), Default::default());
            let expected = if is_taken_there { all } else { none };
            assert_eq!((pieces, shared_values.taken), expected, "{lies}, {starts}");
        }
    }

    /// Each piece but the first starts where a line does that is changed past the cache, and lies aligned
    /// itself.
    #[test]
    fn pieces_start_with_lines() {
        let mut counting = Counting(0);
        let mut lengths = Vec::new();
        Input::Given(&mut counting).each(40..5000, |part, bytes| {
            assert!(part.start == 40 || part.start.is_multiple_of(64), "{part:?}");
            assert!(bytes.as_ptr().addr().is_multiple_of(64));
            lengths.push(bytes.len());
        });
        assert_eq!(lengths, [2008, 2048, 904]);
    }
}
