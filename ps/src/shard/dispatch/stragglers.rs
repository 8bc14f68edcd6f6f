//! Stragglers: ends waits for absent replicas, and names them to those who wait.

use std::time::{Duration, Instant};

use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Refusal};

use crate::config::OnLoss;
use crate::shard::Shard;
use crate::shard::request::parked_request::WaitReason;

impl Shard {
    /// Ends the waits of clients for a step that needs more gradients than the present replicas can
    /// give, if so configured. Also ends the waits of pushes whose deadline has passed. Held pushes
    /// stay without a waiting client. Returns whether a wait has ended.
    pub(super) fn end_straggler_waits(&mut self, now: Instant) -> bool {
        let Some(coordinator) = self.steps.coordinator() else { return false };
        let is_short = coordinator.is_short();
        let timeout = match self.config.mode.synchronous().map(|mode| mode.on_loss) {
            Some(OnLoss::Wait { timeout }) => Some(timeout),
            Some(OnLoss::Fail) => Some(Duration::ZERO),
            Some(OnLoss::Shrink { .. }) | None => None,
        };
        let short = self.steps.stragglers.overdue(now, is_short, timeout);
        let ended = self.end_waits_of_pushes(now, short);
        let Some(short) = short else { return ended };
        let refusal = self.replicas_absent(now, short);
        for entry in self.peers.parked.take(|entry| matches!(entry.wait, WaitReason::Token)) {
            entry.request.refuse(&mut self.out, refusal.clone());
        }
        true
    }

    fn replicas_absent(&self, now: Instant, short: Duration) -> Refusal {
        let awaited = Detail::clipped(self.awaited_step(now).unwrap_or_default().text);
        Refusal::ReplicasAbsent { waited_ms: short.as_millis() as u64, awaited }
    }

    /// Answers the clients of held and undecided pushes whose wait has ended: by their deadlines, or
    /// all of them if the step has been `short` of replicas for too long. The pushes stay. Returns
    /// whether a wait has ended.
    fn end_waits_of_pushes(&mut self, now: Instant, short: Option<Duration>) -> bool {
        let ended = self.intake.inbox.as_mut().map(|inbox| inbox.take_waits(now, short.is_some()));
        let ended = ended.unwrap_or_default();
        let has_ended = !ended.is_empty();
        for (push_slot, whole) in ended {
            let Some(inbox) = &self.intake.inbox else { break };
            let (Some(push), Some(client)) = (inbox.arrival(push_slot), inbox.holder(push_slot))
            else {
                continue;
            };
            if self.peers.registry.client(client).connection != Some(whole.connection) {
                continue;
            }
            let request = whole.request;
            let sequence = push.sequence;
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
        has_ended
    }
}
