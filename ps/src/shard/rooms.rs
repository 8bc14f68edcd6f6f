//! Room for pushes: asked for, offered beside an answer, handed on.

use std::time::Instant;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Room;

use super::Shard;
use super::parked::{Entry, Wait};
use super::replicas::ClientKey;

impl Shard {
    pub(super) fn reserve(&mut self, now: Instant, entry: Entry) {
        let Some(client) = entry.client else { return };
        let Some(inbox) = &mut self.inbox else {
            return self.refuse(entry.connection, entry.request, Refusal::NotInitialized {});
        };
        // Somebody is ready to send: a room that nobody asked for and that lies unused goes to it.
        let room = inbox
            .reserve(client, now)
            .or_else(|| inbox.reclaim_offered().then(|| inbox.reserve(client, now)).flatten());
        match room {
            Some(room) => self.answer(entry.connection, entry.request, Room { room }.into()),
            None => self.park(entry),
        }
    }

    /// A room for a client that has not asked for one, if nobody else waits; 0 for none.
    pub(super) fn spare_room(&mut self, now: Instant, client: ClientKey) -> u32 {
        if self.parked.any(|entry| matches!(entry.wait, Wait::Room)) {
            return 0;
        }
        self.inbox.as_mut().and_then(|inbox| inbox.offer(client, now)).unwrap_or(0)
    }

    /// Gives free rooms to those who wait, first come first served.
    pub(super) fn give_parked_rooms(&mut self, now: Instant) {
        let waits = |entry: &Entry| matches!(entry.wait, Wait::Room);
        while let Some(inbox) = &mut self.inbox
            && self.parked.any(waits)
            && (inbox.has_free() || inbox.reclaim_offered())
            && let Some(entry) = self.parked.take_first(waits)
        {
            if let Some(room) = entry.client.and_then(|client| inbox.reserve(client, now)) {
                self.answer(entry.connection, entry.request, Room { room }.into());
            }
        }
    }
}
