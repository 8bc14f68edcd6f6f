//! The input of a change: a slice, a source of bytes, or shared memory.

use std::ops::Range;

use pushpull_common::finite::Exponents;
use pushpull_optim::optimizer::SharedRun;
use pushpull_optim::volatile::{LINE_BYTES, Volatile};

/// The maximum size of a chunk, in bytes. A chunk stays in the first-level cache with the values
/// that it changes. A loop that alternates between reading and writing this much is faster than one
/// that interleaves both; larger and smaller chunks lose that gain.
const CHUNK_BYTES: usize = 2 << 10;

/// A source of bytes that are read in order.
pub trait ByteSource {
    /// Fills `to` with the next bytes. If they are invalid, the source records that, and may write
    /// any bytes.
    fn fill(&mut self, to: &mut [u8]);

    /// Returns the next bytes if they can be read in shared memory.
    fn shared_input(&self) -> Option<SharedInput<'_>> {
        None
    }

    /// Records that `bytes` bytes were read in shared memory, and whether any exponent among them
    /// was full.
    fn consume_shared(&mut self, _bytes: usize, _full: bool) {}
}

/// A gradient in shared memory, or several whose mean is the input. All start at the same byte.
pub struct SharedInput<'a> {
    /// At least one gradient, in the order of summation.
    pub gradients: &'a [Volatile<'a>],
    /// The byte of each gradient at which the input starts.
    pub at: usize,
    /// The divisor of their sum.
    pub divisor: u32,
    /// The exponents to scan.
    pub exponents: Exponents,
}

impl SharedInput<'_> {
    /// Returns whether every gradient starts at this offset within a cache line.
    fn have_line_offset(&self, line_offset: usize) -> bool {
        let mut gradients = self.gradients.iter();
        gradients.all(|gradient| gradient.skip(self.at).offset_in(LINE_BYTES) == line_offset)
    }
}

/// The input of a change, read in order.
pub enum ChangeInput<'a> {
    /// A slice, aligned for its type.
    Bytes(&'a [u8]),
    /// A source of bytes.
    Source(&'a mut dyn ByteSource),
}

impl<'a> From<&'a [u8]> for ChangeInput<'a> {
    fn from(bytes: &'a [u8]) -> ChangeInput<'a> {
        ChangeInput::Bytes(bytes)
    }
}

/// The input of one run of values.
pub(super) enum InputChunk<'a> {
    Bytes(&'a [u8]),
    Shared(SharedRun<'a>),
}

/// A buffer for one chunk.
#[repr(align(64))]
struct AlignedBytes<const BYTES: usize>([u8; BYTES]);

impl ChangeInput<'_> {
    /// Fills `to` with the next bytes.
    ///
    /// # Panics
    /// If fewer are left.
    pub fn fill(&mut self, to: &mut [u8]) {
        match self {
            ChangeInput::Bytes(bytes) => to.copy_from_slice(next_of(bytes, to.len())),
            ChangeInput::Source(source) => source.fill(to),
        }
    }

    /// Calls `take` with each part of a range and the next bytes for it, aligned for every type. A
    /// slice comes as one part, other input in chunks.
    ///
    /// # Panics
    /// If fewer bytes are left.
    pub fn each(&mut self, within: Range<usize>, take: impl FnMut(Range<usize>, &[u8])) {
        self.each_of::<CHUNK_BYTES>(within, take);
    }

    /// Calls `take` as [`ChangeInput::each`] does, but passes shared memory as one part, without a
    /// copy. That requires the same offset within a cache line as the range has.
    pub(super) fn each_next(
        &mut self,
        within: Range<usize>,
        mut take: impl FnMut(Range<usize>, InputChunk<'_>),
    ) {
        if let ChangeInput::Source(source) = self
            && let Some(shared) = source
                .shared_input()
                .filter(|shared| shared.have_line_offset(within.start % LINE_BYTES))
        {
            let (mut full, SharedInput { gradients, at, divisor, exponents }) = (false, shared);
            let shared = SharedRun { gradients, at, divisor, exponents, full: &mut full };
            take(within.clone(), InputChunk::Shared(shared));
            return source.consume_shared(within.len(), full);
        }
        self.each(within, |within, bytes| take(within, InputChunk::Bytes(bytes)));
    }

    /// Calls `take` as [`ChangeInput::each`] does, in chunks of `BYTES` bytes.
    pub(super) fn each_of<const BYTES: usize>(
        &mut self,
        within: Range<usize>,
        mut take: impl FnMut(Range<usize>, &[u8]),
    ) {
        let source = match self {
            ChangeInput::Bytes(bytes) => return take(within.clone(), next_of(bytes, within.len())),
            ChangeInput::Source(source) => source,
        };
        let mut chunk = AlignedBytes([0; BYTES]);
        let mut start = within.start;
        while start < within.end {
            // The first chunk may be short; the others start at cache lines.
            let end = within.end.min((start / BYTES + 1) * BYTES);
            let bytes = &mut chunk.0[..end - start];
            source.fill(bytes);
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
    #![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

    use super::*;

    /// A source of consecutive bytes from a start value on.
    struct CountingSource(u8);

    impl ByteSource for CountingSource {
        fn fill(&mut self, to: &mut [u8]) {
            for byte in to {
                *byte = self.0;
                self.0 = self.0.wrapping_add(1);
            }
        }
    }

    #[test]
    fn a_source_yields_the_bytes_of_a_slice() {
        let all: Vec<u8> = (0..30_000).map(|at| (at % 256) as u8).collect();
        for ranges in [
            vec![0..20_000],
            vec![0..8, 8..16, 16..5000],
            vec![2040..2048, 0..2048, 4096..4100, 100..9000],
            vec![7..7, 1..2047],
        ] {
            let collect = |mut input: ChangeInput<'_>| {
                let mut pieces = Vec::new();
                for within in &ranges {
                    let (mut at, mut bytes) = (within.start, Vec::new());
                    input.each(within.clone(), |part, given| {
                        assert_eq!(
                            (part.start, part.len()),
                            (at, given.len()),
                            "parts are in order"
                        );
                        at = part.end;
                        bytes.extend_from_slice(given);
                    });
                    assert_eq!(at, within.end, "the range is complete");
                    pieces.push(bytes);
                }
                let mut rest = [0; 10];
                input.fill(&mut rest);
                (pieces, rest)
            };
            let (mut counting, expected) = (CountingSource(0), collect(ChangeInput::Bytes(&all)));
            assert_eq!(collect(ChangeInput::Source(&mut counting)), expected, "{ranges:?}");
        }
    }

    /// A source of zeros that offers shared memory at some offset within a cache line.
    #[cfg(target_os = "linux")]
    struct ZeroSource {
        memory: Volatile<'static>,
        taken: Vec<(usize, bool)>,
    }

    #[cfg(target_os = "linux")]
    impl ByteSource for ZeroSource {
        fn fill(&mut self, to: &mut [u8]) {
            to.fill(0);
        }

        fn shared_input(&self) -> Option<SharedInput<'_>> {
            let gradients = std::slice::from_ref(&self.memory);
            Some(SharedInput { gradients, at: 64, divisor: 1, exponents: Exponents::NONE })
        }

        fn consume_shared(&mut self, bytes: usize, full: bool) {
            self.taken.push((bytes, full));
        }
    }

    /// The loops that read shared memory load whole cache lines.
    #[test]
    #[cfg(target_os = "linux")]
    fn shared_bytes_are_passed_whole_if_their_line_offset_matches() {
        let memory = Box::leak(Box::new(crate::arena::SharedBytes::new(16384).unwrap().0));
        for (memory_offset, starts, is_shared) in [(8, 8, true), (8, 136, true), (8, 0, false)] {
            let memory = memory.bytes(memory_offset, 10_000);
            let mut source = ZeroSource { memory, taken: Vec::new() };
            let mut pieces = Vec::new();
            ChangeInput::Source(&mut source).each_next(starts..starts + 5000, |part, next| {
                if let InputChunk::Shared(shared) = &next {
                    assert_eq!((shared.gradients.len(), shared.at, shared.divisor), (1, 64, 1));
                }
                if let InputChunk::Shared(SharedRun { full, .. }) = next {
                    *full = true;
                    pieces.push(part);
                }
            });
            let (all, none) =
                ((vec![starts..starts + 5000], vec![(5000, true)]), Default::default());
            let expected = if is_shared { all } else { none };
            assert_eq!((pieces, source.taken), expected, "{memory_offset}, {starts}");
        }
    }

    /// Non-temporal stores write whole cache lines, so every chunk but the first must start at one.
    /// The buffer must be aligned too.
    #[test]
    fn chunks_start_at_cache_lines() {
        let mut counting = CountingSource(0);
        let mut lengths = Vec::new();
        ChangeInput::Source(&mut counting).each(40..5000, |part, bytes| {
            assert!(part.start == 40 || part.start.is_multiple_of(64), "{part:?}");
            assert!(bytes.as_ptr().addr().is_multiple_of(64));
            lengths.push(bytes.len());
        });
        assert_eq!(lengths, [2008, 2048, 904]);
    }
}
