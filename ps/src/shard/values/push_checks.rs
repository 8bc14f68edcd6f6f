//! The checks of pushes against the variables: ranges, operations and rows.

use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{Operation, PushPart};
use pushpull_common::protocol::refusal::Detail;
use pushpull_store::commit::Journal;
use pushpull_store::store::Store;

use super::variables::Variables;
use crate::aggregate::current_step::PerPush;
use crate::inbox::{Inbox, PushArrival, PushedRows, is_for_trainable};

impl Variables {
    /// Checks the range of a part of a push that has begun.
    pub(in crate::shard) fn check_range(
        &self,
        push: &PushArrival,
        part: &PushPart,
        range: &Range<u64>,
    ) -> Result<(), Refusal> {
        let store = self.store().ok_or(Refusal::NotInitialized {})?;
        let layout = store.layout();
        push.extents.check(range, layout).map_err(|misplaced| Refusal::Range {
            offset: range.start,
            bytes: range.end.saturating_sub(range.start),
            limit: misplaced.limit,
        })?;
        let trainable = is_for_trainable(push.operation);
        let wrong = self
            .fused_ranges
            .first_touched(layout, range, |_, it| trainable.is_some_and(|t| t != it));
        if push.operation != part.operation {
            let tried = Detail::clipped("an operation other than that of its first part");
            // The range may be the index of a sparse partition, which is behind all values.
            let variable = layout.touched(range.clone()).next();
            let variable = variable.map_or(VariableId(0), |partition| partition.variable);
            return Err(Refusal::Operation { variable, tried });
        }
        if let Some(partition) = wrong {
            let tried = Detail::clipped(match push.operation {
                Operation::Gradient {} => "gradients: it is a plain variable",
                _ => "assign_add: it is trained by the optimizer",
            });
            return Err(Refusal::Operation { variable: partition.variable, tried });
        }
        Ok(())
    }

    /// Checks a range that is in a push buffer. It covers whole dense partitions.
    pub(in crate::shard) fn check_shared_range(
        &self,
        push: &PushArrival,
        part: &PushPart,
        range: &Range<u64>,
    ) -> Result<(), Refusal> {
        self.check_range(push, part, range)?;
        let layout = self.store().ok_or(Refusal::NotInitialized {})?.layout();
        let cut = layout.cut_at(range.start).or_else(|| layout.cut_at(range.end));
        let sparse = self.fused_ranges.first_touched(layout, range, |sparse, _| sparse);
        let limit = match (cut, sparse) {
            _ if range.end > layout.bytes() => Some(layout.bytes()),
            (Some(cut), _) => Some(cut.end()),
            (_, sparse) => sparse.map(|sparse| sparse.offset),
        };
        match limit {
            None => Ok(()),
            Some(limit) => {
                let bytes = range.end - range.start;
                Err(Refusal::Range { offset: range.start, bytes, limit })
            }
        }
    }

    /// Checks that the new rows of the push fit into the tables that evict nothing, together
    /// with those of the complete pushes before it. Checks for every table that assigned rows fit.
    pub(in crate::shard) fn check_tables(
        &self,
        inbox: &Inbox,
        push_slot: u32,
        journal: &Journal,
    ) -> Result<(), Refusal> {
        let Some(store) = self.store() else { return Ok(()) };
        let operation = inbox.arrival(push_slot).map(|push| push.operation);
        let assigned = operation.is_some_and(|operation| operation != Operation::Gradient {});
        for table in store.tables() {
            let partition = table.partition();
            let Some(rows) = inbox.rows(push_slot, partition) else { continue };
            let more = rows.len() as u64;
            let limit = table.limit();
            if assigned && more > limit {
                let variable = partition.variable;
                let rows = table.rows();
                return Err(Refusal::TableFull { variable, rows, more, limit });
            }
            if !table.rejects_when_full() {
                continue;
            }
            let due = inbox.whole_slots().filter(|&other| other != push_slot).chain([push_slot]);
            let pushes: PerPush<_> =
                due.filter_map(|push_slot| inbox.rows(push_slot, partition)).collect();
            // New rows are counted only if they might exceed the limit.
            let most: u64 = pushes.iter().map(|rows| rows.len() as u64).sum();
            if table.rows() + most <= table.limit() {
                continue;
            }
            let mut ids: Vec<u64> = pushes.iter().flat_map(PushedRows::numbers).collect();
            ids.sort_unstable();
            let more = table.count_new(journal, &ids, assigned);
            // Admission by chance admits few new rows, so only a table that is full refuses them.
            let sure = if table.admits_by_chance() && !assigned { more.min(1) } else { more };
            let rows = table.rows();
            if rows + sure > limit {
                return Err(Refusal::TableFull { variable: partition.variable, rows, more, limit });
            }
        }
        Ok(())
    }

    /// Returns whether a range is changed only once its push is whole: it has rows, or its rule
    /// needs sums over whole variables.
    pub(super) fn defers(&self, range: &Range<u64>) -> bool {
        let has_index =
            |store: &Store| store.layout().touched_by_index(range.clone()).next().is_some();
        self.fused_ranges.within(range.clone()).any(|fused_range| fused_range.is_deferred)
            || self.store().is_some_and(has_index)
    }
}
