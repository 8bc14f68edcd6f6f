//! Synchronous steps on a shard: pushes that are held, what the step owner decides of them, and
//! the update that takes them.

use std::time::Instant;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::message::PushAnswer;
use pushpull_common::protocol::{Envelope, Outcome, PushState};

use super::Shard;
use super::replicas::{ClientKey, Presence};
use super::work::Job;
use crate::aggregate::step_coordinator::{Grant, PerPush, StepCoordinator, Verdict};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_owner::StepOwner;
use crate::inbox::Arrival;
use crate::inbox::WholePush;
use crate::planted::Bug;

impl Shard {
    /// Whether a push is a gradient that waits for its synchronous step.
    pub(super) fn waits_for_step(&self, push: &Arrival) -> bool {
        self.is_synchronous() && push.operation == (Operation::Gradient {})
    }

    /// Whether steps are synchronous here.
    pub(super) fn is_synchronous(&self) -> bool {
        self.follower.is_some()
    }

    /// What makes a step: on the step owner, in synchronous mode.
    pub(super) fn coordinator(&self) -> Option<&StepCoordinator> {
        self.owner.as_ref().and_then(StepOwner::coordinator)
    }

    pub(super) fn coordinator_mut(&mut self) -> Option<&mut StepCoordinator> {
        self.owner.as_mut().and_then(StepOwner::coordinator_mut)
    }

    /// Steps applied here, and the pushes of the step that is to be applied.
    #[cfg(feature = "simulation")]
    pub(crate) fn steps_and_due(&self) -> (u64, Option<&[u64]>) {
        self.follower.as_ref().map_or((0, None), |follower| (follower.step(), follower.due()))
    }

    /// Begins after so many steps, with nothing known of the next.
    pub(super) fn begin_follower(&mut self, step: GlobalStep) {
        if let Some(follower) = &mut self.follower {
            *follower = StepFollower::new(step.0, self.config.planted);
        }
        self.told = None;
        if let (Some(own), Some(coordinator)) = (self.index_of(self.id), self.coordinator_mut()) {
            coordinator.applied(own, step.0);
        }
    }

    /// Takes up what lay whole when an earlier process stopped.
    pub(super) fn recover_held(&mut self, now: Instant) {
        let tokens: Vec<_> = self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect();
        if self.config.clip_by_global_norm.is_some() {
            let push_slots = self.inbox.iter().flat_map(|inbox| {
                tokens.iter().filter_map(|token| inbox.whole_push_slot_of(token.0))
            });
            for push_slot in push_slots.collect::<Vec<u32>>() {
                self.begin_norm(push_slot);
            }
        }
        let measured = self.config.clip_by_global_norm.is_none();
        let own = self.index_of(self.id);
        let step = self.follower.as_ref().map_or(0, |follower| follower.step());
        if let (Some(own), Some(coordinator)) = (own, self.coordinator_mut()) {
            coordinator.applied(own, step);
            for token in tokens.into_iter().filter(|_| measured) {
                // What is over is not here: it is dropped as it is decided.
                let _ = coordinator.held(own, token.0, 0.0.into());
            }
        }
        self.decide(now);
    }

    /// The push in this room is whole, and takes part in a step.
    pub(super) fn push_held(&mut self, now: Instant, push_slot: u32) {
        let Some(push) = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot)) else {
            return;
        };
        let (token, generation, step) = (push.token, push.generation, push.step);
        let holder = self.inbox.as_ref().and_then(|inbox| inbox.holder(push_slot));
        if let (Some(follower), Some(inbox)) = (&mut self.follower, &self.inbox) {
            follower.whole(inbox.whole_tokens().map(|token| token.0));
        }
        let squares = self.squares_of(push_slot);
        if squares.is_none() {
            self.begin_norm(push_slot);
        }
        let own = self.index_of(self.id);
        let passed = self.follower.as_ref().is_some_and(|follower| step.0 < follower.step());
        let Some(owner) = &mut self.owner else {
            let outcome = match passed {
                true => Outcome::Stale { current: self.step() },
                false => Outcome::Held {},
            };
            self.settle_push(now, push_slot, outcome);
            if passed {
                self.release(now, push_slot);
            } else {
                self.report_held(token);
            }
            return;
        };
        let (mut token, mut out) =
            (token, holder.is_some_and(|holder| owner.holds(holder, token, generation)));
        if let Some(holder) = holder.filter(|_| self.config.planted.has(Bug::KeyByReplica))
            && let Some(issued) = owner.tokens_of(holder).last()
        {
            (token, out) = (issued.token, true);
        }
        let held = owner.coordinator_mut().zip(own).is_some_and(|(a, own)| match squares {
            Some(squares) => a.held(own, token.0, squares.into()),
            None => a.is_of_use(token.0),
        });
        if !(out && held) {
            let current = GlobalStep(self.committed_steps());
            self.settle_push(now, push_slot, Outcome::Stale { current });
            self.release(now, push_slot);
        }
        self.decide(now);
    }

    /// Steps committed, as far as this shard knows.
    pub(super) fn committed_steps(&self) -> u64 {
        let coordinator = self.coordinator();
        coordinator.map_or_else(|| self.step().0, |coordinator| coordinator.step())
    }

    /// Carries out what the step owner has decided since this was last called.
    pub(super) fn decide(&mut self, now: Instant) {
        let Some(owner) = &mut self.owner else { return };
        if owner.coordinator().is_none() {
            return;
        }
        for (grant, verdict) in owner.decided() {
            self.carry_out(now, grant, verdict);
        }
        self.on_committed();
        self.begin_requested_save(now);
        self.grant_parked_tokens(now);
    }

    fn carry_out(&mut self, now: Instant, grant: Grant, verdict: Verdict) {
        match verdict {
            Verdict::Admitted { step } => {
                self.counters.gradients_admitted.add(1);
                let push_slot =
                    self.inbox.as_ref().and_then(|inbox| inbox.whole_push_slot_of(grant.token));
                if let Some(push_slot) = push_slot {
                    self.settle_push(now, push_slot, Outcome::Accepted { step: GlobalStep(step) });
                }
            }
            Verdict::Over => {
                self.tell_over(grant.token);
                // Whole, or on its way.
                let push_slots = self.inbox.as_ref().map(|inbox| inbox.push_slots_of(grant.token));
                for push_slot in push_slots.unwrap_or_default() {
                    self.counters.gradients_stale.add(1);
                    let current = GlobalStep(self.committed_steps());
                    self.settle_push(now, push_slot, Outcome::Stale { current });
                    self.release(now, push_slot);
                }
            }
        }
    }

    /// If a step is committed, it is due.
    fn on_committed(&mut self) {
        let coordinator = self.coordinator();
        let Some(committed) = coordinator.and_then(|coordinator| coordinator.committed()) else {
            return;
        };
        self.tell_committed(&committed);
        if let Some(follower) = &mut self.follower {
            follower.learn(&committed);
        }
        self.begin_step();
    }

    /// Has the step that is due applied.
    pub(super) fn begin_step(&mut self) {
        let (Some(follower), Some(inbox)) = (&self.follower, &self.inbox) else { return };
        let under_way = self.jobs.iter().any(|job| matches!(job, Job::Step(_)));
        if let Some(tokens) = follower.due().filter(|_| !under_way) {
            let push_slots: PerPush<u32> =
                tokens.iter().filter_map(|&token| inbox.whole_push_slot_of(token)).collect();
            // What was admitted lies whole here; a step without it would be another one.
            if push_slots.len() == tokens.len() {
                self.jobs.push_back(Job::step(push_slots, follower.factors().collect()));
            }
        }
    }

    /// The step is applied: its pushes make room.
    pub(super) fn step_applied(&mut self, now: Instant, push_slots: &[u32]) {
        self.count_overflow();
        self.publish();
        self.version += 1;
        self.gradients += 1;
        let Some(follower) = &mut self.follower else { return };
        follower.applied();
        let step = follower.step();
        self.counters.steps_applied.add(1);
        if let Some(inbox) = &mut self.inbox {
            push_slots.iter().for_each(|&push_slot| inbox.release(push_slot));
        }
        // With them go those that were not admitted: their step has passed, too.
        let passed = self.inbox.iter().flat_map(|inbox| inbox.gradients_before(step));
        for push_slot in passed.collect::<Vec<u32>>() {
            let whole = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot)?.whole);
            if whole.is_none() {
                self.counters.pushes_dropped.add(1);
            }
            self.answer_scanning(now, push_slot);
            if let Some(inbox) = &mut self.inbox {
                inbox.release(push_slot);
            }
        }
        let own = self.index_of(self.id);
        if let Some(owner) = &mut self.owner {
            if let Some((coordinator, own)) = owner.coordinator_mut().zip(own) {
                coordinator.applied(own, step);
            }
            self.counters.global_step.set(step);
        }
        self.report_applied();
        self.give_parked_push_slots(now);
        self.decide(now);
    }

    /// Settles a push that is whole in its client's window, and answers whoever waits for it.
    fn settle_push(&mut self, now: Instant, push_slot: u32, outcome: Outcome) {
        let Some(inbox) = &self.inbox else { return };
        let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot)) else {
            return;
        };
        let (sequence, Some(whole)) = (push.sequence, push.whole) else { return };
        let entry = self.replicas.client_mut(client);
        if matches!(entry.window.state(sequence), PushState::Unknown {}) {
            entry.window.settle(sequence, outcome);
        }
        let present = entry.presence == Presence::Present;
        let WholePush { connection, request, .. } = whole;
        // It is answered once.
        self.inbox.iter_mut().for_each(|inbox| inbox.set_whole(push_slot, WholePush::unheard()));
        if entry.connection != Some(connection) {
            // It was asked for over a connection that is gone; whoever asks again is answered.
            return;
        }
        let push_slot = if present { self.free_push_slot(now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next: None, ended: None, push_slot };
        let request = Envelope { request, sequence, ..Envelope::default() };
        // Who has asked already for what comes with the step, the next token or values, can do nothing before
        // that. To be told while it is worked on takes two switches, and may take the processor from who does.
        let counts = matches!(outcome, Outcome::Accepted { .. } | Outcome::Held {});
        match counts && self.parked.waits(connection) {
            true => self.answer_corked(connection, request, answer.into()),
            false => self.answer(connection, request, answer.into()),
        }
    }

    /// A push that is whole is dropped before it was looked at, and so before anybody was told that it is
    /// held: its step is over.
    pub(super) fn answer_scanning(&mut self, now: Instant, push_slot: u32) {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        if push.is_some_and(|push| push.scanning) {
            let current = GlobalStep(self.committed_steps());
            self.settle_push(now, push_slot, Outcome::Stale { current });
        }
    }

    pub(super) fn release(&mut self, now: Instant, push_slot: u32) {
        if let Some(inbox) = &mut self.inbox {
            inbox.release(push_slot);
        }
        self.give_parked_push_slots(now);
    }

    /// A replica is there, for the step owner to count on.
    pub(super) fn replica_joins(&mut self, now: Instant, client: ClientKey) {
        let rank = self.task_of(client).index;
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.join(client, rank);
            self.first_join.get_or_insert(now);
            self.decide(now);
        }
    }

    /// A replica is gone, or has been fenced by a newer self that takes its place.
    pub(super) fn replica_goes(&mut self, now: Instant, client: ClientKey, fenced: bool) {
        if let Some(coordinator) = self.coordinator_mut() {
            match fenced {
                true => coordinator.fence(client),
                false => coordinator.lose(client),
            }
            self.decide(now);
        }
    }

    /// Asserts what holds of pushes that are whole, on the step owner.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_held(&self) {
        let coordinator = self.coordinator();
        let (Some(coordinator), Some(inbox)) = (coordinator, &self.inbox) else { return };
        for token in inbox.whole_tokens() {
            assert!(coordinator.is_of_use(token.0), "the push of token {token} is over");
        }
        let passed =
            self.follower.as_ref().is_some_and(|follower| follower.step() == coordinator.step());
        for grant in coordinator.admitted().iter().filter(|_| !passed) {
            let whole = inbox.whole_tokens().any(|token| token.0 == grant.token);
            assert!(whole, "the push of token {} is admitted and not here", grant.token);
        }
        let due = self.follower.as_ref().and_then(|follower| follower.due());
        let job = self.jobs.iter().any(|job| matches!(job, Job::Step(_)));
        assert_eq!(due.is_some(), job, "a step that is due is worked on");
        let pushes = self.jobs.iter().filter_map(|job| inbox.arrival(job.push_slot()?));
        let by_itself = |push: &Arrival| push.operation == Operation::Gradient {};
        assert!(!pushes.into_iter().any(by_itself), "a gradient is applied by itself");
    }
}
