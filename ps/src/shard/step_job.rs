//! The job that applies a synchronous step.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::finite::Exponents;
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::DType;
use pushpull_optim::optimizer::{ApplyAt, MEAN_GRADIENTS_MAX};
use pushpull_optim::volatile::Volatile;
use pushpull_store::change::{ByteSource, SharedInput, Stalled};
use pushpull_store::commit::Journal;
use pushpull_store::testing::planted::Bug;
use smallvec::SmallVec;

use super::Shard;
use super::applier::Applier;
use super::held_push::HeldPush;
use super::intake::Intake;
use super::mean::Sum;
use super::staleness::{StalenessAdjustment, TILE_BYTES};
use super::steps::Steps;
use super::update::{DenseInput, InputRange, InputValues, Update, UpdateProgress, UpdatePushes};
use super::variables::Variables;
use crate::aggregate::current_step::PerPush;
use crate::aggregate::step_follower::StepFollower;
use crate::inbox::{PushSource, PushValues};

/// The most gradients for which a slice extends to the end of a block, regardless of its budget.
const WHOLE_BLOCK_GRADIENTS_MAX: usize = 16;

/// A synchronous step that is being applied: the mean of its gradients, summed in order of
/// admission, is one gradient. A variable's mean is over the gradients that contain it.
#[derive(Debug)]
pub(super) struct StepJob {
    /// The slots of its pushes, in order of admission, and the factors of their gradients.
    pub(super) push_slots: PerPush<u32>,
    factors: PerPush<f64>,
    update: Update,
}

impl StepJob {
    /// Creates the job for the pushes in these slots, in this order, each times its factor.
    pub(super) fn new(push_slots: PerPush<u32>, factors: PerPush<f64>) -> StepJob {
        StepJob { push_slots, factors, update: Update::default() }
    }

    /// Returns whether the job has begun.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn has_begun(&self) -> bool {
        self.update.has_begun()
    }

    /// Applies a slice; returns whether the step is applied.
    pub(super) fn slice(
        &mut self,
        applier: &mut Applier,
        intake: &Intake,
        variables: &mut Variables,
        steps: &Steps,
        journal: &mut Journal,
    ) -> Result<bool, Stalled> {
        let (Some(inbox), true) = (&intake.inbox, variables.is_ready()) else { return Ok(true) };
        let (push_slots, factors) = (&self.push_slots[..], &self.factors[..]);
        let operation = Operation::Gradient {};
        let update = UpdatePushes { inbox, push_slots, factors, operation };
        if !self.update.has_begun() {
            let step = steps.follower.as_ref().map_or(0, StepFollower::step);
            let at = ApplyAt::new(variables.gradients + 1, step);
            let adjustment = StalenessAdjustment::none(at);
            self.update.begin(applier, variables, journal, update, adjustment, step)?;
        }
        let config = &variables.config;
        let total = config.rule().filter(|_| config.planted.has(Bug::MeanOfAll));
        let input = StepInput::new(update, total.map(|rule| rule.aggregate));
        let progress = self.update.slice(applier, variables, update, DenseInput::Step(&input))?;
        // A step is never refused: overflows are refused only in asynchronous mode.
        Ok(!matches!(progress, UpdateProgress::Unfinished))
    }
}

/// The gradients of a step.
pub(super) struct StepInput<'a> {
    pushes: PerPush<StepShare<'a>>,
    /// The divisor of every mean, under [`Bug::MeanOfAll`].
    planted_divisor: Option<u32>,
}

impl<'a> StepInput<'a> {
    /// Collects the gradients once per slice, because a step may have many pushes.
    fn new(update: UpdatePushes<'a>, planted_divisor: Option<u32>) -> StepInput<'a> {
        let UpdatePushes { inbox, push_slots, factors, .. } = update;
        let share = |(&push_slot, &factor): (&u32, &f64)| {
            let ranges = inbox.arrival(push_slot)?.extents.ranges();
            Some(StepShare { ranges, source: inbox.source(push_slot)?, factor })
        };
        let pushes = push_slots.iter().zip(factors).filter_map(share).collect();
        StepInput { pushes, planted_divisor }
    }

    /// Returns the mean at the start of a range, as far as one set of pushes contains it.
    pub(super) fn next<'i>(
        &'i self,
        range: Range<u64>,
        dtype: DType,
        budget: u64,
        block_bytes: u64,
        copy: &'i mut Vec<u64>,
    ) -> InputRange<'i> {
        let (pushes, start) = (&self.pushes[..], range.start);
        // With few gradients a range extends to the end of a block, so that each block is written
        // once. With many it may be shorter. Every range ends between two elements.
        let each = (budget / pushes.len().max(1) as u64).max(TILE_BYTES) / 8 * 8;
        let end = start.saturating_add(each);
        let end = match end - end % block_bytes {
            block if block > start => block,
            _ if pushes.len() <= WHOLE_BLOCK_GRADIENTS_MAX => {
                start - start % block_bytes + block_bytes
            }
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
        let gradients = pushes.iter().filter(|push| push.contains(start)).count();
        let values = (gradients > 0).then(|| {
            let divisor = self.planted_divisor.unwrap_or(gradients as u32);
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
        InputRange { end, read: (end - start) * gradients.max(1) as u64, values }
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
pub(super) struct StepMean<'a> {
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
    /// A step has been applied: releases its pushes.
    pub(super) fn step_applied(&mut self, now: Instant, push_slots: &[u32]) {
        self.count_overflow();
        self.variables.publish(&mut self.files);
        self.variables.version += 1;
        self.variables.gradients += 1;
        let Some(follower) = &mut self.steps.follower else { return };
        follower.applied();
        let step = follower.step();
        self.stamp_answers();
        self.counters.steps_applied.add(1);
        if let Some(inbox) = &mut self.intake.inbox {
            for &push_slot in push_slots {
                let extents = inbox.arrival(push_slot).map(|push| push.extents.ranges());
                self.variables.add_gradient(extents.unwrap_or_default());
                inbox.release(push_slot);
            }
        }
        self.report_untrained();
        // Pushes for the same step that were not admitted are released too, because their step has
        // passed.
        let passed = self.intake.inbox.iter().flat_map(|inbox| inbox.gradients_before(step));
        for push_slot in passed.collect::<Vec<u32>>() {
            let whole =
                self.intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot)?.whole);
            if whole.is_none() {
                self.counters.pushes_dropped.add(1);
            }
            let Shard { steps, intake, peers, out, .. } = self;
            HeldPush { push_slot }.drop_over(steps, intake, peers, out, now);
        }
        let own = self.steps.index_of(self.id);
        if let Some(owner) = &mut self.steps.owner {
            if let Some((coordinator, own)) = owner.coordinator_mut().zip(own) {
                coordinator.applied(own, step);
            }
            self.counters.global_step.set(step);
        }
        self.steps.report_applied(&mut self.out);
    }
}
