//! Synchronous steps on a shard: held pushes, the step owner's decisions, and the step's update.

use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::PushAnswer;
use pushpull_common::protocol::{Envelope, Outcome, PushState};
use pushpull_store::testing::planted::Bug;

use super::Shard;
use super::client_registry::ClientPresence;
use super::intake::Intake;
use super::output::Outputs;
use super::peers::Peers;
use super::steps::Steps;
use crate::aggregate::step_coordinator::{Grant, TokenOutcome};
use crate::inbox::PendingAnswer;

impl Shard {
    /// Restores the complete pushes that an earlier process left.
    pub(super) fn recover_held(&mut self) {
        let tokens: Vec<_> =
            self.intake.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect();
        if self.config.clip_by_global_norm.is_some() {
            let push_slots = self.intake.inbox.iter().flat_map(|inbox| {
                tokens.iter().filter_map(|token| inbox.whole_push_slot_of(token.0))
            });
            for push_slot in push_slots.collect::<Vec<u32>>() {
                self.applier.begin_norm(&self.intake, push_slot);
            }
        }
        let measured = self.config.clip_by_global_norm.is_none();
        let own = self.steps.index_of(self.id);
        let step = self.steps.follower.as_ref().map_or(0, |follower| follower.step());
        if let (Some(own), Some(coordinator)) = (own, self.steps.coordinator_mut()) {
            coordinator.applied(own, step);
            for token in tokens.into_iter().filter(|_| measured) {
                // A push that is over is not here, because its decision dropped it.
                let _ = coordinator.held(own, token.0, 0.0.into());
            }
        }
    }

    /// A complete push takes part in a step.
    pub(super) fn push_held(&mut self, now: Instant, push_slot: u32) {
        let Some(push) = self.intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot))
        else {
            return;
        };
        let (token, generation, step) = (push.token, push.generation, push.step);
        let holder = self.intake.inbox.as_ref().and_then(|inbox| inbox.holder(push_slot));
        if let (Some(follower), Some(inbox)) = (&mut self.steps.follower, &self.intake.inbox) {
            follower.report_whole(inbox.whole_tokens().map(|token| token.0));
        }
        let squares = self.intake.squares_of(push_slot);
        if squares.is_none() {
            self.applier.begin_norm(&self.intake, push_slot);
        }
        let own = self.steps.index_of(self.id);
        let passed = self.steps.follower.as_ref().is_some_and(|follower| step.0 < follower.step());
        let Some(owner) = &mut self.steps.owner else {
            let outcome = match passed {
                true => Outcome::Stale { current: self.steps.step() },
                false => Outcome::Held {},
            };
            self.intake.settle_push(&mut self.peers, &mut self.out, now, push_slot, outcome);
            if passed {
                self.intake.release(push_slot);
            } else {
                self.steps.report_held(&self.intake, &self.peers, &mut self.out, token);
            }
            return;
        };
        let (mut token, mut out) =
            (token, holder.is_some_and(|holder| owner.tokens().holds(holder, token, generation)));
        if let Some(holder) = holder.filter(|_| self.config.planted.has(Bug::KeyByReplica))
            && let Some(issued) = owner.tokens().of(holder).last()
        {
            (token, out) = (issued.token, true);
        }
        let held = owner.coordinator_mut().zip(own).is_some_and(|(a, own)| match squares {
            Some(squares) => a.held(own, token.0, squares.into()),
            None => a.is_of_use(token.0),
        });
        if !(out && held) {
            let current = GlobalStep(self.steps.committed_steps());
            self.intake.settle_push(
                &mut self.peers,
                &mut self.out,
                now,
                push_slot,
                Outcome::Stale { current },
            );
            self.intake.release(push_slot);
        }
    }

    /// Carries out the decisions of the step owner since the last call.
    pub(super) fn decide(&mut self, now: Instant) {
        let Some(coordinator) = self.steps.coordinator_mut() else { return };
        for (grant, verdict) in coordinator.verdicts() {
            self.steps.carry_out(
                &mut self.intake,
                &mut self.peers,
                &mut self.out,
                now,
                grant,
                verdict,
            );
        }
        self.on_committed();
    }

    /// Announces and begins a committed step.
    fn on_committed(&mut self) {
        let coordinator = self.steps.coordinator();
        let Some(committed) = coordinator.and_then(|coordinator| coordinator.committed()) else {
            return;
        };
        self.steps.announce_committed(&mut self.out, &committed);
        if let Some(follower) = &mut self.steps.follower {
            follower.receive_commit(&committed);
        }
        self.applier.begin_step(&self.intake, &self.steps);
    }

    /// A step has been applied: releases its pushes.
    pub(super) fn step_applied(&mut self, now: Instant, push_slots: &[u32]) {
        self.variables.count_overflow();
        self.variables.publish(&mut self.files);
        self.variables.version += 1;
        self.variables.gradients += 1;
        let Some(follower) = &mut self.steps.follower else { return };
        follower.applied();
        let step = follower.step();
        self.stamp_answers();
        self.counters.steps_applied.add(1);
        if let Some(inbox) = &mut self.intake.inbox {
            push_slots.iter().for_each(|&push_slot| inbox.release(push_slot));
        }
        // Pushes for the same step that were not admitted are released too, because their step has
        // passed.
        let passed = self.intake.inbox.iter().flat_map(|inbox| inbox.gradients_before(step));
        for push_slot in passed.collect::<Vec<u32>>() {
            let whole =
                self.intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot)?.whole);
            if whole.is_none() {
                self.counters.pushes_dropped.add(1);
            }
            self.steps.answer_scanning(
                &mut self.intake,
                &mut self.peers,
                &mut self.out,
                now,
                push_slot,
            );
            if let Some(inbox) = &mut self.intake.inbox {
                inbox.release(push_slot);
            }
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
}

impl Steps {
    pub(super) fn carry_out(
        &mut self,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut Outputs,
        now: Instant,
        grant: Grant,
        verdict: TokenOutcome,
    ) {
        match verdict {
            TokenOutcome::Admitted { step } => {
                self.counters.gradients_admitted.add(1);
                let push_slot =
                    intake.inbox.as_ref().and_then(|inbox| inbox.whole_push_slot_of(grant.token));
                if let Some(push_slot) = push_slot {
                    intake.settle_push(
                        peers,
                        out,
                        now,
                        push_slot,
                        Outcome::Accepted { step: GlobalStep(step) },
                    );
                }
            }
            TokenOutcome::Over => {
                self.announce_over(out, grant.token);
                // The push may be complete or in transit.
                let push_slots =
                    intake.inbox.as_ref().map(|inbox| inbox.push_slots_of(grant.token));
                for push_slot in push_slots.unwrap_or_default() {
                    self.counters.gradients_stale.add(1);
                    let current = GlobalStep(self.committed_steps());
                    intake.settle_push(peers, out, now, push_slot, Outcome::Stale { current });
                    intake.release(push_slot);
                }
            }
        }
    }

    /// Answers a complete push that is dropped before its scan, and so before it was reported as
    /// held, because its step is over.
    pub(super) fn answer_scanning(
        &self,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut Outputs,
        now: Instant,
        push_slot: u32,
    ) {
        let push = intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        if push.is_some_and(|push| push.scanning) {
            let current = GlobalStep(self.committed_steps());
            intake.settle_push(peers, out, now, push_slot, Outcome::Stale { current });
        }
    }
}

impl Intake {
    /// Settles a complete push in its client's window, and answers its client.
    pub(super) fn settle_push(
        &mut self,
        peers: &mut Peers,
        out: &mut Outputs,
        now: Instant,
        push_slot: u32,
        outcome: Outcome,
    ) {
        let Some(inbox) = &self.inbox else { return };
        let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot)) else {
            return;
        };
        let (sequence, Some(whole)) = (push.sequence, push.whole) else { return };
        let entry = peers.registry.client_mut(client);
        if matches!(entry.window.state(sequence), PushState::Unknown {}) {
            entry.window.settle(sequence, outcome);
        }
        let present = entry.presence == ClientPresence::Present;
        let PendingAnswer { connection, request, .. } = whole;
        // The push is answered once.
        self.inbox
            .iter_mut()
            .for_each(|inbox| inbox.set_whole(push_slot, PendingAnswer::unawaited()));
        if entry.connection != Some(connection) {
            // The connection of the request has ended. A client that asks again is answered.
            return;
        }
        let push_slot = if present { self.free_push_slot(peers, now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next: None, ended: None, push_slot };
        let request = Envelope { request, sequence, ..Envelope::default() };
        // A client that already waits for the next token or for the step's values can do nothing
        // before them. Answering it during the update would cost two context switches, and could
        // take the processor from the update.
        let counts = matches!(outcome, Outcome::Accepted { .. } | Outcome::Held {});
        match counts && peers.parked.waits(connection) {
            true => out.answer_corked(connection, request, answer.into()),
            false => out.answer(connection, request, answer.into()),
        }
    }
}
