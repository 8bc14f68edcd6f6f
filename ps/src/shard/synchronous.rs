//! Synchronous steps on a shard: pushes that are held, what the step owner decides of them, and
//! the update that takes them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::message::{PushAnswer, PushPart};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Header, Message, Outcome, PushState, Refusal, message};

use super::output::Output;
use super::parked::Wait;
use super::replicas::{ClientKey, Presence};
use super::work::Job;
use super::{Detail, Part, Shard};
use crate::aggregate::admission::{Committed, Grant, Verdict};
use crate::aggregate::mode::OnLoss;
use crate::aggregate::round::Round;
use crate::aggregate::step_owner::StepOwner;
#[cfg(any(test, fuzzing, feature = "simulation"))]
use crate::inbox::Arrival;
use crate::inbox::WholePush;
use crate::zoo::Bug;

impl Shard {
    /// Whether steps are synchronous here.
    pub(super) fn is_synchronous(&self) -> bool {
        self.round.is_some()
    }

    /// Steps applied here, and the pushes of the step that is to be applied.
    #[cfg(feature = "simulation")]
    pub(crate) fn steps_and_due(&self) -> (u64, Option<&[u64]>) {
        self.round.as_ref().map_or((0, None), |round| (round.step(), round.due()))
    }

    /// The shards that take part in a step, in the order in which the step owner counts them: those
    /// with variables, and its own.
    fn taking_part(&self) -> Vec<ShardId> {
        let store = self.store();
        let mut shards: Vec<ShardId> =
            store.map_or_else(Vec::new, |store| store.catalogue().shards().collect());
        if self.owner.is_some() && !shards.contains(&self.id) {
            shards.push(self.id);
        }
        shards.sort_unstable();
        shards
    }

    /// The place of a shard among those that take part.
    fn index_of(&self, shard: ShardId) -> Option<usize> {
        self.taking_part().iter().position(|&other| other == shard)
    }

    /// The variables have their places: from now on it is known which shards take part.
    pub(super) fn shards_are_known(&mut self) {
        let shards = self.taking_part().len();
        if let Some(admission) = self.owner.as_mut().and_then(StepOwner::admission_mut) {
            admission.set_shards(shards);
        }
    }

    /// Begins after so many steps, with nothing known of the next.
    pub(super) fn begin_round(&mut self, step: GlobalStep) {
        if let Some(round) = &mut self.round {
            *round = Round::new(step.0, self.config.zoo);
        }
        self.told = None;
        if let (Some(own), Some(admission)) =
            (self.index_of(self.id), self.owner.as_mut().and_then(StepOwner::admission_mut))
        {
            admission.applied(own, step.0);
        }
    }

    /// Takes up what lay whole when an earlier process stopped.
    pub(super) fn take_up_held(&mut self, now: Instant) {
        let tokens: Vec<_> = self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect();
        let own = self.index_of(self.id);
        let step = self.round.as_ref().map_or(0, |round| round.step());
        if let (Some(own), Some(admission)) =
            (own, self.owner.as_mut().and_then(StepOwner::admission_mut))
        {
            admission.applied(own, step);
            for token in tokens {
                // What is over is not here: it is dropped as it is decided.
                let _ = admission.held(own, token.0);
            }
        }
        self.decide(now);
    }

    /// Whether a gradient comes too late to be of use, as far as this shard knows: it is not worth
    /// receiving.
    pub(super) fn comes_too_late(
        &self,
        client: ClientKey,
        step: GlobalStep,
        part: &PushPart,
    ) -> bool {
        let Some(round) = self.round.as_ref().filter(|_| part.operation == Operation::Gradient {})
        else {
            return false;
        };
        match &self.owner {
            Some(owner) if self.config.zoo.has(Bug::KeyByReplica) => !owner.has_out(client),
            Some(owner) => !owner.holds(client, part.token, part.generation),
            None => step.0 < round.step(),
        }
    }

    /// Passes over a part of a gradient that comes too late, and says so once it is whole.
    pub(super) fn pass_over(&mut self, now: Instant, client: ClientKey, part: &Part) {
        let (sequence, room) = (part.request.sequence, part.room);
        if let Some(inbox) = &mut self.inbox
            && inbox.find(client, sequence) == Some(room)
        {
            inbox.release(room);
            self.give_parked_rooms(now);
        }
        if part.whole.is_some() {
            let outcome = Outcome::Stale { current: GlobalStep(self.committed_steps()) };
            self.replicas.client_mut(client).window.settle(sequence, outcome);
            self.counters.gradients_stale.add(1);
            self.answer_push(part.connection, part.request, outcome, false);
        }
    }

    /// The push in this room is whole, and takes part in a step.
    pub(super) fn push_held(&mut self, now: Instant, room: u32) {
        let Some(push) = self.inbox.as_ref().and_then(|inbox| inbox.arrival(room)) else { return };
        let (token, generation, step) = (push.token, push.generation, push.step);
        let holder = self.inbox.as_ref().and_then(|inbox| inbox.holder(room));
        if let (Some(round), Some(inbox)) = (&mut self.round, &self.inbox) {
            round.whole(inbox.whole_tokens().map(|token| token.0));
        }
        let own = self.index_of(self.id);
        let passed = self.round.as_ref().is_some_and(|round| step.0 < round.step());
        let Some(owner) = &mut self.owner else {
            let outcome = match passed {
                true => Outcome::Stale { current: self.step() },
                false => Outcome::Held {},
            };
            self.settle_push(now, room, outcome);
            if passed {
                self.release(now, room);
            } else {
                self.report_held(token);
            }
            return;
        };
        let (mut token, mut out) =
            (token, holder.is_some_and(|holder| owner.holds(holder, token, generation)));
        if let Some(holder) = holder.filter(|_| self.config.zoo.has(Bug::KeyByReplica))
            && let Some(issued) = owner.tokens_of(holder).last()
        {
            (token, out) = (issued.token, true);
        }
        let held = owner.admission_mut().zip(own).is_some_and(|(a, own)| a.held(own, token.0));
        if !(out && held) {
            let current = GlobalStep(self.committed_steps());
            self.settle_push(now, room, Outcome::Stale { current });
            self.release(now, room);
        }
        self.decide(now);
    }

    /// Steps committed, as far as this shard knows.
    fn committed_steps(&self) -> u64 {
        let admission = self.owner.as_ref().and_then(StepOwner::admission);
        admission.map_or_else(|| self.step().0, |admission| admission.step())
    }

    /// Carries out what the step owner has decided since this was last called.
    pub(super) fn decide(&mut self, now: Instant) {
        let Some(owner) = &mut self.owner else { return };
        if owner.admission().is_none() {
            return;
        }
        for (grant, verdict) in owner.decided() {
            self.carry_out(now, grant, verdict);
        }
        self.hear_committed();
        self.grant_parked_tokens(now);
    }

    fn carry_out(&mut self, now: Instant, grant: Grant, verdict: Verdict) {
        match verdict {
            Verdict::Admitted { step } => {
                self.counters.gradients_admitted.add(1);
                let room = self.inbox.as_ref().and_then(|inbox| inbox.whole_room_of(grant.token));
                if let Some(room) = room {
                    self.settle_push(now, room, Outcome::Accepted { step: GlobalStep(step) });
                }
            }
            Verdict::Over => {
                self.tell_over(grant.token);
                // Whole, or on its way.
                let rooms = self.inbox.as_ref().map(|inbox| inbox.rooms_of(grant.token));
                for room in rooms.unwrap_or_default() {
                    self.counters.gradients_stale.add(1);
                    let current = GlobalStep(self.committed_steps());
                    self.settle_push(now, room, Outcome::Stale { current });
                    self.release(now, room);
                }
            }
        }
    }

    /// If a step is committed, it is due.
    fn hear_committed(&mut self) {
        let admission = self.owner.as_ref().and_then(StepOwner::admission);
        let Some(committed) = admission.and_then(|admission| admission.committed()) else { return };
        self.tell_committed(&committed);
        if let Some(round) = &mut self.round {
            round.learn(&committed);
        }
        self.begin_step();
    }

    /// Has the step that is due applied.
    pub(super) fn begin_step(&mut self) {
        let (Some(round), Some(inbox)) = (&self.round, &self.inbox) else { return };
        let under_way = self.jobs.iter().any(|job| matches!(job, Job::Step(_)));
        if let Some(tokens) = round.due().filter(|_| !under_way) {
            let rooms: Vec<u32> =
                tokens.iter().filter_map(|&token| inbox.whole_room_of(token)).collect();
            // What was admitted lies whole here; a step without it would be another one.
            if rooms.len() == tokens.len() {
                self.jobs.push_back(Job::step(rooms));
            }
        }
    }

    /// The step is applied: its pushes make room.
    pub(super) fn step_applied(&mut self, now: Instant, rooms: &[u32]) {
        self.publish();
        self.version += 1;
        self.gradients += 1;
        let Some(round) = &mut self.round else { return };
        round.applied();
        let step = round.step();
        self.counters.steps_applied.add(1);
        if let Some(inbox) = &mut self.inbox {
            rooms.iter().for_each(|&room| inbox.release(room));
        }
        // With them go those that were not admitted: their step has passed, too.
        let passed = self.inbox.iter().flat_map(|inbox| inbox.gradients_before(step));
        for room in passed.collect::<Vec<u32>>() {
            let whole = self.inbox.as_ref().and_then(|inbox| inbox.arrival(room)?.whole);
            if whole.is_none() {
                self.counters.pushes_dropped.add(1);
            }
            if let Some(inbox) = &mut self.inbox {
                inbox.release(room);
            }
        }
        let own = self.index_of(self.id);
        if let Some(owner) = &mut self.owner {
            if let Some((admission, own)) = owner.admission_mut().zip(own) {
                admission.applied(own, step);
            }
            self.counters.global_step.set(step);
        }
        self.report_applied();
        self.give_parked_rooms(now);
        self.decide(now);
    }

    /// Settles a push that is whole in its client's window, and answers whoever waits for it.
    fn settle_push(&mut self, now: Instant, room: u32, outcome: Outcome) {
        let Some(inbox) = &self.inbox else { return };
        let (Some(push), Some(client)) = (inbox.arrival(room), inbox.holder(room)) else { return };
        let (sequence, Some(whole)) = (push.sequence, push.whole) else { return };
        let entry = self.replicas.client_mut(client);
        if matches!(entry.window.state(sequence), PushState::Unknown {}) {
            entry.window.settle(sequence, outcome);
        }
        let present = entry.presence == Presence::Present;
        let WholePush { connection, request, .. } = whole;
        // It is answered once.
        self.inbox.iter_mut().for_each(|inbox| inbox.set_whole(room, WholePush::unheard()));
        if entry.connection != Some(connection) {
            // It was asked for over a connection that is gone; whoever asks again is answered.
            return;
        }
        let room = if present { self.spare_room(now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next: None, ended: None, room };
        let request = Envelope { request, sequence, ..Envelope::default() };
        self.answer(connection, request, answer.into());
    }

    fn release(&mut self, now: Instant, room: u32) {
        if let Some(inbox) = &mut self.inbox {
            inbox.release(room);
        }
        self.give_parked_rooms(now);
    }

    /// A replica is there, for the step owner to count on.
    pub(super) fn replica_joins(&mut self, now: Instant, client: ClientKey) {
        let rank = self.task_of(client).index;
        if let Some(admission) = self.owner.as_mut().and_then(StepOwner::admission_mut) {
            admission.join(client, rank);
            self.first_join.get_or_insert(now);
            self.decide(now);
        }
    }

    /// A replica is gone, or has been fenced by a newer self that takes its place.
    pub(super) fn replica_goes(&mut self, now: Instant, client: ClientKey, fenced: bool) {
        if let Some(admission) = self.owner.as_mut().and_then(StepOwner::admission_mut) {
            match fenced {
                true => admission.fence(client),
                false => admission.lose(client),
            }
            self.decide(now);
        }
    }

    /// Time has passed: replicas that have not come are no longer expected.
    pub(super) fn stop_expecting(&mut self, now: Instant) {
        let waited = self.first_join.map_or(Duration::ZERO, |first| now.duration_since(first));
        if let Some(admission) = self.owner.as_mut().and_then(StepOwner::admission_mut)
            && admission.expects() > 0
            && waited >= self.config.join_timeout
        {
            admission.expect_nobody();
            self.decide(now);
        }
    }

    /// What a request for a token waits for, in words.
    pub(crate) fn awaited_step(&self, now: Instant) -> Option<String> {
        let admission = self.owner.as_ref().and_then(StepOwner::admission)?;
        if admission.is_applying() {
            let step = admission.step() - 1;
            return Some(format!("step {step} to be applied by every shard"));
        }
        let given: Vec<ClientKey> = admission.admitted().iter().map(|g| g.holder).collect();
        let missing = self.replicas.keys().filter(|client| {
            let left = self.replicas.client(*client).presence == Presence::Left;
            !given.contains(client) && !left
        });
        let missing: Vec<String> = missing
            .map(|client| {
                let entry = self.replicas.client(client);
                let silent = now.saturating_duration_since(self.replicas.last_heard(client));
                let state = match entry.presence {
                    Presence::Lost => "lost, heard from",
                    _ => "heard from",
                };
                format!("{} ({state} {} ms ago)", entry.task, silent.as_millis())
            })
            .collect();
        let (step, count, goal) = (admission.step(), given.len(), admission.goal());
        let unseen = match admission.expects() {
            0 => String::new(),
            unseen => format!(" and {unseen} not seen yet"),
        };
        let missing = missing.join(", ");
        Some(format!("step {step}, which has {count} of {goal} gradients; {missing}{unseen}"))
    }

    /// Answers those whose pushes are held and not decided, if they wait no longer; the pushes stay.
    fn end_waits_of_pushes(&mut self, now: Instant, all: bool) {
        let ended = self.inbox.as_mut().map(|inbox| inbox.take_waits(now, all));
        for (room, whole) in ended.unwrap_or_default() {
            let Some(inbox) = &self.inbox else { return };
            let (Some(push), Some(client)) = (inbox.arrival(room), inbox.holder(room)) else {
                continue;
            };
            if self.replicas.client(client).connection != Some(whole.connection) {
                continue;
            }
            let awaited = Detail::clipped(self.awaited_step(now).unwrap_or_default());
            let waited = whole.since.map_or(Duration::ZERO, |since| now.duration_since(since));
            let waited_ms = waited.as_millis() as u64;
            let (request, sequence) = (whole.request, push.sequence);
            let request = Envelope { request, sequence, ..Envelope::default() };
            let refusal = Refusal::Deadline { waited_ms, awaited };
            self.refuse(whole.connection, request, refusal);
        }
    }

    /// Asserts what holds of pushes that are whole, on the step owner.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_held(&self) {
        let admission = self.owner.as_ref().and_then(StepOwner::admission);
        let (Some(admission), Some(inbox)) = (admission, &self.inbox) else { return };
        for token in inbox.whole_tokens() {
            assert!(admission.is_of_use(token.0), "the push of token {token} is over");
        }
        let passed = self.round.as_ref().is_some_and(|round| round.step() == admission.step());
        for grant in admission.admitted().iter().filter(|_| !passed) {
            let whole = inbox.whole_tokens().any(|token| token.0 == grant.token);
            assert!(whole, "the push of token {} is admitted and not here", grant.token);
        }
        let due = self.round.as_ref().and_then(|round| round.due());
        let job = self.jobs.iter().any(|job| matches!(job, Job::Step(_)));
        assert_eq!(due.is_some(), job, "a step that is due is worked on");
        let pushes = self.jobs.iter().filter_map(|job| inbox.arrival(job.room()?));
        let by_itself = |push: &Arrival| push.operation == Operation::Gradient {};
        assert!(!pushes.into_iter().any(by_itself), "a gradient is applied by itself");
    }

    /// Tells the step owner that a push is held here.
    fn report_held(&mut self, token: TokenId) {
        self.tell_owner(message::Held { token, shard: self.id }.into());
    }

    /// Tells the step owner how many steps are applied here.
    fn report_applied(&mut self) {
        self.tell_owner(message::StepApplied { shard: self.id }.into());
    }

    fn tell_owner(&mut self, message: Message) {
        if self.owner.is_none() && self.owner_is_up {
            let (step, restore_epoch) = (self.step(), self.epoch);
            let envelope = Envelope { step, restore_epoch, ..Envelope::default() };
            self.outputs.push_back(Output::ToOwner { envelope, message });
        }
    }

    /// The step owner forgets what it was told when it is started anew, and may not have been of the
    /// same restore epoch: it is told again when there is a connection, and from time to time.
    pub(super) fn owner_link(&mut self, up: bool) {
        self.owner_is_up = up;
        self.told_owner = None;
    }

    pub(super) fn tell_owner_again(&mut self, now: Instant) {
        let due = self.told_owner.is_none_or(|last| now >= last + self.config.lease / 5);
        if !due || !self.owner_is_up || self.round.is_none() || !self.is_ready() {
            return;
        }
        self.told_owner = Some(now);
        self.report_applied();
        let tokens: Vec<TokenId> =
            self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect();
        for token in tokens {
            self.report_held(token);
        }
    }

    /// The step owner says something.
    pub(super) fn hear_owner(&mut self, now: Instant, header: &Header, message: Message) {
        if header.restore_epoch != self.epoch || self.poisoned().is_some() {
            return;
        }
        match message {
            Message::Commit(commit) => {
                let tokens: Vec<u64> = commit.tokens.items().iter().map(|t| t.0).collect();
                let whole: BTreeSet<TokenId> = self.whole_tokens();
                let all_here = tokens.iter().all(|&token| whole.contains(&TokenId(token)));
                self.counters.steps_missed.add(u64::from(!all_here));
                if let Some(round) = self.round.as_mut().filter(|_| all_here) {
                    round.learn(&Committed { step: header.step.0, tokens });
                }
                self.begin_step();
            }
            Message::Over(over) => {
                let room = self.inbox.as_ref().and_then(|i| i.whole_room_of(over.token.0));
                if let Some(room) = room {
                    self.release(now, room);
                }
            }
            _ => {}
        }
    }

    /// On the step owner: a shard holds a push whole.
    pub(super) fn shard_holds(
        &mut self,
        now: Instant,
        connection: u64,
        shard: ShardId,
        token: TokenId,
    ) {
        let Some(index) = self.takes_part(connection, shard) else { return };
        let Some(admission) = self.owner.as_mut().and_then(StepOwner::admission_mut) else {
            return;
        };
        if !admission.held(index, token.0) {
            self.say_over(connection, token);
        }
        self.decide(now);
    }

    /// On the step owner: a shard has applied so many steps.
    pub(super) fn shard_has_applied(
        &mut self,
        now: Instant,
        connection: u64,
        shard: ShardId,
        steps: u64,
    ) {
        let Some(index) = self.takes_part(connection, shard) else { return };
        let Some(admission) = self.owner.as_mut().and_then(StepOwner::admission_mut) else {
            return;
        };
        // No shard can have made a step that is not committed.
        if steps > admission.step() {
            return;
        }
        admission.applied(index, steps);
        // It may have been away when the others were told.
        if let Some(committed) = admission.committed()
            && steps <= committed.step
        {
            self.say_committed(connection, &committed);
        }
        self.decide(now);
    }

    /// The place of a shard among those that take part, and how it is reached from now on.
    fn takes_part(&mut self, connection: u64, shard: ShardId) -> Option<usize> {
        let index = self.index_of(shard).filter(|_| shard != self.id)?;
        let speaks_for = self.taking_part.iter().find(|(_, other)| **other == connection);
        if speaks_for.is_some_and(|(other, _)| *other != shard) {
            return None;
        }
        self.taking_part.insert(shard, connection);
        Some(index)
    }

    fn say_committed(&mut self, connection: u64, committed: &Committed) {
        let tokens = committed.tokens.iter().map(|&token| TokenId(token)).collect();
        let Some(tokens) = List::new(tokens) else { return };
        let (step, restore_epoch) = (GlobalStep(committed.step), self.epoch);
        let envelope = Envelope { step, restore_epoch, ..Envelope::default() };
        let (message, body) = (message::Commit { tokens }.into(), Bytes::new());
        self.outputs.push_back(Output::Send { connection, envelope, message, body });
    }

    fn say_over(&mut self, connection: u64, token: TokenId) {
        let envelope = Envelope { restore_epoch: self.epoch, ..Envelope::default() };
        let (message, body) = (message::Over { token }.into(), Bytes::new());
        self.outputs.push_back(Output::Send { connection, envelope, message, body });
    }

    /// Tells the other shards that the push of a token is over.
    fn tell_over(&mut self, token: u64) {
        let connections: Vec<u64> = self.taking_part.values().copied().collect();
        for connection in connections {
            self.say_over(connection, TokenId(token));
        }
    }

    /// Tells the other shards which step is committed.
    fn tell_committed(&mut self, committed: &Committed) {
        if self.told != Some(committed.step) {
            self.told = Some(committed.step);
            let connections: Vec<u64> = self.taking_part.values().copied().collect();
            for connection in connections {
                self.say_committed(connection, committed);
            }
        }
    }

    /// A connection over which a shard took part is gone.
    pub(super) fn forget_part(&mut self, connection: u64) {
        self.taking_part.retain(|_, other| *other != connection);
    }

    /// Whoever waits for a step that takes more gradients than those who are left can give is told
    /// so, where the configuration says so, and whoever waits for a push beyond its deadline. Pushes
    /// that are held stay; only nobody waits for them any more.
    pub(super) fn end_waits_for_the_missing(&mut self, now: Instant) {
        let Some(admission) = self.owner.as_ref().and_then(StepOwner::admission) else { return };
        let short = admission.is_short();
        self.short_since = self.short_since.filter(|_| short).or(short.then_some(now));
        let patience = match self.config.on_loss {
            OnLoss::Wait { timeout } => Some(timeout),
            OnLoss::Fail => Some(Duration::ZERO),
            OnLoss::Shrink { .. } => None,
        };
        let all = self
            .short_since
            .zip(patience)
            .is_some_and(|(since, patience)| now.saturating_duration_since(since) >= patience);
        self.end_waits_of_pushes(now, all);
        if !all {
            return;
        }
        let awaited = Detail::clipped(self.awaited_step(now).unwrap_or_default());
        for entry in self.parked.take(|entry| matches!(entry.wait, Wait::Token)) {
            let waited_ms = now.saturating_duration_since(entry.since).as_millis() as u64;
            let awaited = awaited.clone();
            let refusal = Refusal::Deadline { waited_ms, awaited };
            self.refuse(entry.connection, entry.request, refusal);
        }
    }
}
