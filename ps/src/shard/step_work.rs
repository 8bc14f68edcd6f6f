//! Applies a synchronous step in slices.

use std::ops::Range;

use pushpull_common::finite::Exponents;
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::DType;
use pushpull_optim::optimizer::{ApplyAt, MEAN_GRADIENTS_MAX};
use pushpull_optim::volatile::Volatile;
use pushpull_store::change::Stalled;
use pushpull_store::store::{ByteSource, ChangeInput, SharedInput};
use pushpull_store::testing::planted::Bug;
use smallvec::SmallVec;

use super::mean::Sum;
use super::rows::RowChange;
use super::staleness::TILE_BYTES;
use super::two_pass::TwoPass;
use super::work::budget_of;
use super::{Shard, VariablesState};
use crate::aggregate::step_coordinator::PerPush;
use crate::aggregate::step_follower::StepFollower;
use crate::inbox::{Extents, PushSource, PushValues};

/// The most gradients for which a slice extends to the end of a block, regardless of its budget.
const WHOLE_BLOCK_GRADIENTS_MAX: usize = 16;

/// A synchronous step that is being applied.
#[derive(Debug)]
pub(super) struct StepJob {
    /// The slots of its pushes, in order of admission, and the factors of their gradients.
    pub(super) push_slots: PerPush<u32>,
    factors: PerPush<f64>,
    begun: bool,
    two_pass: TwoPass,
    /// The byte of the layout up to which the step is applied.
    done_to: u64,
}

impl StepJob {
    /// Creates the job for the pushes in these slots, in this order, each times its factor.
    pub(super) fn new(push_slots: PerPush<u32>, factors: PerPush<f64>) -> StepJob {
        let (begun, two_pass, done_to) = (false, TwoPass::default(), 0);
        StepJob { push_slots, factors, begun, two_pass, done_to }
    }

    /// Returns whether the job has begun.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }
}

/// The gradient that one push contributes to a step.
struct StepShare<'a> {
    ranges: &'a [Range<u64>],
    source: PushSource<'a>,
    factor: f64,
}

impl StepShare<'_> {
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
        while let Some(piece) = self.source.piece(start..range.end, copy) {
            sum.add((start - range.start) as usize, piece.bytes, self.factor);
            start = piece.end;
        }
        sum.end_gradient();
    }
}

/// The mean of the gradients of a step that contain a variable, computed while it is applied.
struct StepMean<'a> {
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

    fn shared_input(&self) -> Option<SharedInput<'_>> {
        let at = (self.at - self.start) as usize;
        let shared = SharedInput {
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

impl Shard {
    /// Applies a slice of a synchronous step; returns whether the step is done. The mean of the
    /// gradients, summed in order of admission, is applied as one gradient. A variable's mean is
    /// over the gradients that contain it.
    pub(super) fn work_on_step(&mut self, job: &mut StepJob) -> Result<bool, Stalled> {
        let (Some(inbox), VariablesState::Ready(store)) =
            (&self.intake.inbox, &mut self.variables.state)
        else {
            return Ok(true);
        };
        let push_slots = &job.push_slots;
        // Collected once per slice, because a step may have many pushes.
        let pushes: PerPush<StepShare<'_>> = push_slots
            .iter()
            .zip(&job.factors)
            .filter_map(|(&push_slot, &factor)| {
                let ranges = inbox.arrival(push_slot)?.extents.ranges();
                Some(StepShare { ranges, source: inbox.source(push_slot)?, factor })
            })
            .collect();
        let (operation, rules) = (Operation::Gradient {}, &self.variables.rules);
        let step = self.steps.follower.as_ref().map_or(0, StepFollower::step);
        if !job.begun {
            job.begun = true;
            self.applier.streaming = None;
            let ranges: PerPush<&[Range<u64>]> = pushes.iter().map(|push| push.ranges).collect();
            let mut dense = Extents::default();
            dense.unite(&ranges, store.layout());
            self.applier.rows.find((inbox, push_slots), store, operation, rules);
            job.two_pass = TwoPass::new(store.layout(), rules, operation);
            let (at, journal) = ((step, self.variables.version + 1), &mut self.files.journal);
            let begun = self.applier.rows.begin(store, journal, dense.ranges(), at, operation);
            if let Err(blocked) = begun {
                store.discard();
                job.begun = false;
                return Err(blocked);
            }
        }
        let apply_at = ApplyAt::new(self.variables.gradients + 1, step);
        let mut budget = budget_of(store);
        loop {
            if job.done_to >= store.layout().bytes() {
                match job.two_pass.end_pass() {
                    true => job.done_to = 0,
                    false => break,
                }
                continue;
            }
            if budget == 0 {
                return Ok(false);
            }
            let bounds = job.done_to..store.layout().bytes();
            let Some(fused_range) = self.variables.fused_ranges.within(bounds.clone()).next()
            else {
                job.done_to = bounds.end;
                continue;
            };
            let partition = fused_range.partition(store.layout()).clone();
            if partition.is_sparse() || job.two_pass.skips(rules, &partition) {
                job.done_to = fused_range.range.end;
                continue;
            }
            let start = job.done_to.max(fused_range.range.start);
            // With few gradients a range extends to the end of a block, so that each block is
            // written once. With many it may be shorter. Every range ends between two elements.
            let each = (budget / pushes.len().max(1) as u64).max(TILE_BYTES) / 8 * 8;
            let end = start.saturating_add(each);
            let block_bytes = store.geometry().block_bytes as u64;
            let end = match end - end % block_bytes {
                block if block > start => block,
                _ if pushes.len() <= WHOLE_BLOCK_GRADIENTS_MAX => {
                    start - start % block_bytes + block_bytes
                }
                _ => end,
            };
            // Ends where the set of gradients changes. Each gradient has whole partitions.
            let mut end = fused_range.range.end.min(end);
            for StepShare { ranges, .. } in &pushes {
                let next = ranges.partition_point(|held| held.end <= start);
                if let Some(held) = ranges.get(next) {
                    end = end.min(if held.start > start { held.start } else { held.end });
                }
            }
            let range = start..end;
            let gradients = pushes.iter().filter(|push| push.contains(start)).count();
            if !range.is_empty() && gradients > 0 {
                let divisor = match self.config.rule() {
                    Some(rule) if self.config.planted.has(Bug::MeanOfAll) => rule.aggregate,
                    _ => gradients as u32,
                };
                let (dtype, copy) = (partition.dtype, &mut self.applier.shared_tile);
                let pushes = &pushes[..];
                let (shared, at) = (shared_gradients(pushes, &range), start);
                let mut mean =
                    StepMean { pushes, dtype, gradients, divisor, start, at, shared, copy };
                let (how, input) = ((rules, operation, apply_at), ChangeInput::Source(&mut mean));
                job.two_pass.apply(store, how, &partition, range.clone(), input)?;
            }
            let read = (range.end - range.start) * gradients.max(1) as u64;
            budget = budget.saturating_sub(read.next_multiple_of(8).max(8));
            job.done_to = end;
        }
        let (factors, reduction) = (&job.factors[..], self.config.sparse_reduction);
        let change = RowChange { rules, operation, at: apply_at, reduction, factors };
        Ok(self.applier.rows.slice(
            store,
            inbox,
            push_slots,
            change,
            &mut budget,
            &mut self.applier.tile,
        )?)
    }
}
