//! [`ReplicaValuePlan`]: the schedule by which a replica averages and publishes its own values.

use pushpull_common::variable::{Replication, VariableSpec};

use super::next_action::NextAction;

/// The schedule by which a replica averages its means, and the chief publishes its local values.
///
/// Invariants: an average is due at most once for each step; the chief publishes again only after
/// its values may have changed.
#[derive(Debug, Default)]
pub(super) struct ReplicaValuePlan {
    /// The distinct intervals of the means.
    intervals: Vec<u64>,
    /// Whether this worker publishes: it is the chief, and there are local variables.
    publishes: bool,
    /// The number of steps of this worker for which an average is due.
    due: Option<u64>,
    /// Whether the local values may differ from those of the servers.
    is_changed: bool,
}

impl ReplicaValuePlan {
    pub(super) fn new(variables: &[VariableSpec], is_chief: bool) -> ReplicaValuePlan {
        let replications = || variables.iter().map(VariableSpec::replication);
        let every = |replication| match replication {
            Replication::Mean { every } => Some(every),
            Replication::Shared | Replication::Local => None,
        };
        let mut intervals: Vec<u64> = replications().filter_map(every).collect();
        intervals.sort_unstable();
        intervals.dedup();
        let publishes = is_chief && replications().any(|it| it == Replication::Local);
        ReplicaValuePlan { intervals, publishes, due: None, is_changed: false }
    }

    /// Records a join. The means are those of the servers. The local values may be older ones of
    /// this replica, unless it is the first join.
    pub(super) fn joined(&mut self, is_first: bool) {
        self.due = None;
        self.is_changed = !is_first;
    }

    /// Records that the caller may change its values.
    pub(super) fn computing(&mut self) {
        self.is_changed = true;
    }

    /// Records the end of a step of this worker, its `steps`th.
    pub(super) fn stepped(&mut self, steps: u64) {
        if self.intervals.iter().any(|&every| steps.is_multiple_of(every)) {
            self.due = Some(steps);
        }
    }

    /// Returns the number of steps for which an average is due.
    pub(super) fn due(&self) -> Option<u64> {
        self.due
    }

    /// Records that the means were averaged.
    pub(super) fn averaged(&mut self) {
        self.due = None;
    }

    /// Whether to publish before the servers are asked for a checkpoint, or left.
    pub(super) fn must_publish(&self) -> bool {
        self.publishes && self.is_changed
    }

    /// Returns the next operation of a checkpoint, which has the chief's newest local values.
    pub(super) fn next_save(&self) -> NextAction {
        match self.must_publish() {
            true => NextAction::Publish,
            false => NextAction::Save,
        }
    }

    /// Records that the servers have the local values, or cannot be given them.
    pub(super) fn published(&mut self) {
        self.is_changed = false;
    }
}
