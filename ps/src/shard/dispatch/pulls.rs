//! Pulls: answered at once, or once their step is served.

use pushpull_common::protocol::Refusal;

use crate::shard::Shard;
use crate::shard::pulls::PullSource;
use crate::shard::request::PeerRequest;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};

impl Shard {
    /// Handles a pull that waits for this, or refuses it.
    pub(super) fn pull(&mut self, request: PeerRequest, wait: Result<WaitReason, Refusal>) {
        match wait {
            Ok(wait) => self.serve(ParkedRequest { request, wait }),
            Err(refusal) => request.refuse(&mut self.out, refusal),
        }
    }

    /// Answers a pull, or parks it until its step is served.
    pub(super) fn serve(&mut self, entry: ParkedRequest) {
        match entry.wait.is_served(self.steps.served_step()) {
            true => self.send_values(entry),
            false => self.peers.park(&mut self.out, entry),
        }
    }

    /// Answers the parked pulls whose step is served.
    pub(in crate::shard) fn send_parked(&mut self) {
        let served = self.steps.served_step();
        for entry in self.peers.parked.take(|entry| entry.wait.is_served(served)) {
            self.send_values(entry);
        }
    }

    fn send_values(&mut self, entry: ParkedRequest) {
        let Shard { variables, files, peers, pulls, out, .. } = self;
        let request = entry.request;
        let Some(store) = variables.store() else {
            if matches!(entry.wait, WaitReason::Rows { .. }) {
                request.refuse(out, Refusal::NotInitialized {});
            }
            return;
        };
        let source = PullSource {
            store,
            journal: &files.journal,
            version: variables.version,
            gradients: variables.gradients,
            crc: peers.connections.get(&request.connection).is_some_and(|state| state.crc),
        };
        let are_all = pulls.send(source, out, entry);
        // Values of a client that has left would never be dropped.
        if let Some(client) = request.client
            && are_all
            && peers.is_present(client)
        {
            variables.keep_last_pull(client, &files.budget);
        }
    }

    /// Shares the values with a client on the same host, or says why not.
    pub(super) fn share_values(&mut self, request: &PeerRequest, wants: u64) {
        let Shard { variables, files, peers, steps, out, .. } = self;
        let shared = peers.check_share_request(request, wants).and_then(|()| {
            let counts = variables.counts(steps.step(), steps.served_step());
            variables.share(&files.budget, counts, request)
        });
        peers.send_shared(out, request, shared);
    }
}
