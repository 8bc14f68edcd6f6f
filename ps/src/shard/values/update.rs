//! An update of a shard's values: which dense ranges and rows it changes, and how far it is.
//!
//! One loop changes the dense ranges, for whole pushes, synchronous steps and parts on arrival. It
//! runs twice if a rule needs sums over whole variables before it changes them.

use std::collections::BTreeMap;
use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;
use pushpull_optim::optimizer::{Sums, VariableRules};
use pushpull_store::change::{ChangeInput, NoFreeBlock, Stalled};
use pushpull_store::commit::Journal;
use pushpull_store::store::Store;

use super::budget_of;
use super::dense_input::{DenseInput, InputRange, InputValues, RangeLimits};
use super::rows::RowWork;
use super::scan::NonFiniteScan;
use super::staleness::StalenessAdjustment;
use super::update_target::{Scratch, UpdateNumbers, UpdatePushes, UpdateSpec, UpdateTarget};
use super::variables::{Variables, VariablesState};
use crate::config::NonFinite;
use crate::inbox::Extents;

/// An update by a push or by a synchronous step, applied in slices: first dense ranges, then rows,
/// then tables.
#[derive(Debug, Default)]
pub(in crate::shard) struct Update {
    begun: bool,
    /// Decided when the update begins.
    pub(in crate::shard) adjustment: StalenessAdjustment,
    two_pass: TwoPass,
    /// The dense ranges that it changes.
    dense: Extents,
    /// The index of the current range, and the byte of the layout up to which it is changed.
    range: usize,
    done_to: u64,
}

/// The memory of updates, one of which is under way at a time.
#[derive(Debug, Default)]
pub(in crate::shard) struct UpdateMemory {
    /// The rows that the current push or step changes.
    pub(in crate::shard) rows: RowWork,
    pub(in crate::shard) scratch: Scratch,
}

/// The passes over the values of a shard: one, or two if an optimizer needs sums over whole
/// variables first.
#[derive(Debug, Default)]
struct TwoPass {
    /// Whether the current pass only adds up and changes nothing.
    is_summing: bool,
    sums: BTreeMap<VariableId, Sums>,
}

/// How far an update is after a slice.
#[derive(Debug)]
pub(in crate::shard) enum UpdateProgress {
    Unfinished,
    Done,
    /// The update is refused and discarded.
    Refused(Refusal),
}

impl Update {
    /// Creates an update whose adjustment is known before it begins.
    pub(in crate::shard) fn new(adjustment: StalenessAdjustment) -> Update {
        Update { adjustment, ..Update::default() }
    }

    /// Returns whether it has begun to change values.
    pub(in crate::shard) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Begins to change the dense ranges and the rows of these pushes, at a global step. After an
    /// error it can be begun again.
    pub(in crate::shard) fn begin(
        &mut self,
        rows: &mut RowWork,
        variables: &mut Variables,
        journal: &mut Journal,
        pushes: UpdatePushes<'_>,
        adjustment: StalenessAdjustment,
        step: u64,
    ) -> Result<(), Stalled> {
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = &mut variables.state
        else {
            return Ok(());
        };
        let layout = store.layout();
        let rules = &variables.rules;
        let operation = pushes.operation;
        self.dense.unite(&pushes.ranges(), layout);
        self.two_pass = TwoPass::new(layout, rules, operation);
        rows.find(pushes, store, rules);
        let version = variables.version + 1;
        let count = variables.gradients + 1;
        let at = UpdateNumbers { step, version, count };
        let begun = rows.begin(store, journal, self.dense.ranges(), at, operation);
        match begun {
            Ok(()) => (self.begun, self.adjustment) = (true, adjustment),
            Err(_) => store.discard(),
        }
        begun
    }

    /// Applies a slice. `input` has the dense values of the pushes.
    pub(in crate::shard) fn slice(
        &mut self,
        UpdateMemory { rows, scratch }: &mut UpdateMemory,
        variables: &mut Variables,
        pushes: UpdatePushes<'_>,
        input: DenseInput<'_>,
    ) -> Result<UpdateProgress, Stalled> {
        let operation = pushes.operation;
        let at = self.adjustment.at;
        let Some(mut target) = UpdateTarget::new(variables, operation, at, scratch) else {
            return Ok(UpdateProgress::Done);
        };
        let mut budget = budget_of(target.store);
        match self.change_dense(&mut target, input, &mut budget)? {
            UpdateProgress::Done => {}
            other => return Ok(other),
        }
        let rows_done = rows.slice(&mut target, pushes, &mut budget)?;
        Ok(match target.refuse_overflow() {
            Some(refusal) => UpdateProgress::Refused(refusal),
            None if rows_done => UpdateProgress::Done,
            None => UpdateProgress::Unfinished,
        })
    }

    /// Applies a part of a push that arrives, into shadow blocks.
    pub(in crate::shard) fn apply_part(
        &mut self,
        target: &mut UpdateTarget<'_>,
        input: DenseInput<'_>,
        part: &Range<u64>,
    ) -> Result<UpdateProgress, NoFreeBlock> {
        target.store.can_change(std::iter::once(part.clone()))?;
        self.begun = true;
        self.range = 0;
        self.done_to = 0;
        self.dense = Extents::default();
        self.dense.add(part.clone());
        let mut budget = u64::MAX;
        self.change_dense(target, input, &mut budget)
    }

    /// Changes the dense ranges from the current position on, until the budget is used up. A
    /// refused change is discarded.
    fn change_dense(
        &mut self,
        target: &mut UpdateTarget<'_>,
        input: DenseInput<'_>,
        budget: &mut u64,
    ) -> Result<UpdateProgress, NoFreeBlock> {
        while let Some((part, partition)) = self.next_part(target) {
            if *budget == 0 {
                return Ok(UpdateProgress::Unfinished);
            }
            let block_bytes = target.store.geometry().block_bytes as u64;
            let Scratch { tile, shared_tile } = &mut *target.scratch;
            let dtype = partition.dtype;
            let config = target.config;
            let scan = NonFiniteScan { policy: config.non_finite, counters: target.counters };
            // The client may change the values between two passes. Both passes scan if non-finite
            // values are refused; only the pass that changes values counts them.
            let scans = scan.policy == NonFinite::Reject || self.two_pass.changes_values();
            let scan = Some(scan).filter(|_| scans);
            let limits = RangeLimits { budget: *budget, block_bytes };
            let InputRange { end, read, values } =
                input.next(part.clone(), dtype, limits, scan, shared_tile);
            let two_pass = &mut self.two_pass;
            let adjustment = &self.adjustment;
            let spec = target.spec;
            let store = &mut *target.store;
            let change_values = |mut values: InputValues<'_>| {
                let range = part.start..end;
                let input = values.input();
                let take = |store: &mut Store, range, input: ChangeInput<'_>| {
                    two_pass.apply(store, spec, &partition, range, input)
                };
                adjustment.each(store, dtype, range, input, tile, take)?;
                Ok(values.found())
            };
            if let Some(found) = values.map(change_values).transpose()?.flatten() {
                target.store.discard();
                return Ok(UpdateProgress::Refused(found.refusal(target.store.layout())));
            }
            if let Some(refusal) = target.refuse_overflow() {
                return Ok(UpdateProgress::Refused(refusal));
            }
            // Rounded to words, so that the next slice starts with an element of any type.
            *budget = budget.saturating_sub(read.next_multiple_of(8).max(8));
            self.done_to = end;
        }
        Ok(UpdateProgress::Done)
    }

    /// Returns the next part of a dense range that this pass changes, and its partition: as much as
    /// is in one fused range. `None` after the last pass.
    fn next_part(&mut self, target: &UpdateTarget<'_>) -> Option<(Range<u64>, Partition)> {
        loop {
            let Some(range) = self.dense.ranges().get(self.range) else {
                if !self.two_pass.end_pass() {
                    return None;
                }
                self.range = 0;
                self.done_to = 0;
                continue;
            };
            let left = self.done_to.max(range.start)..range.end;
            // The end of a range may be padding, or a partition without elements.
            let Some(fused_range) = target.fused_ranges.within(left.clone()).next() else {
                self.range += 1;
                continue;
            };
            let partition = fused_range.partition(target.store.layout());
            if !self.two_pass.skips(target.spec.rules, partition) {
                return Some((fused_range.part_of(&left), partition.clone()));
            }
            self.done_to = fused_range.range.end;
        }
    }
}

impl TwoPass {
    /// Chooses the passes of an operation on the variables of this layout.
    fn new(layout: &ShardLayout, rules: &VariableRules, operation: Operation) -> TwoPass {
        let is_summing = operation == Operation::Gradient {} && rules.sum_any(layout);
        TwoPass { is_summing, sums: BTreeMap::new() }
    }

    /// Ends a pass; returns whether another follows.
    fn end_pass(&mut self) -> bool {
        std::mem::take(&mut self.is_summing)
    }

    /// Returns whether this pass skips a partition.
    fn skips(&self, rules: &VariableRules, partition: &Partition) -> bool {
        self.is_summing && !rules.sums(partition)
    }

    /// Returns whether this pass changes values.
    fn changes_values(&self) -> bool {
        !self.is_summing
    }

    /// Processes a range of a partition in this pass.
    fn apply(
        &mut self,
        store: &mut Store,
        mut spec: UpdateSpec<'_>,
        partition: &Partition,
        range: Range<u64>,
        input: ChangeInput<'_>,
    ) -> Result<(), NoFreeBlock> {
        // The sums are complete, and passed on, only after the summing pass.
        if let Some(sums) = self.sums.get(&partition.variable).filter(|_| !self.is_summing) {
            spec.at = spec.at.with_sums(sums.totals());
        }
        let change = spec.change_of(partition);
        if !self.is_summing {
            return store.change(change, range, input);
        }
        store.add_up(change, range, input, self.sums.entry(partition.variable).or_default());
        Ok(())
    }
}
