//! The trained variables that have not got a gradient yet.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::ids::VariableId;
use pushpull_optim::optimizer::VariableRules;

/// The number of updates after which a variable without a gradient is reported.
pub(in crate::shard) const WATCHED_UPDATES: u32 = 100;

/// The most variables of a shard that are reported.
const REPORTED_MAX: usize = 16;

/// The trained variables of a shard that no update of this process has changed, during its first
/// [`WATCHED_UPDATES`] updates.
///
/// Costs nothing once every variable has a gradient, usually with the first push.
#[derive(Debug, Default)]
pub(in crate::shard) struct UntrainedVariables {
    variables: BTreeSet<VariableId>,
    updates: u32,
}

impl UntrainedVariables {
    /// Watches the variables of a layout that gradients change.
    pub(in crate::shard) fn new(layout: &ShardLayout, rules: &VariableRules) -> UntrainedVariables {
        let trained = layout.all().iter().filter(|partition| {
            partition.trainable && partition.bytes > 0 && rules.rate(partition.variable) != 0.0
        });
        let variables = trained.map(|partition| partition.variable).collect();
        UntrainedVariables { variables, updates: 0 }
    }

    /// Records the ranges of a gradient in the next update.
    pub(super) fn add_gradient(&mut self, layout: &ShardLayout, ranges: &[Range<u64>]) {
        if self.variables.is_empty() {
            return;
        }
        for partition in ranges.iter().flat_map(|range| layout.touched(range.clone())) {
            self.variables.remove(&partition.variable);
        }
    }

    /// Counts an update. Returns the variables to report with the number of updates, and watches no
    /// more then.
    pub(super) fn end_update(&mut self) -> Vec<(VariableId, u32)> {
        if self.variables.is_empty() {
            return Vec::new();
        }
        self.updates += 1;
        if self.updates < WATCHED_UPDATES {
            return Vec::new();
        }
        let variables = std::mem::take(&mut self.variables);
        variables.into_iter().take(REPORTED_MAX).map(|it| (it, WATCHED_UPDATES)).collect()
    }
}
