//! Stragglers: ends waits for absent replicas, and names them to those who wait.

use std::time::{Duration, Instant};

use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Refusal};

use super::Shard;
use super::peers::parked_requests::WaitReason;
use super::steps::Steps;
use crate::config::OnLoss;

/// How long a synchronous step has waited for replicas.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    /// When the first replica joined this process.
    first_join: Option<Instant>,
    /// Since when the step has had too few replicas.
    short_since: Option<Instant>,
}

impl Stragglers {
    /// Records that a replica has joined.
    pub(super) fn replica_joins(&mut self, now: Instant) {
        self.first_join.get_or_insert(now);
    }

    /// Records whether the step has too few replicas. Returns whether it has had too few for
    /// `timeout`.
    fn are_overdue(&mut self, now: Instant, is_short: bool, timeout: Option<Duration>) -> bool {
        self.short_since = self.short_since.filter(|_| is_short).or(is_short.then_some(now));
        let short_since = self.short_since.zip(timeout);
        short_since.is_some_and(|(since, timeout)| now.saturating_duration_since(since) >= timeout)
    }

    /// Returns how long replicas have had to join.
    fn waited(&self, now: Instant) -> Duration {
        self.first_join.map_or(Duration::ZERO, |first| now.duration_since(first))
    }
}

impl Shard {
    /// Ends the waits of clients for a step that needs more gradients than the present replicas can
    /// give, if so configured. Also ends the waits of pushes whose deadline has passed. Held pushes
    /// stay without a waiting client.
    pub(super) fn end_straggler_waits(&mut self, now: Instant) {
        let Some(coordinator) = self.steps.coordinator() else { return };
        let is_short = coordinator.is_short();
        let timeout = match self.config.mode.synchronous().map(|mode| mode.on_loss) {
            Some(OnLoss::Wait { timeout }) => Some(timeout),
            Some(OnLoss::Fail) => Some(Duration::ZERO),
            Some(OnLoss::Shrink { .. }) | None => None,
        };
        let all = self.steps.stragglers.are_overdue(now, is_short, timeout);
        self.end_waits_of_pushes(now, all);
        if !all {
            return;
        }
        let awaited = Detail::clipped(self.awaited_step(now).unwrap_or_default().text);
        for entry in self.peers.parked.take(|entry| matches!(entry.wait, WaitReason::Token)) {
            let waited_ms = now.saturating_duration_since(entry.request.since).as_millis() as u64;
            let awaited = awaited.clone();
            let refusal = Refusal::Deadline { waited_ms, awaited };
            entry.request.refuse(&mut self.out, refusal);
        }
    }

    /// Describes what a pull waits for.
    pub(super) fn awaited_values(&self, now: Instant, step: u64) -> String {
        let found = match (self.awaited_step(now), &self.steps.follower) {
            (Some(awaited), _) => format!("; {}", awaited.text),
            (None, Some(follower)) => {
                let owner = self.steps.owner_outage(now);
                format!("; this shard has applied {}{owner}", follower.step())
            }
            (None, None) => String::new(),
        };
        format!("global step {step}{found}")
    }

    /// Answers the clients of held and undecided pushes whose wait has ended. The pushes stay.
    fn end_waits_of_pushes(&mut self, now: Instant, all: bool) {
        let ended = self.intake.inbox.as_mut().map(|inbox| inbox.take_waits(now, all));
        for (push_slot, whole) in ended.unwrap_or_default() {
            let Some(inbox) = &self.intake.inbox else { return };
            let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot))
            else {
                continue;
            };
            if self.peers.registry.client(client).connection != Some(whole.connection) {
                continue;
            }
            let awaited = Detail::clipped(self.awaited_step(now).unwrap_or_default().text);
            let waited = whole.since.map_or(Duration::ZERO, |since| now.duration_since(since));
            let waited_ms = waited.as_millis() as u64;
            let (request, sequence) = (whole.request, push.sequence);
            let request = Envelope { request, sequence, ..Envelope::default() };
            let refusal = Refusal::Deadline { waited_ms, awaited };
            self.out.refuse(whole.connection, request, refusal);
        }
    }
}

impl Steps {
    /// Stops expecting replicas that have not joined within the join timeout.
    pub(super) fn stop_expecting(&mut self, now: Instant) {
        let Some(mode) = self.config.mode.synchronous() else { return };
        let is_over = self.stragglers.waited(now) >= mode.join_timeout;
        if let Some(coordinator) = self.coordinator_mut()
            && coordinator.expects() > 0
            && is_over
        {
            coordinator.expect_nobody();
        }
    }
}
