//! The pass that some rules need over a whole variable before they change any of it.

use std::collections::BTreeMap;
use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::Operation;

use super::work::change_of;
use crate::optimizer::{ApplyAt, Sums, VariableRules};
use crate::store::{ChangeInput, NoFreeBlock, Store};

/// What a gradient does to the values of a shard, in one pass, or in two where a rule must know sums
/// over whole variables first.
#[derive(Debug, Default)]
pub(super) struct TwoPass {
    /// Whether the pass that adds up is under way, and nothing is changed yet.
    adding_up: bool,
    sums: BTreeMap<VariableId, Sums>,
}

impl TwoPass {
    /// For what is done to the variables of this layout.
    pub(super) fn new(
        layout: &ShardLayout,
        rules: &VariableRules,
        operation: Operation,
    ) -> TwoPass {
        let adding_up = operation == Operation::Gradient {} && rules.sum_any(layout);
        TwoPass { adding_up, sums: BTreeMap::new() }
    }

    /// Whether another pass follows the one that has come to its end.
    pub(super) fn next(&mut self) -> bool {
        std::mem::take(&mut self.adding_up)
    }

    /// Whether this pass passes a partition over.
    pub(super) fn skips(&self, rules: &VariableRules, partition: &Partition) -> bool {
        self.adding_up && !rules.sums(partition)
    }

    /// Whether this pass changes values.
    pub(super) fn changes(&self) -> bool {
        !self.adding_up
    }

    /// Takes a range of a partition in this pass.
    pub(super) fn take(
        &mut self,
        store: &mut Store,
        (rules, operation, at): (&VariableRules, Operation, ApplyAt),
        partition: &Partition,
        range: Range<u64>,
        input: ChangeInput<'_>,
    ) -> Result<(), NoFreeBlock> {
        // What is added up now is told when it is whole.
        let at = match self.sums.get(&partition.variable).filter(|_| !self.adding_up) {
            Some(sums) => ApplyAt { sums: sums.totals(), ..at },
            None => at,
        };
        let change = change_of(rules, operation, at, partition);
        if !self.adding_up {
            return store.change(change, range, input);
        }
        store.add_up(change, range, input, self.sums.entry(partition.variable).or_default());
        Ok(())
    }
}
