//! The effect of a push on values: the same in blocks, in shadow blocks and in rows of tables. Its
//! input is a slice, a source of bytes, or shared memory.

use std::ops::Range;

use bytemuck::Pod;
use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::{
    ApplyAt, GradientRun, Optimizer, Run, SharedRun, StreamRun, SumRun, Sums,
};
use pushpull_optim::volatile::LINE_BYTES;

use crate::error::StorageError;

/// The maximum number of slots of an optimizer.
pub const SLOTS_MAX: usize = 8;

/// The maximum size of a chunk of input, in bytes. It stays in the first-level cache with the
/// values that it changes. A loop that alternates between reading and writing this much is faster
/// than one that interleaves both; larger and smaller chunks lose that gain.
const CHUNK_BYTES: usize = 2 << 10;

/// Evaluates an expression with the number of slots as a constant, so that the loop over many rows
/// is compiled for that number. Most rules have few slots.
macro_rules! with_slots {
    ($count:expr, $slots:ident => $call:expr) => {
        match $count {
            0 => {
                const $slots: usize = 0;
                $call
            }
            1 => {
                const $slots: usize = 1;
                $call
            }
            2 => {
                const $slots: usize = 2;
                $call
            }
            3 => {
                const $slots: usize = 3;
                $call
            }
            _ => {
                const $slots: usize = $crate::change::SLOTS_MAX;
                $call
            }
        }
    };
}
pub(crate) use with_slots;

/// The effect of a push on values of one type.
#[derive(Clone, Copy, Debug)]
pub enum Change<'a> {
    /// The optimizer applies the input as a gradient.
    Gradient {
        /// The optimizer of the variable.
        optimizer: &'a dyn Optimizer,
        /// The number of the update.
        at: ApplyAt,
        /// The type of the values.
        dtype: DType,
    },
    /// The input replaces the values.
    Assign,
    /// The input is added to the values; integers wrap.
    Add {
        /// The type of the values.
        dtype: DType,
    },
}

/// No block is free because all are pinned. The change continues after a pull has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoFreeBlock;

/// The reason why a change cannot begin or continue now. Nothing is lost; the change is retried.
#[derive(Debug)]
pub enum Stalled {
    /// Existing memory is pinned: see [`NoFreeBlock`].
    NoFreeBlock,
    /// New memory cannot be allocated. The change has not begun.
    Growth(Box<StorageError>),
}

impl From<NoFreeBlock> for Stalled {
    fn from(NoFreeBlock: NoFreeBlock) -> Stalled {
        Stalled::NoFreeBlock
    }
}

impl From<StorageError> for Stalled {
    fn from(error: StorageError) -> Stalled {
        Stalled::Growth(Box::new(error))
    }
}

/// Runs of values that a push changes in place. They need not be adjacent, as rows are not.
pub(crate) trait InPlaceRuns {
    /// Calls `change` with each run: its values, its slots and its input.
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(Run<'_, T>));
}

/// Runs of values that a push writes to shadow blocks.
pub(crate) trait ShadowRuns {
    /// Calls `change` with each run: its values, its slots, its input and its destination.
    fn each<T: Pod>(&mut self, change: &mut dyn FnMut(StreamRun<'_, T>));
}

impl Change<'_> {
    /// Returns how many slots change. They are the first ones of each block.
    pub(crate) fn slots(self) -> usize {
        match self {
            Change::Gradient { optimizer, .. } => optimizer.slots().len(),
            Change::Assign | Change::Add { .. } => 0,
        }
    }

    /// Returns the type of the values if they are computed. Such values can be non-finite although
    /// all operands are finite.
    pub(crate) fn computed_dtype(self) -> Option<DType> {
        match self {
            Change::Gradient { dtype, .. } | Change::Add { dtype } => Some(dtype),
            Change::Assign => None,
        }
    }

    /// Changes values in place.
    pub(crate) fn in_place(self, values: &mut impl InPlaceRuns) {
        match self {
            Change::Gradient { optimizer, at, dtype } => match dtype {
                DType::F32 => {
                    optimizer.apply_runs_f32(at, &mut |change| values.each::<f32>(change));
                }
                DType::F64 => {
                    optimizer.apply_runs_f64(at, &mut |change| values.each::<f64>(change));
                }
                _ => unreachable!("only floating-point variables are trainable"),
            },
            Change::Assign => {
                values.each::<u8>(&mut |run| run.values.copy_from_slice(run.gradient))
            }
            Change::Add { dtype } => match dtype {
                DType::F32 => values.each(&mut |run| add::<f32>(run, |a, b| a + b)),
                DType::F64 => values.each(&mut |run| add::<f64>(run, |a, b| a + b)),
                DType::I64 => values.each(&mut |run| add::<i64>(run, i64::wrapping_add)),
                _ => unreachable!("a catalogue holds known types only"),
            },
        }
    }

    /// Writes the new values and slots to shadow blocks. Returns false, without calling `streams`,
    /// if there is no loop for that.
    pub(crate) fn stream(self, streams: &mut impl ShadowRuns) -> bool {
        let Change::Gradient { optimizer, at, dtype } = self else { return false };
        match dtype {
            DType::F32 => optimizer.stream_runs_f32(at, &mut |change| streams.each::<f32>(change)),
            DType::F64 => optimizer.stream_runs_f64(at, &mut |change| streams.each::<f64>(change)),
            _ => false,
        }
    }

    /// Adds values and their input to the sums over a whole variable.
    pub(crate) fn add_up(self, values: &[u8], slots: &[&[u8]], input: &[u8], sums: &mut Sums) {
        let Change::Gradient { optimizer, at, dtype } = self else { return };
        match dtype {
            DType::F32 => {
                sum(values, slots, input, |run| optimizer.sum_f32(at, run, sums));
            }
            DType::F64 => {
                sum(values, slots, input, |run| optimizer.sum_f64(at, run, sums));
            }
            _ => unreachable!("only floating-point variables are trainable"),
        }
    }
}

fn add<T: Element>(run: Run<'_, T>, add: impl Fn(T, T) -> T) {
    for (value, &more) in run.values.iter_mut().zip(run.gradient) {
        *value = add(*value, more);
    }
}

fn sum<T: Element>(
    values: &[u8],
    slots: &[&[u8]],
    gradient: &[u8],
    add_up: impl FnOnce(SumRun<'_, T>),
) {
    let mut typed: [&[T]; SLOTS_MAX] = Default::default();
    for (typed, slot) in typed.iter_mut().zip(slots) {
        *typed = bytemuck::cast_slice(slot);
    }
    let values = bytemuck::cast_slice(values);
    let gradient = bytemuck::cast_slice(gradient);
    add_up(SumRun::new(values, &typed[..slots.len()], gradient));
}

/// A source of bytes that are read in order.
pub trait ByteSource {
    /// Fills `to` with the next bytes. If they are invalid, the source records that, and may write
    /// any bytes.
    fn fill(&mut self, to: &mut [u8]);

    /// Returns the next bytes if they can be read in shared memory.
    fn shared_input(&self) -> Option<SharedRun<'_>> {
        None
    }

    /// Records that `bytes` bytes were read in shared memory, and whether any exponent among them
    /// was full.
    fn consume_shared(&mut self, _bytes: usize, _full: bool) {}
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
    pub(crate) fn each_next(
        &mut self,
        within: Range<usize>,
        mut take: impl FnMut(Range<usize>, GradientRun<'_, u8>),
    ) {
        if let ChangeInput::Source(source) = self
            && let Some(run) =
                source.shared_input().filter(|run| run.has_line_offset(within.start % LINE_BYTES))
        {
            let mut full = false;
            take(within.clone(), GradientRun::Shared { run, full: &mut full });
            return source.consume_shared(within.len(), full);
        }
        self.each(within, |within, bytes| take(within, GradientRun::Local(bytes)));
    }

    /// Calls `take` as [`ChangeInput::each`] does, in chunks of `BYTES` bytes.
    pub(crate) fn each_of<const BYTES: usize>(
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

    #[cfg(target_os = "linux")]
    use pushpull_common::finite::Exponents;
    #[cfg(target_os = "linux")]
    use pushpull_optim::volatile::Volatile;

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
                    let mut at = within.start;
                    let mut bytes = Vec::new();
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
            let mut counting = CountingSource(0);
            let expected = collect(ChangeInput::Bytes(&all));
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

        fn shared_input(&self) -> Option<SharedRun<'_>> {
            let gradients = std::slice::from_ref(&self.memory);
            Some(SharedRun { gradients, at: 64, divisor: 1, exponents: Exponents::NONE })
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
                if let GradientRun::Shared { run, full } = next {
                    assert_eq!((run.gradients.len(), run.at, run.divisor), (1, 64, 1));
                    *full = true;
                    pieces.push(part);
                }
            });
            let all = (vec![starts..starts + 5000], vec![(5000, true)]);
            let none = Default::default();
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
