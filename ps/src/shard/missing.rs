//! Waits for replicas that do not come: how long, and what those who wait are told.

use std::time::{Duration, Instant};

use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Refusal};

use super::Shard;
use super::parked::Wait;
use super::replicas::{ClientKey, Presence};
use crate::aggregate::mode::OnLoss;

impl Shard {
    /// Time has passed: replicas that have not come are no longer expected.
    pub(super) fn stop_expecting(&mut self, now: Instant) {
        let patience = self.config.join_timeout;
        let waited = self.first_join.map_or(Duration::ZERO, |first| now.duration_since(first));
        if let Some(admission) = self.admission_mut()
            && admission.expects() > 0
            && waited >= patience
        {
            admission.expect_nobody();
            self.decide(now);
        }
    }

    /// Whoever waits for a step that takes more gradients than those who are left can give is told
    /// so, where the configuration says so, and whoever waits for a push beyond its deadline. Pushes
    /// that are held stay; only nobody waits for them any more.
    pub(super) fn end_waits_for_the_missing(&mut self, now: Instant) {
        let Some(admission) = self.admission() else { return };
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

    /// What a pull waits for, in words.
    pub(super) fn awaited_values(&self, now: Instant, step: u64) -> String {
        let found = match (self.awaited_step(now), &self.round) {
            (Some(awaited), _) => format!("; {awaited}"),
            (None, Some(round)) => format!("; this shard has applied {}", round.step()),
            (None, None) => String::new(),
        };
        format!("global step {step}{found}")
    }

    /// A replica, and when it was heard of last.
    pub(super) fn last_word_of(&self, now: Instant, client: ClientKey) -> String {
        let entry = self.replicas.client(client);
        let silent = now.saturating_duration_since(self.replicas.last_heard(client));
        let state = match entry.presence {
            Presence::Lost => "lost, heard from",
            Presence::Left => "left, heard from",
            Presence::Present => "heard from",
        };
        format!("{} ({state} {} ms ago)", entry.task, silent.as_millis())
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

    /// What a request for a token waits for, in words.
    pub(crate) fn awaited_step(&self, now: Instant) -> Option<String> {
        let admission = self.admission()?;
        if admission.is_applying() {
            let step = admission.step() - 1;
            return Some(format!("step {step} to be applied by every shard"));
        }
        let given: Vec<ClientKey> = admission.admitted().iter().map(|g| g.holder).collect();
        // Whoever has left is missing where nobody does without, whatever it has given.
        let short = admission.is_short();
        let missing = self.replicas.keys().filter(|client| {
            let presence = self.replicas.client(*client).presence;
            let gone = presence != Presence::Present && short;
            gone || (presence != Presence::Left && !given.contains(client))
        });
        let missing: Vec<String> = missing.map(|client| self.last_word_of(now, client)).collect();
        let (step, count, goal) = (admission.step(), given.len(), admission.goal());
        let seen = u32::try_from(self.replicas.keys().count()).unwrap_or(u32::MAX);
        let total = self.config.rule().map_or(0, |rule| rule.total);
        // It is no longer expected after a while; what is missing is missing.
        let unseen = if short { total.saturating_sub(seen) } else { admission.expects() };
        let unseen = match unseen {
            0 => String::new(),
            unseen => format!(" and {unseen} not seen yet"),
        };
        let missing = missing.join(", ");
        Some(format!("step {step}, which has {count} of {goal} gradients; {missing}{unseen}"))
    }
}
