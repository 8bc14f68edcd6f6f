//! What the step owner reports about the training, as events.

use std::time::Instant;

use pushpull_common::ids::TaskId;

use crate::client_key::ClientKey;
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::peers::client_registry::AdmittedClient;

impl Shard {
    /// On the step owner: reports the end of the training, and waits that begin or end.
    pub(in crate::shard) fn report_training(&mut self, now: Instant) {
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
    pub(in crate::shard) fn report_joined(&mut self, admitted: &AdmittedClient) {
        let task = self.task_of(admitted.key);
        let step = self.steps.step().0;
        let again = admitted.is_known;
        let displaced = admitted.displaced;
        self.report(Event::WorkerJoined { task, step, again, displaced });
    }

    /// On the step owner: reports that a worker has left, and before it the end of the training
    /// that may be its reason.
    pub(in crate::shard) fn report_left(&mut self, client: ClientKey) {
        self.report_end();
        let task = self.task_of(client);
        let step = self.steps.step().0;
        self.report(Event::WorkerLeft { task, step });
    }

    /// On the step owner: reports that the lease of a worker has expired, before its tokens are
    /// taken back.
    pub(in crate::shard) fn report_lost(&mut self, now: Instant, client: ClientKey) {
        let tokens = self.steps.owner.as_ref().map_or(0, |owner| owner.ledger().count_of(client));
        let silent = self.peers.registry.client(client).silent(now);
        let task = self.task_of(client);
        let step = self.steps.step().0;
        self.report(Event::WorkerLost { task, step, silent, tokens });
    }

    fn task_of(&self, client: ClientKey) -> TaskId {
        self.peers.registry.client(client).task.clone()
    }

    /// Reports an event of the training, which every shard sees, if this is the step owner.
    pub(in crate::shard) fn report(&mut self, event: Event) {
        if self.steps.owner.is_some() {
            self.out.push(ShardOutput::Event(event));
        }
    }

    /// On the step owner: reports the end of the training, once.
    pub(in crate::shard) fn report_end(&mut self) {
        let phase = self.phase();
        if self.steps.watch.has_ended_now(phase) {
            let step = self.steps.step().0;
            self.report(Event::TrainingEnded { step, phase });
        }
    }
}
