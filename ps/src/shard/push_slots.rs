//! Push slots: reserves them on request, offers them with answers, and passes them on.

use std::time::Instant;

use pushpull_common::protocol::message::Reserved;
use pushpull_common::protocol::{Grant, Refusal};

use super::intake::Intake;
use super::output::Outputs;
use super::parked_requests::{ParkedRequest, WaitReason};
use super::peers::Peers;
use crate::aggregate::token_ledger::Issued;
use crate::client_key::ClientKey;

impl Intake {
    pub(super) fn reserve(
        &mut self,
        peers: &mut Peers,
        out: &mut Outputs,
        now: Instant,
        entry: ParkedRequest,
    ) {
        let Some(client) = entry.client else { return };
        let Some(inbox) = &mut self.inbox else {
            return out.refuse(entry.connection, entry.request, Refusal::NotInitialized {});
        };
        // The client is ready to send, so it gets a slot that was offered to another client and is
        // unused.
        let push_slot = inbox
            .reserve(client, now)
            .or_else(|| inbox.reclaim_offered().then(|| inbox.reserve(client, now)).flatten());
        match push_slot {
            Some(push_slot) => {
                out.answer(entry.connection, entry.request, Reserved { push_slot }.into())
            }
            None => peers.park(out, entry),
        }
    }

    /// Returns a push slot for a client that has not requested one, if no request waits for one; 0
    /// for none.
    pub(super) fn free_push_slot(&mut self, peers: &Peers, now: Instant, client: ClientKey) -> u32 {
        if peers.parked.any(|entry| matches!(entry.wait, WaitReason::PushSlot)) {
            return 0;
        }
        self.inbox.as_mut().and_then(|inbox| inbox.offer(client, now)).unwrap_or(0)
    }

    /// Gives free push slots to the parked requests, first come first served.
    pub(super) fn give_parked_push_slots(
        &mut self,
        peers: &mut Peers,
        out: &mut Outputs,
        now: Instant,
    ) {
        let waits = |entry: &ParkedRequest| matches!(entry.wait, WaitReason::PushSlot);
        while let Some(inbox) = &mut self.inbox
            && peers.parked.any(waits)
            && (inbox.has_free() || inbox.reclaim_offered())
            && let Some(entry) = peers.parked.take_first(waits)
        {
            if let Some(push_slot) = entry.client.and_then(|client| inbox.reserve(client, now)) {
                out.answer(entry.connection, entry.request, Reserved { push_slot }.into());
            }
        }
    }

    /// Returns the grant for a token, with a push slot if one is free and no request waits for it.
    pub(super) fn grant(
        &mut self,
        peers: &Peers,
        now: Instant,
        client: ClientKey,
        issued: Issued,
    ) -> Grant {
        let Issued { token, generation, step } = issued;
        Grant { token, generation, step, push_slot: self.free_push_slot(peers, now, client) }
    }
}
