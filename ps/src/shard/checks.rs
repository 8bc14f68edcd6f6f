//! Checks of a complete push, and of the values that an update has produced.

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;
use pushpull_store::store::Overflow;

use super::intake::Intake;
use super::peers::Peers;
use super::shard_files::ShardFiles;
use super::steps::Steps;
use super::variables::Variables;
use crate::aggregate::step_coordinator::PerPush;
use crate::client_key::ClientKey;
use crate::inbox::PushedRows;

/// Returns the refusal of a push that would make a value infinite or NaN.
pub(super) fn overflow_refusal(overflow: Overflow) -> Refusal {
    let Overflow { variable, element, value } = overflow;
    Refusal::Overflow { variable, element, value }
}

impl Intake {
    /// Checks that the new rows of a complete push fit into the tables that evict nothing, together
    /// with those of the complete pushes before it. Checks for every table that assigned rows fit.
    pub(super) fn check_tables(
        &self,
        files: &ShardFiles,
        variables: &Variables,
        push_slot: u32,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.inbox, variables.store()) else {
            return Ok(());
        };
        let operation = inbox.arrival(push_slot).map(|push| push.operation);
        let assigned = operation.is_some_and(|operation| operation != Operation::Gradient {});
        for table in store.tables() {
            let partition = table.partition();
            let Some(rows) = inbox.rows(push_slot, partition) else { continue };
            let (more, limit) = (rows.len() as u64, table.limit());
            if assigned && more > limit {
                let (variable, rows) = (partition.variable, table.rows());
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
            let more = table.count_new(&files.journal, &ids, assigned);
            // Admission by chance admits few new rows, so only a table that is full refuses them.
            let sure = if table.admits_by_chance() && !assigned { more.min(1) } else { more };
            let rows = table.rows();
            if rows + sure > limit {
                return Err(Refusal::TableFull { variable: partition.variable, rows, more, limit });
            }
        }
        Ok(())
    }

    /// Checks a push whose last part has arrived: of this client, in this slot, with the number of
    /// bytes that the last part has named.
    pub(super) fn check_whole(
        &self,
        files: &ShardFiles,
        peers: &Peers,
        steps: &Steps,
        variables: &Variables,
        (client, push_slot, named): (ClientKey, u32, u64),
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.inbox, variables.store()) else {
            return Err(Refusal::NotInitialized {});
        };
        let Some(push) = inbox.arrival(push_slot) else {
            return Err(Refusal::PushSlotTaken { push_slot });
        };
        if push.bytes != named {
            return Err(Refusal::Length { named, received: push.bytes });
        }
        for extent in push.extents.ranges() {
            let cut = store.layout().cut_at(extent.end);
            if let Some(cut) = cut.filter(|cut| !cut.is_sparse()) {
                let start = cut.offset.max(extent.start);
                return Err(Refusal::Incomplete {
                    partition: cut.id,
                    bytes: extent.end - start,
                    expected: cut.end() - cut.offset,
                });
            }
        }
        inbox.check_rows(push_slot, store.layout())?;
        self.check_tables(files, variables, push_slot)?;
        let (token, generation) = (push.token, push.generation);
        let gradient = push.operation == Operation::Gradient {};
        let held = match &steps.owner {
            // In synchronous mode a push under a token that is over is stale. It is not refused.
            _ if steps.is_synchronous() => true,
            Some(owner) => owner.ledger().holds(client, token, generation),
            None => peers.could_hold_token(client, token, generation),
        };
        // A token pays for one push.
        let spent = inbox.whole_tokens().any(|other| other == token);
        if gradient && (token.0 == 0 || !held || spent) {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }
}
