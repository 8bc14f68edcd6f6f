//! Checks of a complete push, and of the values that an update has produced.

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;

use super::Shard;
use super::client_registry::ClientKey;
use crate::store::Overflow;

/// Returns the refusal of a push that would make a value infinite or NaN.
pub(super) fn overflow_refusal(overflow: Overflow) -> Refusal {
    let Overflow { variable, element, value } = overflow;
    Refusal::Overflow { variable, element, value }
}

impl Shard {
    /// Checks a push whose last part has arrived.
    pub(super) fn check_whole(
        &self,
        client: ClientKey,
        push_slot: u32,
        named: u64,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.intake.inbox, self.variables.store()) else {
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
        self.check_tables(push_slot)?;
        let (token, generation) = (push.token, push.generation);
        let gradient = push.operation == Operation::Gradient {};
        let held = match &self.steps.owner {
            // In synchronous mode a push under a token that is over is stale. It is not refused.
            _ if self.steps.is_synchronous() => true,
            Some(owner) => owner.holds(client, token, generation),
            None => self.peers.could_hold_token(client, token, generation),
        };
        // A token pays for one push.
        let spent = inbox.whole_tokens().any(|other| other == token);
        if gradient && (token.0 == 0 || !held || spent) {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }
}
