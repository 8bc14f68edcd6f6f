//! The summing pass over a whole variable that some optimizers need before they change it.

use std::collections::BTreeMap;
use std::ops::Range;

use pushpull_common::catalogue::{Partition, ShardLayout};
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::Operation;
use pushpull_optim::optimizer::{Sums, VariableRules};
use pushpull_store::change::NoFreeBlock;
use pushpull_store::store::{ChangeInput, Store};

use super::update::UpdateSpec;

/// The passes over the values of a shard: one, or two if an optimizer needs sums over whole
/// variables first.
#[derive(Debug, Default)]
pub(super) struct TwoPass {
    /// Whether the current pass only adds up and changes nothing.
    is_summing: bool,
    sums: BTreeMap<VariableId, Sums>,
}

impl TwoPass {
    /// Chooses the passes of an operation on the variables of this layout.
    pub(super) fn new(
        layout: &ShardLayout,
        rules: &VariableRules,
        operation: Operation,
    ) -> TwoPass {
        let is_summing = operation == Operation::Gradient {} && rules.sum_any(layout);
        TwoPass { is_summing, sums: BTreeMap::new() }
    }

    /// Ends a pass; returns whether another follows.
    pub(super) fn end_pass(&mut self) -> bool {
        std::mem::take(&mut self.is_summing)
    }

    /// Returns whether this pass skips a partition.
    pub(super) fn skips(&self, rules: &VariableRules, partition: &Partition) -> bool {
        self.is_summing && !rules.sums(partition)
    }

    /// Returns whether this pass changes values.
    pub(super) fn changes_values(&self) -> bool {
        !self.is_summing
    }

    /// Processes a range of a partition in this pass.
    pub(super) fn apply(
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
