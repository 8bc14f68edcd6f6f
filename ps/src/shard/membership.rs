//! Who is here: leases, leaving, lost connections.

use std::time::Instant;

use pushpull_common::protocol::{Envelope, Refusal, message};

use super::output::Output;
use super::parked::Wait;
use super::replicas::{ClientKey, Presence};
use super::{Detail, Shard};
use crate::aggregate::step_coordinator::PerPush;

impl Shard {
    pub(super) fn tick(&mut self, now: Instant) {
        let lost = self.replicas.expire(now);
        if let Some(pause) = self.replicas.paused() {
            self.inbox.iter_mut().for_each(|inbox| inbox.excuse(pause, now));
            self.owner.iter_mut().for_each(|owner| owner.excuse(pause, now));
        }
        for client in lost {
            self.counters.members_lost.add(1);
            if let Some(connection) = self.replicas.client_mut(client).connection.take() {
                self.outputs.push_back(Output::Close { connection });
                self.drop_line(now, connection, client);
            }
            self.drop_client(now, client, false);
        }
        self.stop_expecting(now);
        self.end_straggler_waits(now);
        self.tell_owner_again(now);
        self.end_waits_for_cuts(now);
        self.recall_tokens(now);
        self.forget_growth(now);
        // In synchronous mode a push that is whole here and not everywhere helps nobody.
        let kept = if self.is_synchronous() { PerPush::new() } else { self.whole_tokens() };
        let asks = !self.shards_to_ask().is_empty();
        if let Some(owner) = self.owner.as_mut().filter(|_| !asks) {
            let expired = owner.expire(now, |token| kept.contains(&token));
            self.counters.tokens_taken_back.add(expired as u64);
            if expired > 0 {
                self.decide(now);
                self.grant_parked_tokens(now);
            }
        }
        if let Some(inbox) = &mut self.inbox {
            let stalled = inbox.reclaim_stalled(now, self.config.lease);
            self.counters.pushes_dropped.add(stalled as u64);
        }
        self.give_parked_push_slots(now);
        self.count_direct_pulls();
        for entry in self.parked.expire(now) {
            let waited_ms = now.saturating_duration_since(entry.since).as_millis() as u64;
            let awaited = match &entry.wait {
                Wait::Ready => "the chief to initialize the variables".to_owned(),
                Wait::Token => {
                    self.awaited_step(now).unwrap_or_else(|| self.awaited_tokens(now, entry.client))
                }
                Wait::PushSlot => self.awaited_push_slot(now),
                Wait::Pull { at_least, .. } | Wait::Rows { at_least, .. } => {
                    self.awaited_values(now, *at_least)
                }
            };
            let awaited = Detail::clipped(self.with_growth(awaited));
            self.refuse(entry.connection, entry.request, Refusal::Deadline { waited_ms, awaited });
        }
    }

    pub(super) fn disconnected(&mut self, now: Instant, connection: u64) {
        let Some(conversation) = self.conversations.remove(&connection) else {
            return;
        };
        self.take_back(connection);
        self.parked.drop_connection(connection);
        self.give_up_saving_for(connection);
        self.forget_part(connection);
        self.drop_save_requests_of(connection);
        let Some(key) = conversation.client else {
            return;
        };
        // The client stays a member for its lease: it may come back and go on.
        let client = self.replicas.client_mut(key);
        if client.connection == Some(connection) {
            client.connection = None;
            self.drop_line(now, connection, key);
        }
    }

    /// Drops what came over a client's connection that is gone or replaced, and what waits there
    /// for an answer: a token granted to nobody who listens would be lost to all.
    pub(super) fn drop_line(&mut self, now: Instant, connection: u64, client: ClientKey) {
        self.parked.drop_connection(connection);
        if let Some(conversation) = self.conversations.get_mut(&connection) {
            conversation.receiving = None;
        }
        if let Some(inbox) = &mut self.inbox {
            self.counters.pushes_dropped.add(inbox.give_up(client) as u64);
        }
        self.give_parked_push_slots(now);
    }

    pub(super) fn leave(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
    ) {
        self.replicas.client_mut(client).presence = Presence::Left;
        self.drop_client(now, client, false);
        self.answer(connection, request, message::Left {}.into());
    }

    /// Drops what belongs to a client that has left, is lost, or is fenced by a newer self:
    /// its tokens and rooms go to others. Pushes that are whole stay; in synchronous mode, if they
    /// are admitted. In asynchronous mode the other shards are asked for its tokens first, unless they
    /// are of a self that has been fenced and can push no more.
    pub(super) fn drop_client(&mut self, now: Instant, client: ClientKey, fenced: bool) {
        // What it waits for would come to nobody, and never come back.
        self.parked.take(|entry| {
            entry.client == Some(client) && matches!(entry.wait, Wait::Token | Wait::PushSlot)
        });
        if let Some(inbox) = &mut self.inbox {
            inbox.drop_client(client);
        }
        self.backups.drop_client(client);
        self.replica_goes(now, client, fenced);
        if !fenced && !self.shards_to_ask().is_empty() {
            self.owner.iter_mut().for_each(|owner| owner.leave(client));
            self.recall_tokens(now);
            self.grant_parked_tokens(now);
            return self.give_parked_push_slots(now);
        }
        let kept = self.whole_tokens();
        if let Some(owner) = &mut self.owner {
            let returned = owner.drop_client(client, |token| kept.contains(&token));
            self.counters.tokens_taken_back.add(returned as u64);
        }
        self.grant_parked_tokens(now);
        self.give_parked_push_slots(now);
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
