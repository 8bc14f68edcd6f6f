//! Whole pushes: withdrawn, refused, applied; and the outcome that settles each.

use std::time::Instant;

use pushpull_common::ids::{Sequence, TokenId};
use pushpull_common::protocol::message::{Operation, OutcomeIs, PushAnswer};
use pushpull_common::protocol::{Envelope, Outcome, PushState, Refusal};
use pushpull_store::planted::Bug;

use crate::client_entry::ClientPresence;
use crate::client_key::ClientKey;
use crate::coordinators::EffectVerdict;
use crate::event::Event;
use crate::inbox::{PendingAnswer, PushArrival};
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::output::ShardOutput;
use crate::shard::request::PeerRequest;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};
use crate::shard::values::push_job::PushJob;
use crate::shard::values::scan::ScanJob;

impl Shard {
    /// Withdraws a push that is not whole here, and its request for a push slot. A slot that the
    /// client has not used goes to any client that requests one. A whole push is the server's, and
    /// its outcome answers this request.
    pub(super) fn withdraw(&mut self, request: &PeerRequest, client: ClientKey) {
        let &PeerRequest { connection, envelope, since, .. } = request;
        let sequence = envelope.sequence;
        self.peers.parked.take(|ParkedRequest { request, wait }| {
            matches!(wait, WaitReason::PushSlot)
                && request.connection == connection
                && request.envelope.sequence == sequence
        });
        if let Some(inbox) = &mut self.intake.inbox {
            inbox.offer_unused(client);
        }
        let push_slot = self.intake.push_slot_of(client, sequence);
        let whole = self.intake.has_whole(client, sequence);
        let settled = self.peers.registry.client(client).window.state(sequence);
        if whole && !matches!(settled, PushState::Settled { .. }) {
            if let (Some(push_slot), Some(inbox)) = (push_slot, &mut self.intake.inbox) {
                let request = envelope.request;
                let since = Some(since);
                let pending =
                    PendingAnswer { connection, request, next: false, since, deadline: None };
                inbox.set_whole(push_slot, pending);
            }
            return;
        }
        let window = &mut self.peers.registry.client_mut(client).window;
        let outcome = match window.state(sequence) {
            PushState::Settled { outcome } => outcome,
            PushState::TooOld { oldest } => {
                let oldest = Sequence(oldest);
                let refusal = Refusal::Window { sequence, oldest, newest: Sequence(u64::MAX) };
                return request.refuse(&mut self.out, refusal);
            }
            _ => {
                // The outcome is settled as withdrawn, so that parts in transit are never applied.
                window.settle(sequence, Outcome::Withdrawn {});
                Outcome::Withdrawn {}
            }
        };
        if let Some(push_slot) = push_slot.filter(|_| !whole) {
            self.intake.release(push_slot);
        }
        self.out.answer_push(connection, envelope, outcome, false);
    }

    /// Answers what has become of a push.
    pub(super) fn answer_outcome(&mut self, request: &PeerRequest, client: ClientKey) {
        let sequence = request.envelope.sequence;
        let arrived = self.intake.bytes_of(client, sequence);
        let state = match (self.peers.registry.client(client).window.state(sequence), arrived) {
            (PushState::Unknown {}, Some(bytes)) => PushState::Receiving { bytes },
            (state, _) => state,
        };
        request.answer(&mut self.out, OutcomeIs { state }.into());
    }

    /// Refuses a complete push before it counts. A present client keeps the token of the push; the
    /// token of an absent client is returned.
    pub(super) fn refuse_whole(&mut self, push_slot: u32, refusal: Refusal) {
        let Some((client, push)) = self.intake.take_refused(push_slot) else { return };
        let holder = client.map(|client| self.peers.registry.client(client));
        let is_present = holder.is_some_and(|client| client.presence == ClientPresence::Present);
        let connection = holder.and_then(|client| client.connection);
        if let Some(whole) = push.whole.filter(|whole| connection == Some(whole.connection)) {
            let request = whole.request;
            let sequence = push.sequence;
            let request = Envelope { request, sequence, ..Envelope::default() };
            self.out.refuse(whole.connection, request, refusal);
        }
        if push.operation == (Operation::Gradient {}) && !is_present {
            self.steps.return_token_of(&push);
        }
    }

    /// Drops a complete push that must not be applied any more. Returns whether it did.
    pub(super) fn drop_if_over(&mut self, now: Instant, push_slot: u32) -> bool {
        // A repeated gradient is never too old: its effect has counted.
        self.drop_if_repeated(now, push_slot) || self.drop_if_too_old(now, push_slot)
    }

    /// Drops a complete gradient whose effect has settled since, and refuses one whose effect is
    /// not valid any more. Returns whether it did.
    ///
    /// Complete pushes are applied one after the other, and this precedes each. So of two complete
    /// pushes of one effect the second changes nothing.
    fn drop_if_repeated(&mut self, now: Instant, push_slot: u32) -> bool {
        let Some(inbox) = &mut self.intake.inbox else { return false };
        let Some(effect) = inbox.arrival(push_slot).and_then(|push| push.effect) else {
            return false;
        };
        match self.steps.coordinators.check(&effect) {
            Ok(EffectVerdict::Counts) => return false,
            Ok(EffectVerdict::Repeated) => {
                let Some((client, push)) = inbox.take(push_slot) else { return false };
                let owner = self.steps.owner.as_ref();
                let holder = owner.and_then(|owner| owner.ledger().holder_of(push.token));
                let outcome = self.steps.repeated_outcome(holder, push.token, push.generation);
                if let Some(client) = client {
                    self.settle_and_answer(now, client, &push, outcome);
                }
            }
            Err(refusal) => self.refuse_whole(push_slot, refusal),
        }
        true
    }

    /// Drops a complete gradient if it has become too old since to be applied. Returns whether it
    /// was dropped.
    fn drop_if_too_old(&mut self, now: Instant, push_slot: u32) -> bool {
        let (Some(owner), Some(inbox)) = (&self.steps.owner, &mut self.intake.inbox) else {
            return false;
        };
        let is_too_old = inbox.arrival(push_slot).is_some_and(|push| {
            let tokens = owner.asynchronous_tokens();
            push.operation == Operation::Gradient {}
                && tokens.is_some_and(|tokens| tokens.is_too_old(push.token, push.step))
        });
        if !is_too_old {
            return false;
        }
        let Some((client, push)) = inbox.take(push_slot) else { return false };
        let outcome = self.steps.stale_outcome(push.token);
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        true
    }

    /// A scan has ended: the push is held for its step, refused, or applied next. Returns whether
    /// it is to be applied.
    pub(super) fn scan_done(&mut self, now: Instant, job: ScanJob) -> bool {
        let push_slot = job.push_slot;
        let Some(inbox) = &mut self.intake.inbox else { return false };
        if !inbox.set_scanning(push_slot, job.order, false) {
            // The push was dropped meanwhile.
            return false;
        }
        let waits = inbox.arrival(push_slot).is_some_and(|push| self.steps.waits_for_step(push));
        match job.refusal {
            Some(refusal) => self.refuse_whole(push_slot, refusal),
            None if waits => self.hold(now, push_slot),
            None => {
                self.applier.begin_scanned_push(push_slot);
                return true;
            }
        }
        false
    }

    /// Counts an update that made values infinite or NaN, and reports the first.
    pub(super) fn count_overflow(&mut self) {
        if let Some(first) = self.variables.count_overflow() {
            let shard = self.id;
            self.out.push(ShardOutput::Event(Event::ValueOverflowed { shard, first }));
        }
    }

    /// Settles a push that has been applied, frees its slot, and answers. Returns what that has
    /// changed: everything but checkpoints.
    pub(super) fn push_applied(&mut self, now: Instant, job: PushJob) -> Changes {
        let Some(inbox) = &mut self.intake.inbox else { return Changes::ALL };
        self.variables.record_assigned(inbox, job.push_slot);
        let Some((client, push)) = inbox.take(job.push_slot) else { return Changes::ALL };
        self.count_overflow();
        if !self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.variables.publish(&mut self.files.journal);
        }
        self.variables.version += 1;
        let mut staleness = 0;
        if push.operation == (Operation::Gradient {}) {
            staleness = self.gradient_applied(&job, &push);
        } else {
            self.counters.assigns_applied.add(1);
        }
        if let Some(effect) = &push.effect {
            self.steps.coordinators.settle(effect);
        }
        let version = self.variables.version;
        let outcome = Outcome::Applied { version, step: self.steps.step(), staleness };
        self.applier.end_update();
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        if self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.persist();
            self.variables.publish(&mut self.files.journal);
        }
        let values = Changes::SLOTS | Changes::VALUES | Changes::MEMBERS;
        values | Changes::TOKENS | Changes::STEP
    }

    /// Counts a gradient that has been applied, and spends its token. Returns its staleness.
    fn gradient_applied(&mut self, job: &PushJob, push: &PushArrival) -> u64 {
        self.variables.gradients += 1;
        self.counters.gradients_applied.add(1);
        let adjustment = job.adjustment();
        debug_assert_eq!(
            adjustment.at.count, self.variables.gradients,
            "no gradient was applied in between"
        );
        adjustment.count(&self.counters);
        self.variables.add_gradient(push.extents.ranges());
        self.report_untrained();
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return 0 };
        let staleness = tokens.spend(push.token, push.step);
        debug_assert_eq!(
            adjustment.staleness,
            Some(staleness),
            "the staleness has changed since the push began"
        );
        self.counters.global_step.set(tokens.ledger.steps.step);
        self.stamp_answers();
        staleness
    }

    /// Settles a push in its client's window, and only then acknowledges it.
    fn settle_and_answer(
        &mut self,
        now: Instant,
        client: ClientKey,
        push: &PushArrival,
        outcome: Outcome,
    ) {
        let entry = self.peers.registry.client_mut(client);
        let is_applied = matches!(outcome, Outcome::Applied { .. });
        // An effect has a window of its own, and is pushed again until it has settled everywhere.
        let is_audited = push.operation == (Operation::Gradient {}) && push.effect.is_none();
        let token = if is_applied && is_audited { push.token } else { TokenId(0) };
        entry.window.settle_under(token, push.sequence, outcome);
        if push.operation == (Operation::Gradient {}) {
            entry.gradient_settled(now);
        }
        let (Some(connection), Some(whole)) = (entry.connection, push.whole) else {
            return;
        };
        if whole.connection != connection {
            // The request came over a connection that has ended. A repeated request is answered.
            return;
        }
        let is_present = entry.presence == ClientPresence::Present;
        let (next, ended) = match whole.next && is_present {
            true => self.next_token(now, client),
            false => (None, None),
        };
        let push_slot = if is_present { self.offer_push_slot(now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next, ended, push_slot };
        let request = whole.request;
        let sequence = push.sequence;
        let request = Envelope { request, sequence, ..Envelope::default() };
        self.out.answer(connection, request, answer.into());
    }

    /// Counts an update that is applied, and reports the variables that none has changed.
    pub(super) fn report_untrained(&mut self) {
        let shard = self.id;
        for (variable, updates) in self.variables.end_update() {
            let event = Event::NeverTrained { shard, variable, updates };
            self.out.push(ShardOutput::Event(event));
        }
    }
}
