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

    /// Records whether the step has too few replicas. Returns for how long it has had too few, once
    /// that is `timeout`.
    fn overdue(
        &mut self,
        now: Instant,
        is_short: bool,
        timeout: Option<Duration>,
    ) -> Option<Duration> {
        self.short_since = self.short_since.filter(|_| is_short).or(is_short.then_some(now));
        let (since, timeout) = self.short_since.zip(timeout)?;
        Some(now.saturating_duration_since(since)).filter(|&short| short >= timeout)
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
        let short = self.steps.stragglers.overdue(now, is_short, timeout);
        self.end_waits_of_pushes(now, short);
        let Some(short) = short else { return };
        let refusal = self.replicas_absent(now, short);
        for entry in self.peers.parked.take(|entry| matches!(entry.wait, WaitReason::Token)) {
            entry.request.refuse(&mut self.out, refusal.clone());
        }
    }

    fn replicas_absent(&self, now: Instant, short: Duration) -> Refusal {
        let awaited = Detail::clipped(self.awaited_step(now).unwrap_or_default().text);
        Refusal::ReplicasAbsent { waited_ms: short.as_millis() as u64, awaited }
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

    /// Answers the clients of held and undecided pushes whose wait has ended: by their deadlines, or
    /// all of them if the step has been `short` of replicas for too long. The pushes stay.
    fn end_waits_of_pushes(&mut self, now: Instant, short: Option<Duration>) {
        let ended = self.intake.inbox.as_mut().map(|inbox| inbox.take_waits(now, short.is_some()));
        for (push_slot, whole) in ended.unwrap_or_default() {
            let Some(inbox) = &self.intake.inbox else { return };
            let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot))
            else {
                continue;
            };
            if self.peers.registry.client(client).connection != Some(whole.connection) {
                continue;
            }
            let (request, sequence) = (whole.request, push.sequence);
            let request = Envelope { request, sequence, ..Envelope::default() };
            let refusal = match short {
                Some(short) => self.replicas_absent(now, short),
                None => {
                    let awaited = self.awaited_step(now).unwrap_or_default().text;
                    let waited =
                        whole.since.map_or(Duration::ZERO, |since| now.duration_since(since));
                    let waited_ms = waited.as_millis() as u64;
                    Refusal::Deadline { waited_ms, awaited: Detail::clipped(awaited) }
                }
            };
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
