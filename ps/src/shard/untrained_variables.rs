//! The trained variables that have not got a gradient yet.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::ids::VariableId;
use pushpull_optim::optimizer::VariableRules;

use super::Shard;
use super::output::ShardOutput;
use super::variables::{Variables, VariablesState};
use crate::event::Event;

/// The number of updates after which a variable without a gradient is reported.
pub(super) const WATCHED_UPDATES: u32 = 100;

/// The trained variables of a shard that no update of this process has changed, during its first
/// [`WATCHED_UPDATES`] updates.
///
/// Costs nothing once every variable has a gradient, usually with the first push.
#[derive(Debug, Default)]
pub(super) struct UntrainedVariables {
    variables: BTreeSet<VariableId>,
    updates: u32,
}

impl UntrainedVariables {
    /// Watches the variables of a layout that gradients change.
    pub(super) fn new(layout: &ShardLayout, rules: &VariableRules) -> UntrainedVariables {
        let trained = layout.all().iter().filter(|partition| {
            partition.trainable && partition.bytes > 0 && rules.rate(partition.variable) != 0.0
        });
        let variables = trained.map(|partition| partition.variable).collect();
        UntrainedVariables { variables, updates: 0 }
    }

    /// Returns whether some variable has got no gradient.
    pub(super) fn is_watching(&self) -> bool {
        !self.variables.is_empty()
    }

    /// Records the ranges of a gradient in the next update.
    fn add_gradient(&mut self, layout: &ShardLayout, ranges: &[Range<u64>]) {
        for partition in ranges.iter().flat_map(|range| layout.touched(range.clone())) {
            self.variables.remove(&partition.variable);
        }
    }

    /// Counts an update. Returns the variables to report, and watches no more then.
    pub(super) fn end_update(&mut self) -> BTreeSet<VariableId> {
        self.updates += 1;
        match self.updates >= WATCHED_UPDATES {
            true => std::mem::take(&mut self.variables),
            false => BTreeSet::new(),
        }
    }
}

/// The most variables of a shard that are reported.
const REPORTED_MAX: usize = 16;

impl Variables {
    /// Records the ranges of a gradient in the next update.
    pub(super) fn add_gradient(&mut self, ranges: &[Range<u64>]) {
        if let VariablesState::Ready(store) = &self.state
            && self.untrained.is_watching()
        {
            self.untrained.add_gradient(store.layout(), ranges);
        }
    }
}

impl Shard {
    /// Counts an update that is applied, and reports the variables that none has changed.
    pub(super) fn report_untrained(&mut self) {
        if !self.variables.untrained.is_watching() {
            return;
        }
        let untrained = self.variables.untrained.end_update();
        let Some(store) = self.variables.store() else { return };
        for variable in untrained.into_iter().take(REPORTED_MAX) {
            let variable = store.catalogue().variable(variable).name().to_owned();
            let (shard, updates) = (self.id, WATCHED_UPDATES);
            let event = Event::NeverTrained { shard, variable, updates };
            self.out.push(ShardOutput::Event(event));
        }
    }
}
