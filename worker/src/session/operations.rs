//! The operations that callers wait for, with their deadlines.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::Sequence;

use super::OpId;
use crate::error::{Error, UnresponsiveShards};
use crate::gradients::sharding_plan::ShardingPlan;

/// An unanswered operation.
#[derive(Debug)]
pub(super) struct PendingOperation {
    pub(super) kind: OperationKind,
    pub(super) doing: &'static str,
    pub(super) since: Instant,
    pub(super) deadline: Instant,
}

/// What an operation waits for. Requests and pulls have owners of their own.
#[derive(Clone, Debug)]
pub(super) enum OperationKind {
    Open {
        links: Vec<usize>,
    },
    /// Waits until all shards of a plan are in one restore epoch.
    Join {
        plan: Arc<ShardingPlan>,
        links: Vec<usize>,
    },
    Request,
    Token,
    Pull,
    /// Waits for a push. If `owns`, cancelling the wait cancels the push.
    Push {
        sequence: Sequence,
        owns: bool,
    },
}

impl PendingOperation {
    /// Returns the time left until the deadline, for the header of a request that waits on the
    /// server.
    pub(super) fn deadline_ms(&self, now: Instant) -> u32 {
        let left = self.deadline.saturating_duration_since(now).as_millis();
        u32::try_from(left.saturating_sub(ANSWER_MARGIN_MS).max(1)).unwrap_or(u32::MAX)
    }

    /// Returns the error of an operation that has waited in vain.
    pub(super) fn timeout(&self, now: Instant, awaited: UnresponsiveShards) -> Error {
        let sequence = self.sequence();
        let waited = now.saturating_duration_since(self.since);
        Error::Timeout { doing: self.doing, waited, awaited, sequence }
    }

    /// Returns the error of an operation that waits for a step with too few replicas.
    pub(super) fn without_replicas(&self, waited: Duration, awaited: String) -> Error {
        let sequence = self.sequence();
        Error::ReplicasAbsent { doing: self.doing, waited, awaited, sequence }
    }

    /// The sequence number of the push that it waits for.
    fn sequence(&self) -> Option<Sequence> {
        match self.kind {
            OperationKind::Push { sequence, .. } => Some(sequence),
            _ => None,
        }
    }

    fn waits_for(&self, push: Sequence) -> bool {
        matches!(self.kind, OperationKind::Push { sequence, .. } if sequence == push)
    }
}

/// All unanswered operations, in the order of their numbers.
///
/// Invariant: an operation is here from its command until its answer or its cancellation.
#[derive(Debug, Default)]
pub(super) struct PendingOperations(BTreeMap<OpId, PendingOperation>);

impl PendingOperations {
    pub(super) fn add(&mut self, id: OpId, operation: PendingOperation) {
        self.0.insert(id, operation);
    }

    pub(super) fn remove(&mut self, id: OpId) -> Option<PendingOperation> {
        self.0.remove(&id)
    }

    pub(super) fn get(&self, id: OpId) -> Option<&PendingOperation> {
        self.0.get(&id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn first(&self) -> Option<OpId> {
        self.0.first_key_value().map(|(&id, _)| id)
    }

    /// Returns the next operation. A number instead of an iterator: each step may end operations.
    pub(super) fn after(&self, id: OpId) -> Option<OpId> {
        self.0.range(OpId(id.0 + 1)..).next().map(|(&next, _)| next)
    }

    /// Returns the earliest deadline.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.0.values().map(|operation| operation.deadline).min()
    }

    /// Returns the operations whose deadlines have passed.
    pub(super) fn due(&self, now: Instant) -> Vec<OpId> {
        let due = self.0.iter().filter(|(_, operation)| operation.deadline <= now);
        due.map(|(&id, _)| id).collect()
    }

    /// Returns the operations that wait for a push.
    pub(super) fn waiting_for(&self, push: Sequence) -> impl Iterator<Item = OpId> + '_ {
        self.0.iter().filter(move |(_, operation)| operation.waits_for(push)).map(|(&id, _)| id)
    }

    /// Returns the longest time that an operation still waits for a push, for the header of its
    /// last part; 0 if none waits and the answer has no deadline.
    pub(super) fn remaining_ms(&self, now: Instant, push: Sequence) -> u32 {
        let waiting = self.0.values().filter(|operation| operation.waits_for(push));
        waiting.map(|operation| operation.deadline_ms(now)).max().unwrap_or(0)
    }
}

/// How long before a request's deadline the server stops waiting, so that its answer, which names
/// what it waited for, still arrives in time.
const ANSWER_MARGIN_MS: u128 = 50;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn operation(kind: OperationKind, since: Instant, seconds: u64) -> PendingOperation {
        let deadline = since + Duration::from_secs(seconds);
        PendingOperation { kind, doing: "test", since, deadline }
    }

    #[test]
    fn the_last_part_of_a_push_has_the_deadline_of_its_most_patient_waiter() {
        let now = Instant::now();
        let mut operations = PendingOperations::default();
        let push = |sequence| OperationKind::Push { sequence: Sequence(sequence), owns: false };
        for (id, kind, seconds) in
            [(1, push(7), 2), (2, push(7), 3), (3, push(8), 9), (4, OperationKind::Token, 1)]
        {
            operations.add(OpId(id), operation(kind, now, seconds));
        }
        assert_eq!(operations.remaining_ms(now, Sequence(7)), 2_950);
        assert_eq!(operations.remaining_ms(now, Sequence(9)), 0);
        assert!(operations.waiting_for(Sequence(7)).eq([OpId(1), OpId(2)]));
        assert_eq!(operations.wake_at(), Some(now + Duration::from_secs(1)));
        assert_eq!(operations.due(now + Duration::from_secs(2)), [OpId(1), OpId(4)]);
    }

    #[test]
    fn operations_can_end_while_they_are_visited() {
        let now = Instant::now();
        let mut operations = PendingOperations::default();
        (1..=4).for_each(|id| operations.add(OpId(id), operation(OperationKind::Pull, now, 1)));
        let mut visited = Vec::new();
        let mut next = operations.first();
        while let Some(id) = next {
            visited.push(id.0);
            operations.remove(id);
            operations.remove(OpId(3));
            next = operations.after(id);
        }
        assert_eq!((visited, operations.is_empty()), (vec![1, 2, 4], true));
    }

    #[test]
    fn a_deadline_that_has_passed_still_asks_for_an_answer() {
        let now = Instant::now();
        let passed = operation(OperationKind::Token, now, 0);
        assert_eq!(passed.deadline_ms(now + Duration::from_secs(1)), 1, "0 would mean no deadline");
    }
}
