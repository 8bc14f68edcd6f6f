//! A push whose last part has arrived.

use std::time::Instant;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;
use pushpull_store::store::Overflow;

use crate::aggregate::step_coordinator::PerPush;
use crate::client_key::ClientKey;
use crate::inbox::PushedRows;
use crate::shard::Shard;
use crate::shard::intake::Intake;
use crate::shard::peers::Peers;
use crate::shard::shard_files::ShardFiles;
use crate::shard::steps::Steps;
use crate::shard::variables::Variables;

/// A push whose last part has arrived, and which counts once it passes the checks.
#[derive(Clone, Copy, Debug)]
pub(in crate::shard) struct WholePush {
    pub(in crate::shard) client: ClientKey,
    pub(in crate::shard) push_slot: u32,
    /// The number of bytes that the last part has named.
    pub(in crate::shard) named_bytes: u64,
}

impl WholePush {
    /// Checks everything about the push that only its end shows: its bytes, its rows and its token.
    pub(in crate::shard) fn check(
        &self,
        intake: &Intake,
        files: &ShardFiles,
        peers: &Peers,
        steps: &Steps,
        variables: &Variables,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&intake.inbox, variables.store()) else {
            return Err(Refusal::NotInitialized {});
        };
        let &WholePush { client, push_slot, named_bytes: named } = self;
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
        self.check_tables(intake, files, variables)?;
        let (token, generation) = (push.token, push.generation);
        let gradient = push.operation == Operation::Gradient {};
        let held = match &steps.owner {
            // In synchronous mode a push under a token that is over is stale. It is not refused.
            _ if steps.is_synchronous() => true,
            Some(owner) => owner.ledger().holds(client, token, generation),
            None => peers.could_hold_token(client, token, generation),
        };
        if let Some(call) = &push.call {
            steps.calls.check(call)?;
        }
        // A token pays for one push.
        let spent = inbox.whole_tokens().any(|other| other == token);
        if gradient && (token.0 == 0 || !held || spent) {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }

    /// Checks that the new rows of the push fit into the tables that evict nothing, together
    /// with those of the complete pushes before it. Checks for every table that assigned rows fit.
    fn check_tables(
        &self,
        intake: &Intake,
        files: &ShardFiles,
        variables: &Variables,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&intake.inbox, variables.store()) else {
            return Ok(());
        };
        let push_slot = self.push_slot;
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
}

/// Returns the refusal of a push that would make a value infinite or NaN.
pub(in crate::shard) fn overflow_refusal(overflow: Overflow) -> Refusal {
    let Overflow { variable, element, value } = overflow;
    Refusal::Overflow { variable, element, value }
}

impl Shard {
    /// Drops a complete gradient if it has become too old since to be applied. Returns whether it
    /// was dropped.
    pub(in crate::shard) fn drop_if_too_old(&mut self, now: Instant, push_slot: u32) -> bool {
        let (Some(owner), Some(inbox)) = (&self.steps.owner, &mut self.intake.inbox) else {
            return false;
        };
        let too_old = inbox.arrival(push_slot).is_some_and(|push| {
            let tokens = owner.asynchronous_tokens();
            push.operation == Operation::Gradient {}
                && tokens.is_some_and(|tokens| tokens.is_too_old(push.token, push.step))
        });
        if !too_old {
            return false;
        }
        let Some((client, push)) = inbox.take(push_slot) else { return false };
        let outcome = self.steps.stale_outcome(push.token);
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        true
    }
}
