//! [`DenseInput`]: the dense values that an update takes, of one push or of a synchronous step.

use std::ops::Range;

use pushpull_common::finite::Exponents;
use pushpull_common::tensor::DType;
use pushpull_optim::optimizer::{MEAN_GRADIENTS_MAX, SharedRun};
use pushpull_optim::volatile::Volatile;
use pushpull_store::change::{ByteSource, ChangeInput};
use smallvec::SmallVec;

use super::TILE_BYTES;
use super::mean::Sum;
use super::scan::{NonFiniteElement, NonFiniteScan, ScanningInput};
use super::update_target::UpdatePushes;
use crate::aggregate::current_step::PerPush;
use crate::inbox::{PushSource, PushValues};

/// The most gradients for which a slice extends to the end of a block, regardless of its budget.
const WHOLE_BLOCK_GRADIENTS_MAX: usize = 16;

/// The dense values that an update takes.
#[derive(Clone, Copy)]
pub(super) enum DenseInput<'a> {
    /// The values of one push.
    Push {
        source: PushSource<'a>,
        /// Whether the values that were sent, and those in a push buffer, are scanned.
        scans_own: bool,
        scans_shared: bool,
    },
    /// The gradients of a step, whose mean is applied.
    Step {
        pushes: &'a [StepShare<'a>],
        /// The divisor of every mean, under [`Bug::MeanOfAll`].
        planted_divisor: Option<u32>,
    },
}

/// How far a range may extend: by the budget of the slice, or to the end of a block.
#[derive(Clone, Copy)]
pub(super) struct RangeLimits {
    pub(super) budget: u64,
    pub(super) block_bytes: u64,
}

/// The input of a range of one type, to be changed at once.
pub(in crate::shard) struct InputRange<'a> {
    pub(in crate::shard) end: u64,
    /// The bytes that are read, which count towards the budget of a slice.
    pub(in crate::shard) read: u64,
    /// `None` if no push contains the range.
    pub(in crate::shard) values: Option<InputValues<'a>>,
}

/// The values for a range.
pub(in crate::shard) enum InputValues<'a> {
    Bytes(&'a [u8]),
    Scanned(ScanningInput<'a>),
    Mean(StepMean<'a>),
}

impl<'a> DenseInput<'a> {
    /// Returns the values at the start of a range of one type: of a push, as far as they are in one
    /// memory; of a step, their mean as far as one set of pushes contains the range. `copy` is
    /// scratch memory.
    pub(super) fn next(
        self,
        range: Range<u64>,
        dtype: DType,
        limits: RangeLimits,
        scan: Option<NonFiniteScan<'a>>,
        copy: &'a mut Vec<u64>,
    ) -> InputRange<'a> {
        match self {
            DenseInput::Push { source, scans_own, scans_shared } => {
                let end = range.end.min(range.start.saturating_add(limits.budget));
                let range = range.start..end;
                let Some((values, end)) = source.values(range.clone()) else {
                    return InputRange { end, read: end - range.start, values: None };
                };
                let scanning = |values, scan| {
                    InputValues::Scanned(ScanningInput::new(values, range.start, dtype, scan))
                };
                let values = match values {
                    PushValues::Own(bytes) if scans_own => scanning(Volatile::of(bytes), scan),
                    PushValues::Own(bytes) => InputValues::Bytes(bytes),
                    PushValues::Shared(shared) => scanning(shared, scan.filter(|_| scans_shared)),
                };
                InputRange { end, read: end - range.start, values: Some(values) }
            }
            DenseInput::Step { pushes, planted_divisor } => {
                let start = range.start;
                let end = end_of_mean(pushes, &range, limits);
                let gradients = pushes.iter().filter(|push| push.contains(start)).count();
                let read = (end - start) * gradients.max(1) as u64;
                let values = (gradients > 0).then(|| {
                    let divisor = planted_divisor.unwrap_or(gradients as u32);
                    let shared = shared_gradients(pushes, &(start..end));
                    let at = start;
                    InputValues::Mean(StepMean {
                        pushes,
                        dtype,
                        gradients,
                        divisor,
                        start,
                        at,
                        shared,
                        copy,
                    })
                });
                InputRange { end, read, values }
            }
        }
    }
}

/// Returns the end of the first part of a range that one set of pushes contains.
fn end_of_mean(pushes: &[StepShare<'_>], range: &Range<u64>, limits: RangeLimits) -> u64 {
    let start = range.start;
    let RangeLimits { budget, block_bytes } = limits;
    // With few gradients a range extends to the end of a block, so that each block is written
    // once. With many it may be shorter. Every range ends between two elements.
    let each = (budget / pushes.len().max(1) as u64).max(TILE_BYTES) / 8 * 8;
    let end = start.saturating_add(each);
    let end = match end - end % block_bytes {
        block if block > start => block,
        _ if pushes.len() <= WHOLE_BLOCK_GRADIENTS_MAX => start - start % block_bytes + block_bytes,
        _ => end,
    };
    // Ends where the set of gradients changes. Each gradient has whole partitions.
    let mut end = range.end.min(end);
    for StepShare { ranges, .. } in pushes {
        let next = ranges.partition_point(|held| held.end <= start);
        if let Some(held) = ranges.get(next) {
            end = end.min(if held.start > start { held.start } else { held.end });
        }
    }
    end
}

/// The gradient that one push contributes to a step.
pub(super) struct StepShare<'a> {
    ranges: &'a [Range<u64>],
    source: PushSource<'a>,
    factor: f64,
}

impl<'a> StepShare<'a> {
    /// Collects the gradients of a step, once per slice, because a step may have many pushes.
    pub(super) fn of(update: UpdatePushes<'a>) -> PerPush<StepShare<'a>> {
        let UpdatePushes { inbox, push_slots, factors, .. } = update;
        let share = |(&push_slot, &factor): (&u32, &f64)| {
            let ranges = inbox.arrival(push_slot)?.extents.ranges();
            Some(StepShare { ranges, source: inbox.source(push_slot)?, factor })
        };
        push_slots.iter().zip(factors).filter_map(share).collect()
    }

    /// Returns whether the push contains this byte of the layout.
    fn contains(&self, start: u64) -> bool {
        let next = self.ranges.partition_point(|held| held.end <= start);
        self.ranges.get(next).is_some_and(|held| held.contains(&start))
    }

    /// Adds its gradient in a range to a sum.
    fn add_to(&self, sum: &mut Sum<'_>, range: &Range<u64>, copy: &mut Vec<u64>) {
        let mut start = range.start;
        if let Some(begun) = sum.copy_target(self.factor) {
            while let Some(end) =
                self.source.copy(start..range.end, &mut begun[(start - range.start) as usize..])
            {
                start = end;
            }
        }
        while let Some((bytes, end)) = self.source.piece(start..range.end, copy) {
            sum.add((start - range.start) as usize, bytes, self.factor);
            start = end;
        }
        sum.end_gradient();
    }
}

/// The mean of the gradients of a step that contain a variable, computed while it is applied.
pub(in crate::shard) struct StepMean<'a> {
    pushes: &'a [StepShare<'a>],
    dtype: DType,
    /// The gradients that contain the variable, and the divisor of their sum.
    gradients: usize,
    divisor: u32,
    /// The byte of the layout where the mean starts, and that of the next value.
    start: u64,
    at: u64,
    /// The gradients, if they are few, all in push buffers, and all factors are 1; empty otherwise.
    shared: SmallVec<[Volatile<'a>; MEAN_GRADIENTS_MAX]>,
    /// Scratch memory for copies out of push buffers.
    copy: &'a mut Vec<u64>,
}

impl ByteSource for StepMean<'_> {
    fn fill(&mut self, to: &mut [u8]) {
        let range = self.at..self.at + to.len() as u64;
        let mut sum = Sum::new(self.dtype, self.gradients, self.divisor, to);
        for push in self.pushes.iter().filter(|push| push.contains(range.start)) {
            push.add_to(&mut sum, &range, self.copy);
        }
        self.at = range.end;
    }

    fn shared_input(&self) -> Option<SharedRun<'_>> {
        let at = (self.at - self.start) as usize;
        let shared = SharedRun {
            gradients: &self.shared,
            at,
            divisor: self.divisor,
            exponents: Exponents::NONE,
        };
        (!self.shared.is_empty()).then_some(shared)
    }

    fn consume_shared(&mut self, bytes: usize, _: bool) {
        self.at += bytes as u64;
    }
}

/// Returns the gradients of the pushes that contain a range, if they are few, all in push buffers,
/// and all factors are 1; empty otherwise.
fn shared_gradients<'a>(
    pushes: &[StepShare<'a>],
    range: &Range<u64>,
) -> SmallVec<[Volatile<'a>; MEAN_GRADIENTS_MAX]> {
    let mut shared = SmallVec::new();
    for push in pushes.iter().filter(|push| push.contains(range.start)) {
        match push.source.values(range.clone()) {
            Some((PushValues::Shared(values), end))
                if end == range.end && push.factor == 1.0 && shared.len() < MEAN_GRADIENTS_MAX =>
            {
                shared.push(values);
            }
            _ => return SmallVec::new(),
        }
    }
    shared
}

impl InputValues<'_> {
    pub(super) fn input(&mut self) -> ChangeInput<'_> {
        match self {
            InputValues::Bytes(bytes) => (*bytes).into(),
            InputValues::Scanned(scanning) => ChangeInput::Source(scanning),
            InputValues::Mean(mean) => ChangeInput::Source(mean),
        }
    }

    /// Returns the element to refuse among those that were read.
    pub(super) fn found(&self) -> Option<NonFiniteElement> {
        match self {
            InputValues::Scanned(scanning) => scanning.found(),
            InputValues::Bytes(_) | InputValues::Mean(_) => None,
        }
    }
}
