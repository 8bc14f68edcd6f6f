//! Waits for replicas that do not come: how long, and what those who wait are told.

use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Refusal};

use super::Shard;
use super::parked::Wait;
use super::replicas::{ClientKey, Presence};
use crate::aggregate::mode::OnLoss;

impl Shard {
    /// Time has passed: replicas that have not come are no longer expected.
    pub(super) fn stop_expecting(&mut self, now: Instant) {
        let timeout = self.config.join_timeout;
        let waited = self.first_join.map_or(Duration::ZERO, |first| now.duration_since(first));
        if let Some(coordinator) = self.coordinator_mut()
            && coordinator.expects() > 0
            && waited >= timeout
        {
            coordinator.expect_nobody();
            self.decide(now);
        }
    }

    /// Whoever waits for a step that takes more gradients than those who are left can give is told
    /// so, where the configuration says so, and whoever waits for a push beyond its deadline. Pushes
    /// that are held stay; only nobody waits for them any more.
    pub(super) fn end_straggler_waits(&mut self, now: Instant) {
        let Some(coordinator) = self.coordinator() else { return };
        let short = coordinator.is_short();
        self.short_since = self.short_since.filter(|_| short).or(short.then_some(now));
        let timeout = match self.config.on_loss {
            OnLoss::Wait { timeout } => Some(timeout),
            OnLoss::Fail => Some(Duration::ZERO),
            OnLoss::Shrink { .. } => None,
        };
        let all = self
            .short_since
            .zip(timeout)
            .is_some_and(|(since, timeout)| now.saturating_duration_since(since) >= timeout);
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
        let found = match (self.awaited_step(now), &self.follower) {
            (Some(awaited), _) => format!("; {awaited}"),
            (None, Some(follower)) => {
                let owner = self.without_owner(now);
                format!("; this shard has applied {}{owner}", follower.step())
            }
            (None, None) => String::new(),
        };
        format!("global step {step}{found}")
    }

    /// What room in the inbox waits for, in words.
    pub(super) fn awaited_push_slot(&self, now: Instant) -> String {
        format!("a push slot{}", self.without_owner(now))
    }

    /// That this shard cannot reach the step owner, and so makes no step, in words; nothing if it can.
    fn without_owner(&self, now: Instant) -> String {
        let cut_off = self.is_synchronous() && self.owner.is_none() && !self.owner_is_up;
        match self.owner_lost {
            _ if !cut_off => String::new(),
            None => format!("; {} has not reached the step owner yet", self.id),
            Some(since) => {
                let away = now.saturating_duration_since(since).as_millis();
                format!("; {} has had no connection to the step owner for {away} ms", self.id)
            }
        }
    }

    /// On the step owner: a shard, by its place among those that take part, and when it was heard of last.
    fn last_word_of_shard(&self, now: Instant, at: usize) -> Option<String> {
        let shard = *self.taking_part().get(at)?;
        if shard == self.id {
            return Some(self.with_growth(format!("{shard} itself")));
        }
        Some(self.last_word_of_other(now, shard))
    }

    /// On the step owner: another shard, and when it was heard of last.
    pub(super) fn last_word_of_other(&self, now: Instant, shard: ShardId) -> String {
        let link = if self.parts.contains_key(&shard) { "" } else { "not connected, " };
        match self.parts_heard.get(&shard) {
            None => format!("{shard} ({link}not heard from yet)"),
            Some(&heard) => {
                let silent = now.saturating_duration_since(heard).as_millis();
                format!("{shard} ({link}heard from {silent} ms ago)")
            }
        }
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
        for (push_slot, whole) in ended.unwrap_or_default() {
            let Some(inbox) = &self.inbox else { return };
            let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot))
            else {
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
        let coordinator = self.coordinator()?;
        if coordinator.is_applying() || coordinator.is_behind() {
            let step = coordinator.step() - 1;
            let behind =
                coordinator.shards_behind().filter_map(|at| self.last_word_of_shard(now, at));
            let behind = behind.collect::<Vec<String>>().join(", ");
            let behind = if behind.is_empty() { behind } else { format!("; not yet by {behind}") };
            return Some(format!("step {step} to be applied by every shard{behind}"));
        }
        let given: Vec<ClientKey> = coordinator.admitted().iter().map(|g| g.holder).collect();
        // Whoever has left is missing where nobody does without, whatever it has given.
        let short = coordinator.is_short();
        let missing = self.replicas.keys().filter(|client| {
            let presence = self.replicas.client(*client).presence;
            let gone = presence != Presence::Present && short;
            gone || (presence != Presence::Left && !given.contains(client))
        });
        // A gradient that a shard does not speak of is not its worker's fault.
        let shards = coordinator.shards_lacking().filter_map(|(at, lacked)| {
            let shard = self.last_word_of_shard(now, at)?;
            Some(format!("{shard}, which has not said that it holds {lacked} that others hold"))
        });
        let missing = missing.map(|client| self.last_word_of(now, client));
        let missing: Vec<String> = shards.chain(missing).collect();
        let (step, count, goal) = (coordinator.step(), given.len(), coordinator.goal());
        let seen = u32::try_from(self.replicas.keys().count()).unwrap_or(u32::MAX);
        let total = self.config.rule().map_or(0, |rule| rule.total);
        // It is no longer expected after a while; what is missing is missing.
        let unseen = if short { total.saturating_sub(seen) } else { coordinator.expects() };
        let unseen = match unseen {
            0 => String::new(),
            unseen => format!(" and {unseen} not seen yet"),
        };
        let missing = missing.join(", ");
        Some(format!("step {step}, which has {count} of {goal} gradients; {missing}{unseen}"))
    }
}
