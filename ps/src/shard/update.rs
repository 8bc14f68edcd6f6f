//! An update of a shard's values: which dense ranges and rows it changes, how, and how far it is.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;
use pushpull_optim::optimizer::{ApplyAt, VariableRules};
use pushpull_store::change::{Change, Stalled};
use pushpull_store::commit::Journal;

use super::VariablesState;
use super::applier::Applier;
use super::dense_cursor::{DenseChange, DenseCursor, DenseInput};
use super::staleness::StalenessAdjustment;
use super::two_pass::TwoPass;
use super::variables::Variables;
use super::work::budget_of;
use crate::aggregate::step_coordinator::PerPush;
use crate::inbox::{Extents, Inbox};

/// An update of values by a whole push or by a synchronous step, applied in slices: first dense
/// ranges, then rows, then tables.
#[derive(Debug, Default)]
pub(super) struct Update {
    begun: bool,
    /// Decided when the update begins.
    adjustment: StalenessAdjustment,
    /// The dense ranges that it changes.
    dense: Extents,
    cursor: DenseCursor,
}

/// How far an update is after a slice.
#[derive(Debug)]
pub(super) enum UpdateProgress {
    Unfinished,
    Done,
    /// The update is refused and discarded.
    Refused(Refusal),
}

/// How an update changes values.
#[derive(Clone, Copy)]
pub(super) struct UpdateSpec<'a> {
    pub(super) rules: &'a VariableRules,
    pub(super) operation: Operation,
    pub(super) at: ApplyAt,
}

/// The pushes that make an update.
#[derive(Clone, Copy)]
pub(super) struct UpdatePushes<'a> {
    pub(super) inbox: &'a Inbox,
    /// Their slots, in the order of summation.
    pub(super) push_slots: &'a [u32],
    /// The factor of each push. Empty if all are 1.
    pub(super) factors: &'a [f64],
    pub(super) operation: Operation,
}

impl<'a> UpdateSpec<'a> {
    /// Returns the change of a partition.
    pub(super) fn change_of(self, partition: &Partition) -> Change<'a> {
        let (variable, dtype) = (partition.variable, partition.dtype);
        match self.operation {
            Operation::Gradient {} => {
                let at = self.at.at_rate(self.at.rate * self.rules.rate(variable));
                Change::Gradient { optimizer: self.rules.optimizer(variable), at, dtype }
            }
            Operation::AssignAdd {} => Change::Add { dtype },
            Operation::Assign {} => Change::Assign,
        }
    }
}

impl Update {
    /// Creates an update that was applied completely as its push arrived.
    pub(super) fn applied(adjustment: StalenessAdjustment) -> Update {
        Update { begun: true, adjustment, ..Update::default() }
    }

    /// Returns whether it has begun to change values.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    pub(super) fn adjustment(&self) -> &StalenessAdjustment {
        &self.adjustment
    }

    /// Begins to change values, at a global step. After an error it can be begun again.
    pub(super) fn begin(
        &mut self,
        applier: &mut Applier,
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
        applier.streaming = None;
        let (layout, rules, operation) = (store.layout(), &variables.rules, pushes.operation);
        self.dense.unite(&pushes.ranges(), layout);
        self.cursor = DenseCursor::new(TwoPass::new(layout, rules, operation));
        applier.rows.find(pushes, store, rules);
        let at = (step, variables.version + 1);
        let begun = applier.rows.begin(store, journal, self.dense.ranges(), at, operation);
        match begun {
            Ok(()) => (self.begun, self.adjustment) = (true, adjustment),
            Err(_) => store.discard(),
        }
        begun
    }

    /// Applies a slice. `input` has the dense values of the pushes.
    pub(super) fn slice(
        &mut self,
        applier: &mut Applier,
        variables: &mut Variables,
        pushes: UpdatePushes<'_>,
        input: &DenseInput<'_>,
    ) -> Result<UpdateProgress, Stalled> {
        let (adjustment, scratch) = (&self.adjustment, &mut applier.scratch);
        let Some(mut change) = DenseChange::new(variables, pushes.operation, adjustment, scratch)
        else {
            return Ok(UpdateProgress::Done);
        };
        let mut budget = budget_of(change.store);
        let ranges = self.dense.ranges();
        match self.cursor.advance(ranges, &mut change, input, &mut budget)? {
            UpdateProgress::Done => {}
            other => return Ok(other),
        }
        let rows_done = applier.rows.slice(&mut change, pushes, &mut budget)?;
        Ok(match change.refuse_overflow() {
            Some(refusal) => UpdateProgress::Refused(refusal),
            None if rows_done => UpdateProgress::Done,
            None => UpdateProgress::Unfinished,
        })
    }
}

impl<'a> UpdatePushes<'a> {
    /// Returns the ranges of each push.
    fn ranges(&self) -> PerPush<&'a [Range<u64>]> {
        let arrivals = self.push_slots.iter().filter_map(|&slot| self.inbox.arrival(slot));
        arrivals.map(|push| push.extents.ranges()).collect()
    }
}
