//! What the step owner has reported about the training, so that each change is one event.

use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, RestoreEpoch, TaskId};

use super::Shard;
use super::output::ShardOutput;
use super::peers::Peers;
use super::peers::client_registry::{AdmittedClient, ClientPresence};
use super::steps::Steps;
use crate::aggregate::current_step::CommittedStep;
use crate::client_key::ClientKey;
use crate::event::Event;
use crate::status::{TrainingPhase, Waiting};

/// What the step owner has reported about the training.
#[derive(Debug, Default)]
pub(super) struct TrainingWatch {
    /// The last phase; `None` before the first tick of this process.
    phase: Option<TrainingPhase>,
    /// The wait that was reported and has not ended.
    wait: Option<ReportedWait>,
    /// The number of gradients of the last step that had too few; `None` after a full one.
    short_step: Option<usize>,
}

/// A wait that was reported.
#[derive(Debug)]
struct ReportedWait {
    since: Instant,
    workers: Vec<TaskId>,
    /// How far the training was.
    progress: (RestoreEpoch, GlobalStep),
}

impl TrainingWatch {
    /// Records the phase. Returns whether the training has just ended.
    fn has_ended_now(&mut self, phase: TrainingPhase) -> bool {
        let before = self.phase.replace(phase);
        phase.has_ended() && before.is_some_and(|before| !before.has_ended())
    }

    /// Records the longest wait of all, and returns the event of its begin or end.
    ///
    /// A wait ends once the request that has waited is answered and the training has advanced. A
    /// worker whose request has expired, and which asks again, continues its wait.
    fn wait_event(
        &mut self,
        now: Instant,
        delay: Duration,
        progress: (RestoreEpoch, GlobalStep),
        current: Option<Waiting>,
    ) -> Option<Event> {
        let step = progress.1.0;
        let since = current.as_ref().and_then(|wait| now.checked_sub(wait.waited));
        match (&self.wait, current) {
            (Some(reported), _) => {
                let goes_on = since.is_some_and(|since| since <= reported.since);
                if goes_on || progress == reported.progress {
                    return None;
                }
                let ReportedWait { since, workers, .. } = self.wait.take()?;
                let waited = now.saturating_duration_since(since);
                Some(Event::WaitEnded { step, workers, waited })
            }
            (None, Some(wait)) if wait.waited >= delay => {
                let workers = wait.workers.clone();
                self.wait = Some(ReportedWait { since: since?, workers, progress });
                Some(Event::WaitBegan { step, wait })
            }
            (None, _) => None,
        }
    }

    /// Records the number of gradients of a step. Returns whether it has become too small, or
    /// changed and is still too small.
    fn has_shrunk(&mut self, gradients: usize, is_short: bool) -> bool {
        let now = is_short.then_some(gradients);
        let before = std::mem::replace(&mut self.short_step, now);
        is_short && before != now
    }
}

impl Shard {
    /// On the step owner: reports the end of the training, and waits that begin or end.
    pub(super) fn report_training(&mut self, now: Instant) {
        if self.steps.owner.is_none() {
            return;
        }
        self.report_end();
        let progress = (self.variables.epoch, self.steps.step());
        let current = self.oldest_wait(now);
        let event = self.steps.watch.wait_event(now, self.config.lease, progress, current);
        self.out.queue.extend(event.map(ShardOutput::Event));
    }

    /// On the step owner: reports that a worker has joined.
    pub(super) fn report_joined(&mut self, admitted: &AdmittedClient) {
        let task = self.task_of(admitted.key);
        let step = self.steps.step().0;
        let again = admitted.is_known;
        let displaced = admitted.displaced;
        self.report(Event::WorkerJoined { task, step, again, displaced });
    }

    /// On the step owner: reports that a worker has left, and before it the end of the training
    /// that may be its reason.
    pub(super) fn report_left(&mut self, client: ClientKey) {
        self.report_end();
        let (task, step) = (self.task_of(client), self.steps.step().0);
        self.report(Event::WorkerLeft { task, step });
    }

    /// On the step owner: reports that the lease of a worker has expired, before its tokens are
    /// taken back.
    pub(super) fn report_lost(&mut self, now: Instant, client: ClientKey) {
        let tokens = self.steps.owner.as_ref().map_or(0, |owner| owner.ledger().count_of(client));
        let silent = self.peers.registry.client(client).silent(now);
        let (task, step) = (self.task_of(client), self.steps.step().0);
        self.report(Event::WorkerLost { task, step, silent, tokens });
    }

    fn task_of(&self, client: ClientKey) -> TaskId {
        self.peers.registry.client(client).task.clone()
    }

    /// Reports an event of the training, which every shard sees, if this is the step owner.
    pub(super) fn report(&mut self, event: Event) {
        if self.steps.owner.is_some() {
            self.out.push(ShardOutput::Event(event));
        }
    }

    /// On the step owner: reports the end of the training, once.
    pub(super) fn report_end(&mut self) {
        let phase = self.phase();
        if self.steps.watch.has_ended_now(phase) {
            let step = self.steps.step().0;
            self.report(Event::TrainingEnded { step, phase });
        }
    }
}

impl Steps {
    /// Returns [`Event::StepShrunk`] if a step that has just been committed has fewer gradients
    /// than the one before because replicas are absent.
    pub(super) fn shrunk_step(
        &mut self,
        peers: &Peers,
        committed: &CommittedStep,
    ) -> Option<Event> {
        let aggregate = self.config.rule()?.aggregate;
        let gradients = committed.tokens.len();
        // The last steps of a training take what is left.
        let is_last = self.coordinator().is_some_and(|coordinator| coordinator.grants_no_more());
        let is_short = gradients < aggregate as usize && !is_last;
        if !self.watch.has_shrunk(gradients, is_short) {
            return None;
        }
        let registry = &peers.registry;
        let absent = registry.keys().map(|key| registry.client(key));
        let absent = absent.filter(|client| client.presence != ClientPresence::Present);
        let absent = absent.map(|client| client.task.clone());
        let absent = absent.chain(registry.never_joined(&self.config.cluster)).collect();
        Some(Event::StepShrunk { step: committed.step + 1, gradients, aggregate, absent })
    }
}
