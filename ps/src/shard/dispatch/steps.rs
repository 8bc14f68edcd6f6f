//! Synchronous steps: gradients that are held for them, the decisions of the step owner, and steps
//! that are applied.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::{self, PushAnswer};
use pushpull_common::protocol::{Envelope, Outcome, PushState};
use pushpull_store::planted::Bug;

use crate::aggregate::current_step::CommittedStep;
use crate::aggregate::current_step::TokenOutcome;
use crate::aggregate::step_coordinator::StepCoordinator;
use crate::client_entry::ClientPresence;
use crate::event::Event;
use crate::inbox::PendingAnswer;
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::steps::peer_shards::{send_committed, send_over};
use crate::shard::values::grad_norm::NormJob;

impl Shard {
    /// Holds a whole gradient for its step: the step owner decides about it, another shard reports
    /// it.
    pub(super) fn hold(&mut self, now: Instant, push_slot: u32) {
        let Shard { intake, applier, steps, .. } = self;
        let Some(inbox) = &intake.inbox else { return };
        let Some(push) = inbox.arrival(push_slot) else { return };
        let mut token = push.token;
        let generation = push.generation;
        let step = push.step;
        let holder = inbox.holder(push_slot);
        if let Some(follower) = &mut steps.follower {
            follower.report_whole(inbox.whole_tokens().map(|token| token.0));
        }
        let squares = intake.squares_of(push_slot);
        if squares.is_none() {
            applier.begin_norm(inbox, push_slot);
        }
        let own = steps.index_of(self.id);
        let passed = steps.follower.as_ref().is_some_and(|follower| step.0 < follower.step());
        let Some(owner) = &mut steps.owner else {
            if passed {
                return self.drop_stale(now, push_slot, self.steps.step());
            }
            self.settle_held(now, push_slot, Outcome::Held {});
            return self.report_held(token);
        };
        let is_out = |holder| owner.ledger().holds(holder, token, generation);
        let mut is_out = holder.is_some_and(is_out);
        if let Some(holder) = holder.filter(|_| self.config.planted.has(Bug::KeyByReplica))
            && let Some(issued) = owner.ledger().of(holder).last()
        {
            token = issued.token;
            is_out = true;
        }
        let is_held =
            owner.coordinator_mut().zip(own).is_some_and(|(coordinator, own)| match squares {
                Some(squares) => coordinator.held(own, token.0, squares.into()),
                None => coordinator.is_of_use(token.0),
            });
        if !(is_out && is_held) {
            self.drop_stale(now, push_slot, GlobalStep(self.steps.committed_steps()));
        }
    }

    /// Settles a held push as stale, and releases its slot.
    fn drop_stale(&mut self, now: Instant, push_slot: u32, current: GlobalStep) {
        self.settle_held(now, push_slot, Outcome::Stale { current });
        self.intake.release(push_slot);
    }

    /// Releases the slot of a push whose step is over. A push that is dropped before its scan, and
    /// so before it was reported as held, is answered.
    pub(super) fn drop_over(&mut self, now: Instant, push_slot: u32) {
        if self.intake.push(push_slot).is_some_and(|push| push.scanning) {
            let current = GlobalStep(self.steps.committed_steps());
            self.settle_held(now, push_slot, Outcome::Stale { current });
        }
        self.intake.release(push_slot);
    }

    /// Settles a held push in its client's window, and answers its client.
    fn settle_held(&mut self, now: Instant, push_slot: u32, outcome: Outcome) {
        let Some(inbox) = &mut self.intake.inbox else { return };
        let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot)) else {
            return;
        };
        let sequence = push.sequence;
        let Some(PendingAnswer { connection, request, .. }) = push.whole else { return };
        let entry = self.peers.registry.client_mut(client);
        if matches!(entry.window.state(sequence), PushState::Unknown {}) {
            entry.window.settle(sequence, outcome);
            entry.gradient_settled(now);
        }
        let is_present = entry.presence == ClientPresence::Present;
        // The push is answered once.
        inbox.set_whole(push_slot, PendingAnswer::unawaited());
        if entry.connection != Some(connection) {
            // The connection of the request has ended. A client that asks again is answered.
            return;
        }
        let push_slot = if is_present { self.offer_push_slot(now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next: None, ended: None, push_slot };
        let request = Envelope { request, sequence, ..Envelope::default() };
        // A client that already waits for the next token or for the step's values can do nothing
        // before them. Answering it during the update would cost two context switches, and could
        // take the processor from the update.
        let counts = matches!(outcome, Outcome::Accepted { .. } | Outcome::Held {});
        match counts && self.peers.parked.waits(connection) {
            true => self.out.answer_corked(connection, request, answer.into()),
            false => self.out.answer(connection, request, answer.into()),
        }
    }

    /// Carries out the decisions of the step owner since the last call. Announces and begins a
    /// committed step.
    pub(in crate::shard) fn decide(&mut self, now: Instant) {
        let Some(coordinator) = self.steps.coordinator_mut() else { return };
        for (grant, verdict) in coordinator.verdicts() {
            match verdict {
                TokenOutcome::Admitted { step } => {
                    self.counters.gradients_admitted.add(1);
                    if let Some(push_slot) = self.intake.whole_push_slot_of(TokenId(grant.token)) {
                        let outcome = Outcome::Accepted { step: GlobalStep(step) };
                        self.settle_held(now, push_slot, outcome);
                    }
                }
                TokenOutcome::Over => self.token_over(now, grant.token),
            }
        }
        let committed = self.steps.coordinator().and_then(StepCoordinator::committed);
        let Some(committed) = committed else { return };
        if self.steps.shards.announce_committed(&mut self.out, &committed) {
            let shrunk = self.shrunk_step(&committed);
            self.out.queue.extend(shrunk.map(ShardOutput::Event));
        }
        if let Some(follower) = &mut self.steps.follower {
            follower.receive_commit(&committed);
        }
        self.begin_step();
    }

    /// On the step owner: the push of a token is over. It may be complete or in transit.
    fn token_over(&mut self, now: Instant, token: u64) {
        self.steps.shards.announce_over(&mut self.out, token);
        let push_slots = self.intake.inbox.as_ref().map(|inbox| inbox.push_slots_of(token));
        for push_slot in push_slots.unwrap_or_default() {
            self.counters.gradients_stale.add(1);
            let current = GlobalStep(self.steps.committed_steps());
            self.drop_stale(now, push_slot, current);
        }
    }

    /// Queues the update of the committed step.
    pub(super) fn begin_step(&mut self) {
        if let (Some(follower), Some(inbox)) = (&self.steps.follower, &self.intake.inbox) {
            self.applier.begin_step(inbox, follower);
        }
    }

    /// A step has been applied: releases its pushes.
    pub(super) fn step_applied(&mut self, now: Instant, push_slots: &[u32]) {
        self.count_overflow();
        self.variables.publish(&mut self.files.journal);
        self.variables.version += 1;
        self.variables.gradients += 1;
        let Some(follower) = &mut self.steps.follower else { return };
        follower.applied();
        let step = follower.step();
        self.stamp_answers();
        self.counters.steps_applied.add(1);
        if let Some(inbox) = &mut self.intake.inbox {
            for &push_slot in push_slots {
                let extents = inbox.arrival(push_slot).map(|push| push.extents.ranges());
                self.variables.add_gradient(extents.unwrap_or_default());
                inbox.release(push_slot);
            }
        }
        self.report_untrained();
        // Pushes for the same step that were not admitted are released too, because their step has
        // passed.
        let passed = self.intake.inbox.iter().flat_map(|inbox| inbox.gradients_before(step));
        for push_slot in passed.collect::<Vec<u32>>() {
            if self.intake.push(push_slot).is_none_or(|push| push.whole.is_none()) {
                self.counters.pushes_dropped.add(1);
            }
            self.drop_over(now, push_slot);
        }
        let own = self.steps.index_of(self.id);
        if let Some(owner) = &mut self.steps.owner {
            if let Some((coordinator, own)) = owner.coordinator_mut().zip(own) {
                coordinator.applied(own, step);
            }
            self.counters.global_step.set(step);
        }
        self.steps.report_applied(&mut self.out);
    }

    /// The squared norm of a gradient is known: reports the gradient as held.
    pub(super) fn norm_done(&mut self, job: &NormJob) {
        let squares = job.squares();
        let Some(inbox) = &mut self.intake.inbox else { return };
        // The slot may hold another push.
        if inbox.arrival(job.push_slot).is_none_or(|push| push.order != job.order) {
            return;
        }
        let Some(token) = inbox.set_squares(job.push_slot, squares) else { return };
        let own = self.steps.index_of(self.id);
        match self.steps.coordinator_mut().zip(own) {
            // A push whose token is over has been dropped.
            Some((coordinator, own)) => _ = coordinator.held(own, token.0, squares.into()),
            None => self.report_held(token),
        }
    }

    /// Restores the complete pushes that an earlier process left.
    pub(in crate::shard) fn recover_held(&mut self) {
        let tokens = self.intake.whole_tokens();
        let is_clipped = self.config.mode.clip_by_global_norm().is_some();
        if let Some(inbox) = self.intake.inbox.as_ref().filter(|_| is_clipped) {
            let push_slots = tokens.iter().filter_map(|token| inbox.whole_push_slot_of(token.0));
            push_slots.for_each(|push_slot| self.applier.begin_norm(inbox, push_slot));
        }
        let own = self.steps.index_of(self.id);
        let step = self.steps.follower.as_ref().map_or(0, |follower| follower.step());
        if let (Some(own), Some(coordinator)) = (own, self.steps.coordinator_mut()) {
            coordinator.applied(own, step);
            for token in tokens.into_iter().filter(|_| !is_clipped) {
                // A push that is over is not here, because its decision dropped it.
                let _ = coordinator.held(own, token.0, 0.0.into());
            }
        }
    }

    /// Reports to the step owner that a push is held here, once its squared norm is known.
    fn report_held(&mut self, token: TokenId) {
        let Some(push_slot) = self.intake.whole_push_slot_of(token) else { return };
        let Some(squares) = self.intake.squares_of(push_slot) else { return };
        let holder = self.intake.inbox.as_ref().and_then(|inbox| inbox.holder(push_slot));
        // The push of an older incarnation has no client, and spends no token.
        let epoch = |client| self.peers.registry.client(client).epoch;
        let client = holder.map_or(ClientEpoch(0), epoch);
        let held = message::Held { token, client, shard: self.id, squares };
        self.steps.report_to_owner(&mut self.out, held.into());
    }

    /// Repeats the reports to the step owner, once there is a connection and at intervals.
    pub(super) fn repeat_reports(&mut self, now: Instant) {
        let interval = self.config.lease / 5;
        if !self.variables.is_ready() || !self.steps.to_owner.reports_are_due(now, interval) {
            return;
        }
        self.steps.report_applied(&mut self.out);
        if self.steps.is_synchronous() {
            for token in self.intake.whole_tokens() {
                self.report_held(token);
            }
        }
    }

    /// On the step owner: a shard holds a complete push.
    pub(super) fn shard_holds(&mut self, now: Instant, connection: u64, held: &message::Held) {
        let message::Held { token, client, shard, squares } = *held;
        if squares < 0.0 {
            return;
        }
        let Some(index) = self.register_shard(now, connection, shard) else { return };
        let holder = self.steps.owner.as_ref().and_then(|owner| owner.ledger().holder_of(token));
        if holder.is_some_and(|holder| self.peers.registry.client(holder).epoch != client) {
            // A client has pushed there under another client's token.
            return;
        }
        let Some(coordinator) = self.steps.coordinator_mut() else { return };
        if !coordinator.held(index, token.0, squares.into()) {
            send_over(&mut self.out, connection, token);
        }
    }

    /// On the step owner: a shard has applied `steps` steps.
    pub(super) fn shard_has_applied(
        &mut self,
        now: Instant,
        connection: u64,
        shard: ShardId,
        steps: u64,
    ) {
        let Some(index) = self.register_shard(now, connection, shard) else { return };
        let Some(coordinator) = self.steps.coordinator_mut() else { return };
        // No shard can have applied a step that is not committed.
        if steps > coordinator.step() {
            return;
        }
        coordinator.applied(index, steps);
        // The shard may have been disconnected when the commit was announced.
        if let Some(committed) = coordinator.committed()
            && steps <= committed.step
        {
            send_committed(&mut self.out, connection, &committed);
        }
    }

    /// Records the connection of another shard that takes part. Returns its index, or `None` if it
    /// takes no part, the connection is another shard's, or that of another task: the task is what a
    /// peer has proved.
    pub(super) fn register_shard(
        &mut self,
        now: Instant,
        connection: u64,
        shard: ShardId,
    ) -> Option<usize> {
        let index = self.steps.index_of(shard).filter(|_| shard != self.id)?;
        if self.peers.peer_task(connection) != Some(shard.task) {
            return None;
        }
        let chief = self.peers.chief.epoch;
        let Shard { steps, out, .. } = self;
        steps.shards.register(out, now, connection, shard, chief).then_some(index)
    }

    /// Returns [`Event::StepShrunk`] if a step that has just been committed has fewer gradients
    /// than the one before because replicas are absent.
    fn shrunk_step(&mut self, committed: &CommittedStep) -> Option<Event> {
        let aggregate = self.config.rule()?.aggregate;
        if !self.steps.has_shrunk(committed, aggregate) {
            return None;
        }
        let registry = &self.peers.registry;
        let absent = registry.keys().map(|key| registry.client(key));
        let absent = absent.filter(|client| client.presence != ClientPresence::Present);
        let absent = absent.map(|client| client.task.clone());
        let absent = absent.chain(registry.never_joined(&self.config.cluster)).collect();
        let gradients = committed.tokens.len();
        Some(Event::StepShrunk { step: committed.step + 1, gradients, aggregate, absent })
    }
}
