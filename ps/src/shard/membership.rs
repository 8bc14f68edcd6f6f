//! Who is here: leases, leaving, lost connections.

use std::time::Instant;

use pushpull_common::protocol::{Envelope, Refusal, message};

use super::output::Output;
use super::parked::Wait;
use super::replicas::{ClientKey, Presence};
use super::{Detail, Shard};

impl Shard {
    pub(super) fn tick(&mut self, now: Instant) {
        for client in self.replicas.expire(now) {
            self.counters.members_lost.add(1);
            if let Some(connection) = self.replicas.client_mut(client).connection.take() {
                self.outputs.push_back(Output::Close { connection });
            }
            self.drop_client(now, client);
        }
        let kept = self.whole_tokens();
        if let Some(owner) = &mut self.owner {
            let expired = owner.expire(now, |token| kept.contains(&token));
            self.counters.tokens_taken_back.add(expired as u64);
            if expired > 0 {
                self.grant_parked_tokens(now);
            }
        }
        if let Some(inbox) = &mut self.inbox {
            let stalled = inbox.reclaim_stalled(now, self.config.lease);
            self.counters.pushes_dropped.add(stalled as u64);
            if stalled > 0 {
                self.give_parked_rooms(now);
            }
        }
        for entry in self.parked.expire(now) {
            let waited_ms = now.saturating_duration_since(entry.since).as_millis() as u64;
            let awaited = Detail::clipped(match &entry.wait {
                Wait::Ready => "the chief to initialize the variables".to_owned(),
                Wait::Token => self.awaited_tokens(),
                Wait::Room => "room in the inbox".to_owned(),
                Wait::Pull { at_least, .. } => format!("global step {at_least}"),
            });
            self.refuse(entry.connection, entry.request, Refusal::Deadline { waited_ms, awaited });
        }
    }

    pub(super) fn disconnected(&mut self, connection: u64) {
        let Some(conversation) = self.conversations.remove(&connection) else { return };
        self.parked.drop_connection(connection);
        if let Some(client) = conversation.client {
            // The client stays a member for its lease: it may come back and go on.
            let client = self.replicas.client_mut(client);
            if client.connection == Some(connection) {
                client.connection = None;
            }
        }
    }

    pub(super) fn leave(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
    ) {
        self.replicas.client_mut(client).presence = Presence::Left;
        self.drop_client(now, client);
        self.answer(connection, request, message::Left {}.into());
    }

    /// Drops what belongs to a client that has left, is lost, or is fenced by a newer self:
    /// its tokens and rooms go to others. Pushes that are whole stay.
    pub(super) fn drop_client(&mut self, now: Instant, client: ClientKey) {
        if let Some(inbox) = &mut self.inbox {
            inbox.drop_client(client);
        }
        let kept = self.whole_tokens();
        if let Some(owner) = &mut self.owner {
            let returned = owner.drop_client(client, |token| kept.contains(&token));
            self.counters.tokens_taken_back.add(returned as u64);
        }
        self.grant_parked_tokens(now);
        self.give_parked_rooms(now);
    }

    pub(super) fn report_members(&mut self) {
        let members = self.replicas.counts();
        if members != self.members {
            self.members = members;
            let (joined, present) = members;
            self.outputs.push_back(Output::Members { joined, present });
        }
    }
}
