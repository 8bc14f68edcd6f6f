//! What an update needs: the pushes that make it, the values that it changes, and scratch memory.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;
use pushpull_optim::optimizer::{ApplyAt, VariableRules};
use pushpull_store::change::Change;
use pushpull_store::store::{Overflow, Store};

use super::fused_ranges::FusedRanges;
use super::variables::{Variables, VariablesState};
use crate::aggregate::current_step::PerPush;
use crate::config::PsConfig;
use crate::inbox::Inbox;
use crate::metrics::Counters;

/// The position of an update in the training.
#[derive(Clone, Copy)]
pub(in crate::shard) struct UpdateNumbers {
    /// The global step.
    pub(in crate::shard) step: u64,
    /// The version that the update makes.
    pub(in crate::shard) version: u64,
    /// The number of the gradient, or of the next one for an assignment.
    pub(in crate::shard) count: u64,
}

/// How an update changes values.
#[derive(Clone, Copy)]
pub(in crate::shard) struct UpdateSpec<'a> {
    pub(in crate::shard) rules: &'a VariableRules,
    pub(in crate::shard) operation: Operation,
    pub(in crate::shard) at: ApplyAt,
}

/// The pushes that make an update.
#[derive(Clone, Copy)]
pub(in crate::shard) struct UpdatePushes<'a> {
    pub(in crate::shard) inbox: &'a Inbox,
    /// Their slots, in the order of summation.
    pub(in crate::shard) push_slots: &'a [u32],
    /// The factor of each push. Empty if all are 1.
    pub(in crate::shard) factors: &'a [f64],
    pub(in crate::shard) operation: Operation,
}

/// The values that an update changes, and what it needs for that.
pub(in crate::shard) struct UpdateTarget<'a> {
    pub(in crate::shard) store: &'a mut Store,
    pub(in crate::shard) spec: UpdateSpec<'a>,
    pub(in crate::shard) config: &'a PsConfig,
    pub(in crate::shard) scratch: &'a mut Scratch,
    pub(super) fused_ranges: &'a FusedRanges,
    pub(super) counters: &'a Counters,
}

/// Scratch memory of updates.
#[derive(Debug, Default)]
pub(in crate::shard) struct Scratch {
    /// For elements that are computed from a gradient.
    pub(in crate::shard) tile: Vec<u64>,
    /// For elements copied from a push buffer.
    pub(in crate::shard) shared_tile: Vec<u64>,
}

impl<'a> UpdateSpec<'a> {
    /// Returns the change of a partition.
    pub(in crate::shard) fn change_of(self, partition: &Partition) -> Change<'a> {
        let variable = partition.variable;
        let dtype = partition.dtype;
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

impl<'a> UpdatePushes<'a> {
    /// Returns the ranges of each push.
    pub(super) fn ranges(&self) -> PerPush<&'a [Range<u64>]> {
        let arrivals = self.push_slots.iter().filter_map(|&slot| self.inbox.arrival(slot));
        arrivals.map(|push| push.extents.ranges()).collect()
    }
}

impl<'a> UpdateTarget<'a> {
    /// Creates the target of an update. `None` if no variables are declared.
    pub(in crate::shard) fn new(
        variables: &'a mut Variables,
        operation: Operation,
        at: ApplyAt,
        scratch: &'a mut Scratch,
    ) -> Option<UpdateTarget<'a>> {
        let Variables { state, rules, fused_ranges, config, counters, .. } = variables;
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = state else {
            return None;
        };
        let spec = UpdateSpec { rules, operation, at };
        Some(UpdateTarget { store, spec, config, scratch, fused_ranges, counters })
    }

    /// Abandons a change that has made a value infinite or NaN, if such changes are refused.
    /// Returns the refusal.
    pub(super) fn refuse_overflow(&mut self) -> Option<Refusal> {
        let overflow = self.store.overflow().filter(|_| self.config.refuses_overflows())?;
        if !self.store.abandon_change() {
            return None;
        }
        self.counters.overflows_refused.add(1);
        let Overflow { variable, element, value } = overflow;
        Some(Refusal::Overflow { variable, element, value })
    }
}
