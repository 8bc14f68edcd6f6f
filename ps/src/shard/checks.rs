//! Checks of a complete push, and of the values that an update has produced.

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;

use super::client_registry::ClientKey;
use super::{Shard, VariablesState};
use crate::aggregate::step_owner::{TOKEN_LIMIT, generation_of};
use crate::config::NonFinite;
use crate::metrics::Overflowed;
use crate::store::Overflow;

/// Returns the refusal of a push that would make a value infinite or NaN.
pub(super) fn overflow_refusal(overflow: Overflow) -> Refusal {
    let Overflow { variable, element, value } = overflow;
    Refusal::Overflow { variable, element, value }
}

impl Shard {
    /// Counts an update that made values infinite or NaN, and records the first such value.
    pub(super) fn count_overflow(&mut self) {
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) =
            &mut self.variables.state
        else {
            return;
        };
        let Some(overflow) = store.take_overflow() else { return };
        if self.config.non_finite == NonFinite::Allow {
            return;
        }
        self.counters.overflows.add(1);
        self.counters.first_overflow.get_or_init(|| {
            let variable = store.catalogue().variables().get(overflow.variable.0 as usize);
            let variable = variable.map_or_else(String::new, |variable| variable.name().to_owned());
            let value = overflow.value.to_string();
            Overflowed { variable, element: overflow.element, value }
        });
    }

    /// Whether a client could hold a token, as far as a shard can tell that does not own the step:
    /// the token was generated for this client, and no other push has been applied under it.
    fn could_hold_token(&self, client: ClientKey, token: TokenId, generation: u32) -> bool {
        let client = self.peers.registry.client(client);
        token.0 < TOKEN_LIMIT
            && generation == generation_of(token, client.epoch)
            && !client.window.has_applied(token)
    }

    /// Checks a push whose last part has arrived.
    pub(super) fn check_whole(
        &self,
        client: ClientKey,
        push_slot: u32,
        named: u64,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.intake.inbox, self.store()) else {
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
            _ if self.is_synchronous() => true,
            Some(owner) => owner.holds(client, token, generation),
            None => self.could_hold_token(client, token, generation),
        };
        // A token pays for one push.
        let spent = inbox.whole_tokens().any(|other| other == token);
        if gradient && (token.0 == 0 || !held || spent) {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }
}
