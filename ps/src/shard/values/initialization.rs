//! The job that computes the initial values.

use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::Envelope;

use super::SLICE_BYTES;
use super::variables::{Variables, VariablesState};

/// The least cost of a partition in the budget of a slice, in bytes.
const PARTITION_COST: u64 = 1 << 10;

/// The computation of the initial values, on a chief's request.
#[derive(Debug)]
pub(in crate::shard) struct InitializeJob {
    pub(in crate::shard) connection: u64,
    pub(in crate::shard) request: Envelope,
    pub(in crate::shard) epoch: RestoreEpoch,
    /// The index of the current partition, and how many of its elements are done.
    partition: usize,
    done: u64,
}

impl InitializeJob {
    pub(in crate::shard) fn new(
        connection: u64,
        request: Envelope,
        epoch: RestoreEpoch,
    ) -> InitializeJob {
        InitializeJob { connection, request, epoch, partition: 0, done: 0 }
    }

    /// Returns whether the job has begun.
    pub(in crate::shard) fn has_begun(&self) -> bool {
        (self.partition, self.done) != (0, 0)
    }

    /// Computes a slice of the initial values; returns whether they are complete.
    pub(in crate::shard) fn slice(&mut self, variables: &mut Variables) -> bool {
        let VariablesState::Declared(store) = &mut variables.state else {
            return true;
        };
        let mut budget = SLICE_BYTES;
        while budget > 0 {
            let Some(partition) = store.layout().partitions().get(self.partition) else {
                return true;
            };
            let elements = &partition.elements;
            let size = partition.dtype.size() as u64;
            // A partition has a cost even if it needs no work.
            let mut spent = PARTITION_COST;
            if variables.assigned.contains(&partition.id)
                || self.done >= elements.end - elements.start
            {
                self.partition += 1;
                self.done = 0;
            } else {
                let done = store.initialize(self.partition, self.done);
                spent = spent.max(done.saturating_sub(self.done) * size);
                self.done = done;
            }
            budget = budget.saturating_sub(spent);
        }
        false
    }
}
