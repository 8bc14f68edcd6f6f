//! A gradient that is whole on a shard and waits for its synchronous step.

use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::PushAnswer;
use pushpull_common::protocol::{Envelope, Outcome, PushState};
use pushpull_store::testing::planted::Bug;

use super::applier::Applier;
use super::intake::Intake;
use super::output::ShardOutputs;
use super::peers::Peers;
use super::peers::client_registry::ClientPresence;
use super::steps::Steps;
use crate::inbox::PendingAnswer;

/// A whole gradient in a push slot. It is held until its step is applied or it is dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldPush {
    pub(super) push_slot: u32,
}

impl HeldPush {
    /// Takes part in a step: the step owner decides about the push, another shard reports it.
    pub(super) fn take_part(
        self,
        steps: &mut Steps,
        applier: &mut Applier,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let push_slot = self.push_slot;
        let Some(inbox) = &intake.inbox else { return };
        let Some(push) = inbox.arrival(push_slot) else { return };
        let (token, generation, step) = (push.token, push.generation, push.step);
        let holder = inbox.holder(push_slot);
        if let Some(follower) = &mut steps.follower {
            follower.report_whole(inbox.whole_tokens().map(|token| token.0));
        }
        let squares = intake.squares_of(push_slot);
        if squares.is_none() {
            applier.begin_norm(intake, push_slot);
        }
        let own = steps.index_of(steps.id);
        let passed = steps.follower.as_ref().is_some_and(|follower| step.0 < follower.step());
        let Some(owner) = &mut steps.owner else {
            if passed {
                return self.drop_stale(intake, peers, out, now, steps.step());
            }
            self.settle(intake, peers, out, now, Outcome::Held {});
            return steps.report_held(intake, peers, out, token);
        };
        let is_out = |holder| owner.ledger().holds(holder, token, generation);
        let (mut token, mut is_out) = (token, holder.is_some_and(is_out));
        if let Some(holder) = holder.filter(|_| steps.config.planted.has(Bug::KeyByReplica))
            && let Some(issued) = owner.ledger().of(holder).last()
        {
            (token, is_out) = (issued.token, true);
        }
        let held = owner.coordinator_mut().zip(own).is_some_and(|(a, own)| match squares {
            Some(squares) => a.held(own, token.0, squares.into()),
            None => a.is_of_use(token.0),
        });
        if !(is_out && held) {
            self.drop_stale(intake, peers, out, now, GlobalStep(steps.committed_steps()));
        }
    }

    /// Settles the push as stale, and releases its slot.
    pub(super) fn drop_stale(
        self,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
        current: GlobalStep,
    ) {
        self.settle(intake, peers, out, now, Outcome::Stale { current });
        intake.release(self.push_slot);
    }

    /// Releases the slot of a push whose step is over. A push that is dropped before its scan, and
    /// so before it was reported as held, is answered.
    pub(super) fn drop_over(
        self,
        steps: &Steps,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let push = intake.inbox.as_ref().and_then(|inbox| inbox.arrival(self.push_slot));
        if push.is_some_and(|push| push.scanning) {
            let current = GlobalStep(steps.committed_steps());
            self.settle(intake, peers, out, now, Outcome::Stale { current });
        }
        intake.release(self.push_slot);
    }

    /// Settles a complete push in its client's window, and answers its client.
    pub(super) fn settle(
        self,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
        outcome: Outcome,
    ) {
        let push_slot = self.push_slot;
        let Some(inbox) = &intake.inbox else { return };
        let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot)) else {
            return;
        };
        let (sequence, Some(whole)) = (push.sequence, push.whole) else { return };
        let entry = peers.registry.client_mut(client);
        if matches!(entry.window.state(sequence), PushState::Unknown {}) {
            entry.window.settle(sequence, outcome);
            entry.gradient_settled(now);
        }
        let present = entry.presence == ClientPresence::Present;
        let PendingAnswer { connection, request, .. } = whole;
        // The push is answered once.
        let inbox = intake.inbox.iter_mut();
        inbox.for_each(|inbox| inbox.set_whole(push_slot, PendingAnswer::unawaited()));
        if entry.connection != Some(connection) {
            // The connection of the request has ended. A client that asks again is answered.
            return;
        }
        let push_slot = if present { intake.free_push_slot(peers, now, client) } else { 0 };
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
