//! Push slots: reserves them on request, offers them with answers, and passes them on.

use std::time::Instant;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Reserved;

use super::Shard;
use super::client_registry::ClientKey;
use super::parked_requests::{ParkedRequest, WaitReason};

impl Shard {
    pub(super) fn reserve(&mut self, now: Instant, entry: ParkedRequest) {
        let Some(client) = entry.client else { return };
        let Some(inbox) = &mut self.intake.inbox else {
            return self.out.refuse(entry.connection, entry.request, Refusal::NotInitialized {});
        };
        // The client is ready to send, so it gets a slot that was offered to another client and is
        // unused.
        let push_slot = inbox
            .reserve(client, now)
            .or_else(|| inbox.reclaim_offered().then(|| inbox.reserve(client, now)).flatten());
        match push_slot {
            Some(push_slot) => {
                self.out.answer(entry.connection, entry.request, Reserved { push_slot }.into())
            }
            None => self.peers.park(&mut self.out, entry),
        }
    }

    /// Returns a push slot for a client that has not requested one, if no request waits for one; 0
    /// for none.
    pub(super) fn free_push_slot(&mut self, now: Instant, client: ClientKey) -> u32 {
        if self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::PushSlot)) {
            return 0;
        }
        self.intake.inbox.as_mut().and_then(|inbox| inbox.offer(client, now)).unwrap_or(0)
    }

    /// Gives free push slots to the parked requests, first come first served.
    pub(super) fn give_parked_push_slots(&mut self, now: Instant) {
        let waits = |entry: &ParkedRequest| matches!(entry.wait, WaitReason::PushSlot);
        while let Some(inbox) = &mut self.intake.inbox
            && self.peers.parked.any(waits)
            && (inbox.has_free() || inbox.reclaim_offered())
            && let Some(entry) = self.peers.parked.take_first(waits)
        {
            if let Some(push_slot) = entry.client.and_then(|client| inbox.reserve(client, now)) {
                self.out.answer(entry.connection, entry.request, Reserved { push_slot }.into());
            }
        }
    }
}
