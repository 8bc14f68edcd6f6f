//! Membership: leases, leaving, and lost connections.

use std::time::Instant;

use pushpull_common::protocol::{Envelope, Refusal, message};

use super::client_registry::ClientPresence;
use super::parked_requests::WaitReason;
use super::{Detail, Shard};
use crate::aggregate::step_coordinator::PerPush;
use crate::client_key::ClientKey;

impl Shard {
    pub(super) fn tick(&mut self, now: Instant) {
        let lost = self.peers.registry.expire(now);
        if let Some(pause) = self.peers.registry.paused() {
            self.intake.inbox.iter_mut().for_each(|inbox| inbox.extend_deadlines(pause, now));
            self.steps.owner.iter_mut().for_each(|owner| owner.extend_deadlines(pause, now));
        }
        for client in lost {
            self.counters.members_lost.add(1);
            if let Some(connection) = self.peers.registry.client_mut(client).connection.take() {
                self.out.close(connection);
                self.intake.drop_client_connection(&mut self.peers, connection, client);
            }
            self.drop_client(now, client, false);
        }
        self.steps.stop_expecting(now);
        self.end_straggler_waits(now);
        self.steps.repeat_reports(&self.intake, &self.peers, &self.variables, &mut self.out, now);
        self.expire_cuts(now);
        self.recall_tokens(now);
        self.applier.forget_growth(&mut self.out, now);
        // In synchronous mode a push that is complete on some shards only never counts.
        let complete =
            if self.steps.is_synchronous() { PerPush::new() } else { self.intake.whole_tokens() };
        let asks = !self.steps.shards_to_ask().is_empty();
        if let Some(owner) = self.steps.owner.as_mut().filter(|_| !asks) {
            let timeout = self.config.token_timeout;
            let expired = owner.expire(now, timeout, |token| complete.contains(&token));
            self.counters.tokens_taken_back.add(expired as u64);
        }
        if let Some(inbox) = &mut self.intake.inbox {
            let stalled = inbox.reclaim_stalled(now, self.config.lease);
            self.counters.pushes_dropped.add(stalled as u64);
        }
        self.variables.count_direct_pulls();
        for entry in self.peers.parked.expire(now) {
            let waited_ms = now.saturating_duration_since(entry.since).as_millis() as u64;
            let awaited = match &entry.wait {
                WaitReason::Ready => "the chief to initialize the variables".to_owned(),
                WaitReason::Token => self
                    .awaited_step(now)
                    .unwrap_or_else(|| self.steps.awaited_tokens(&self.peers, now, entry.client)),
                WaitReason::PushSlot => self.steps.awaited_push_slot(now),
                WaitReason::Pull { at_least, .. } | WaitReason::Rows { at_least, .. } => {
                    self.awaited_values(now, *at_least)
                }
            };
            let awaited = Detail::clipped(self.applier.with_growth(awaited));
            self.out.refuse(
                entry.connection,
                entry.request,
                Refusal::Deadline { waited_ms, awaited },
            );
        }
    }

    pub(super) fn disconnected(&mut self, connection: u64) {
        let Some(state) = self.peers.connections.remove(&connection) else {
            return;
        };
        self.variables.revoke_shared(connection);
        self.peers.parked.drop_connection(connection);
        self.checkpoints.abandon_save_of(connection);
        self.steps.shards.forget_connection(connection);
        self.checkpoints.drop_save_requests_of(connection);
        let Some(key) = state.client else {
            return;
        };
        // The client stays a member for its lease: it may reconnect and continue.
        let client = self.peers.registry.client_mut(key);
        if client.connection == Some(connection) {
            client.connection = None;
            self.intake.drop_client_connection(&mut self.peers, connection, key);
        }
    }

    pub(super) fn leave(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
    ) {
        self.peers.registry.client_mut(client).presence = ClientPresence::Left;
        self.drop_client(now, client, false);
        self.out.answer(connection, request, message::Left {}.into());
    }

    /// Drops the state of a client that has left, is lost, or is fenced by a newer incarnation. Its
    /// tokens and push slots go to other clients.
    ///
    /// Complete pushes stay; in synchronous mode only admitted ones do. In asynchronous mode the
    /// other shards are asked about its tokens first, except for a fenced incarnation, which cannot
    /// push any more.
    pub(super) fn drop_client(&mut self, now: Instant, client: ClientKey, fenced: bool) {
        // A token or push slot that it is waiting for would never be returned.
        self.peers.parked.take(|entry| {
            entry.client == Some(client)
                && matches!(entry.wait, WaitReason::Token | WaitReason::PushSlot)
        });
        if let Some(inbox) = &mut self.intake.inbox {
            inbox.drop_client(client);
        }
        self.pulls.last_pulls.drop_client(client);
        if !fenced && !self.steps.shards_to_ask().is_empty() {
            if let Some(tokens) = self.steps.asynchronous_tokens_mut() {
                tokens.leave(client);
            }
            self.recall_tokens(now);
        } else if let Some(owner) = &mut self.steps.owner {
            let complete = self.intake.whole_tokens();
            let returned = owner.drop_client(client, fenced, |token| complete.contains(&token));
            self.counters.tokens_taken_back.add(returned as u64);
        }
    }
}
