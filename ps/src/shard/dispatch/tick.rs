//! Time: what expires, and what is repeated because it may have been lost; and clients and
//! connections that end.

use std::time::Instant;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::refusal::Detail;

use crate::aggregate::current_step::PerPush;
use crate::client_entry::ClientPresence;
use crate::client_key::ClientKey;
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};

impl Shard {
    /// Expires what has waited for too long, and repeats what may have been lost. Returns what that
    /// has changed. Owners without anything that could expire are not asked.
    pub(in crate::shard) fn tick(&mut self, now: Instant) -> Changes {
        let mut changes = self.expire_leases(now);
        let connections = &self.peers.connections;
        self.steps.coordinators_heard.refresh(now, |open| connections.contains_key(&open));
        if self.steps.is_synchronous() {
            changes |= self.expire_replicas(now);
        }
        if self.steps.to_owner.is_up() {
            self.repeat_reports(now);
        }
        if self.checkpoints.waits() {
            changes |= self.expire_saves(now);
        }
        if self.applier.awaits_memory() {
            self.applier.forget_growth(&mut self.out, now);
        }
        if self.steps.has_tokens || self.steps.participants.len() > 1 {
            changes |= self.recall_tokens(now);
            changes |= self.expire_tokens(now);
        }
        if self.intake.may_stall && self.intake.reclaim_stalled(now) {
            changes |= Changes::SLOTS;
        }
        self.intake.take_back_memory(now);
        if let Some(store) = self.variables.store_mut() {
            store.pass_time(now, self.applier.is_updating());
        }
        if self.variables.is_shared() {
            self.variables.count_direct_pulls();
        }
        if self.peers.parked.is_any() {
            changes |= self.expire_requests(now);
            // Memory for a push slot may have become free on another shard of the task.
            if self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::PushSlot)) {
                changes |= Changes::SLOTS;
            }
        }
        // A wait is reported as it grows.
        let waits = self.peers.parked.is_any() || self.steps.watch.wait.is_some();
        if self.changed != Changes::NONE || waits || self.steps.is_synchronous() {
            self.changed = Changes::NONE;
            self.report_training(now);
        }
        changes
    }

    /// Ends the leases of clients, and the connections of readers and shards, that have been silent.
    fn expire_leases(&mut self, now: Instant) -> Changes {
        let lost = self.peers.registry.expire(now);
        let mut changes = if lost.is_empty() { Changes::NONE } else { Changes::ALL };
        if let Some(pause) = self.peers.registry.paused() {
            self.intake.inbox.iter_mut().for_each(|inbox| inbox.extend_deadlines(pause, now));
            self.steps.owner.iter_mut().for_each(|owner| owner.extend_deadlines(pause, now));
        }
        for client in lost {
            self.client_lost(now, client);
        }
        for connection in self.peers.silent_connections(now) {
            // One whose part of a checkpoint is being written waits for the answer.
            if !self.checkpoints.is_saving_for(connection) {
                self.counters.connections_silent.add(1);
                self.disconnected(connection);
                self.out.close(connection);
                changes = Changes::ALL;
            }
        }
        changes
    }

    /// Stops waiting for replicas that have not joined or are lost, as far as so configured.
    fn expire_replicas(&mut self, now: Instant) -> Changes {
        let stopped = self.steps.stop_expecting(now);
        let ended = self.end_straggler_waits(now);
        if stopped || ended { Changes::ALL } else { Changes::NONE }
    }

    /// Takes back the tokens that were held for too long, where no other shard must be asked first.
    fn expire_tokens(&mut self, now: Instant) -> Changes {
        if !self.steps.shards_to_ask().is_empty() {
            return Changes::NONE;
        }
        // In synchronous mode a push that is complete on some shards only never counts.
        let complete = match self.steps.is_synchronous() {
            true => PerPush::new(),
            false => self.intake.whole_tokens(),
        };
        let Some(owner) = &mut self.steps.owner else { return Changes::NONE };
        let timeout = self.config.token_timeout;
        let expired = owner.expire(now, timeout, |token| complete.contains(&token));
        self.counters.tokens_taken_back.add(expired as u64);
        if expired > 0 { Changes::ALL } else { Changes::NONE }
    }

    /// Refuses the requests whose deadlines have passed, and says what they have waited for.
    fn expire_requests(&mut self, now: Instant) -> Changes {
        let expired = self.peers.parked.expire(now);
        // A request that has waited in front of others may have kept them waiting.
        let changes = if expired.is_empty() { Changes::NONE } else { Changes::ALL };
        for ParkedRequest { request, wait } in expired {
            let waited_ms = now.saturating_duration_since(request.since).as_millis() as u64;
            let awaited = self.applier.with_growth(self.awaited(now, &request, &wait));
            let awaited = Detail::clipped(awaited);
            request.refuse(&mut self.out, Refusal::Deadline { waited_ms, awaited });
        }
        changes
    }

    /// A connection has ended. Its client stays a member for its lease: it may reconnect and
    /// continue.
    pub(in crate::shard) fn disconnected(&mut self, connection: u64) {
        let Some(state) = self.peers.connections.remove(&connection) else { return };
        self.variables.revoke_shared(connection);
        self.peers.parked.drop_connection(connection);
        self.checkpoints.connection_ended(connection);
        self.steps.shards.forget_connection(connection);
        if let Some(client) = state.client
            && self.peers.registry.client(client).connection == Some(connection)
        {
            self.peers.registry.client_mut(client).connection = None;
            self.drop_client_connection(connection, client);
        }
    }

    /// The lease of a client has expired.
    fn client_lost(&mut self, now: Instant, client: ClientKey) {
        self.counters.members_lost.add(1);
        self.report_lost(now, client);
        if let Some(connection) = self.peers.registry.client_mut(client).connection.take() {
            self.out.close(connection);
            self.drop_client_connection(connection, client);
        }
        self.drop_client(now, client, false);
    }

    /// A client leaves.
    pub(super) fn client_leaves(&mut self, now: Instant, client: ClientKey) {
        let entry = self.peers.registry.client_mut(client);
        let before = std::mem::replace(&mut entry.presence, ClientPresence::Left);
        if before == ClientPresence::Present {
            self.report_left(client);
        }
        self.drop_client(now, client, false);
    }

    /// Drops the state of a client that has left, is lost, or is fenced by a newer incarnation. Its
    /// tokens and push slots go to other clients.
    ///
    /// Complete pushes stay; in synchronous mode only admitted ones do. In asynchronous mode the
    /// other shards are asked about its tokens first, except for a fenced incarnation, which cannot
    /// push any more.
    pub(super) fn drop_client(&mut self, now: Instant, client: ClientKey, fenced: bool) {
        // A token or push slot that it is waiting for would never be returned.
        self.peers.parked.take(|ParkedRequest { request, wait }| {
            request.client == Some(client)
                && matches!(wait, WaitReason::Token | WaitReason::PushSlot)
        });
        if let Some(inbox) = &mut self.intake.inbox {
            inbox.drop_client(client);
        }
        self.variables.last_pulls.drop_client(client);
        if !fenced && !self.steps.shards_to_ask().is_empty() {
            if let Some(tokens) = self.steps.asynchronous_tokens_mut() {
                tokens.leave(client);
            }
            self.watch_absent(now, client);
            self.recall_tokens(now);
        } else if let Some(owner) = &mut self.steps.owner {
            let complete = self.intake.whole_tokens();
            let returned = owner.drop_client(client, fenced, |token| complete.contains(&token));
            self.counters.tokens_taken_back.add(returned as u64);
        }
    }
}
