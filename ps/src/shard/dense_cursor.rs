//! The loop over the dense ranges of an update, which whole pushes, synchronous steps and parts on
//! arrival share.

use std::ops::Range;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;
use pushpull_store::change::NoFreeBlock;
use pushpull_store::store::{ChangeInput, Store};

use super::VariablesState;
use super::checks::overflow_refusal;
use super::fused_ranges::FusedRanges;
use super::push_job::PushInput;
use super::scan::{NonFiniteElement, NonFiniteScan, ScanningInput};
use super::staleness::StalenessAdjustment;
use super::step_job::{StepInput, StepMean};
use super::two_pass::TwoPass;
use super::update::{UpdateProgress, UpdateSpec};
use super::variables::Variables;
use crate::config::{NonFinite, PsConfig};
use crate::metrics::Counters;

/// A position in the dense ranges of an update, and the passes over them.
#[derive(Debug, Default)]
pub(super) struct DenseCursor {
    two_pass: TwoPass,
    /// The index of the current range, and the byte of the layout up to which it is changed.
    range: usize,
    done_to: u64,
}

/// What an update changes, and how.
pub(super) struct DenseChange<'a> {
    pub(super) store: &'a mut Store,
    pub(super) spec: UpdateSpec<'a>,
    fused_ranges: &'a FusedRanges,
    adjustment: &'a StalenessAdjustment,
    pub(super) config: &'a PsConfig,
    counters: &'a Counters,
    pub(super) scratch: &'a mut Scratch,
    /// Whether an update that makes a value infinite or NaN is refused.
    refuses_overflows: bool,
}

/// Scratch memory of updates.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// For elements that are computed from a gradient.
    pub(super) tile: Vec<u64>,
    /// For elements copied from a push buffer.
    pub(super) shared_tile: Vec<u64>,
}

/// The values that an update takes.
pub(super) enum DenseInput<'a> {
    Push(PushInput<'a>),
    Step(StepInput<'a>),
}

/// A range of one type to be changed at once.
pub(super) struct InputRange<'a> {
    pub(super) end: u64,
    /// The bytes that are read, which count towards the budget of a slice.
    pub(super) read: u64,
    /// `None` if no push contains the range.
    pub(super) values: Option<InputValues<'a>>,
}

/// The values for a range.
pub(super) enum InputValues<'a> {
    Bytes(&'a [u8]),
    Scanned(ScanningInput<'a>),
    Mean(StepMean<'a>),
}

impl DenseCursor {
    /// Starts at the first range.
    pub(super) fn new(two_pass: TwoPass) -> DenseCursor {
        DenseCursor { two_pass, range: 0, done_to: 0 }
    }

    /// Changes these ranges from the current position on, until the budget is used up. Each call
    /// for an update passes the same ranges.
    ///
    /// A refused change is discarded.
    pub(super) fn advance(
        &mut self,
        ranges: &[Range<u64>],
        change: &mut DenseChange<'_>,
        input: &DenseInput<'_>,
        budget: &mut u64,
    ) -> Result<UpdateProgress, NoFreeBlock> {
        loop {
            let Some(range) = ranges.get(self.range) else {
                if !self.two_pass.end_pass() {
                    return Ok(UpdateProgress::Done);
                }
                (self.range, self.done_to) = (0, 0);
                continue;
            };
            let left = self.done_to.max(range.start)..range.end;
            // The end of a range may be padding, or a partition without elements.
            let Some(fused_range) = change.fused_ranges.within(left.clone()).next() else {
                self.range += 1;
                continue;
            };
            if *budget == 0 {
                return Ok(UpdateProgress::Unfinished);
            }
            let partition = fused_range.partition(change.store.layout()).clone();
            if self.two_pass.skips(change.spec.rules, &partition) {
                self.done_to = fused_range.range.end;
                continue;
            }
            let part = fused_range.part_of(&left);
            let block_bytes = change.store.geometry().block_bytes as u64;
            let Scratch { tile, shared_tile } = &mut *change.scratch;
            let (dtype, config) = (partition.dtype, change.config);
            let InputRange { end, read, values } = match input {
                DenseInput::Push(push) => {
                    let scan =
                        NonFiniteScan { policy: config.non_finite, counters: change.counters };
                    // The client may change the values between two passes. Both passes scan if
                    // non-finite values are refused; only the pass that changes values counts them.
                    let scans = scan.policy == NonFinite::Reject || self.two_pass.changes_values();
                    push.next(part.clone(), dtype, *budget, Some(scan).filter(|_| scans))
                }
                DenseInput::Step(step) => {
                    step.next(part.clone(), dtype, *budget, block_bytes, shared_tile)
                }
            };
            let (two_pass, spec, store) = (&mut self.two_pass, change.spec, &mut *change.store);
            let change_values = |mut values: InputValues<'_>| {
                let (range, input) = (part.start..end, values.input());
                let take = |store: &mut Store, range, input: ChangeInput<'_>| {
                    two_pass.apply(store, spec, &partition, range, input)
                };
                change.adjustment.each(store, dtype, range, input, tile, take)?;
                Ok(values.found())
            };
            if let Some(found) = values.map(change_values).transpose()?.flatten() {
                change.store.discard();
                return Ok(UpdateProgress::Refused(found.refusal(change.store.layout())));
            }
            if let Some(refusal) = change.refuse_overflow() {
                return Ok(UpdateProgress::Refused(refusal));
            }
            // Rounded to words, so that the next slice starts with an element of any type.
            *budget = budget.saturating_sub(read.next_multiple_of(8).max(8));
            self.done_to = end;
        }
    }
}

impl<'a> DenseChange<'a> {
    /// Creates the change by one operation with this adjustment. `None` if no variables are
    /// declared.
    pub(super) fn new(
        variables: &'a mut Variables,
        operation: Operation,
        adjustment: &'a StalenessAdjustment,
        scratch: &'a mut Scratch,
    ) -> Option<DenseChange<'a>> {
        let Variables { state, rules, fused_ranges, config, counters, .. } = variables;
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = state else {
            return None;
        };
        let spec = UpdateSpec { rules, operation, at: adjustment.at };
        let refuses_overflows = config.refuses_overflows();
        Some(DenseChange {
            store,
            spec,
            fused_ranges,
            adjustment,
            config,
            counters,
            scratch,
            refuses_overflows,
        })
    }

    /// Abandons a change that has made a value infinite or NaN, if such changes are refused.
    /// Returns the refusal.
    pub(super) fn refuse_overflow(&mut self) -> Option<Refusal> {
        let overflow = self.store.overflow().filter(|_| self.refuses_overflows)?;
        if !self.store.abandon_change() {
            return None;
        }
        self.counters.overflows_refused.add(1);
        Some(overflow_refusal(overflow))
    }
}

impl InputValues<'_> {
    fn input(&mut self) -> ChangeInput<'_> {
        match self {
            InputValues::Bytes(bytes) => (*bytes).into(),
            InputValues::Scanned(scanning) => ChangeInput::Source(scanning),
            InputValues::Mean(mean) => ChangeInput::Source(mean),
        }
    }

    /// Returns the element to refuse among those that were read.
    fn found(&self) -> Option<NonFiniteElement> {
        match self {
            InputValues::Scanned(scanning) => scanning.found(),
            InputValues::Bytes(_) | InputValues::Mean(_) => None,
        }
    }
}
