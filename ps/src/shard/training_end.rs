//! The end of the training on all workers: on the step owner.
//!
//! A worker learns that the training has ended when it asks for another token. Others may be
//! pushing at that time. The values are final once the owner grants no more tokens, none is
//! outstanding, and every member that was granted one has left, is lost, or has reported that its
//! pushes are settled on all shards. [`AwaitEnd`](message::AwaitEnd) is that report and the wait for
//! this moment.

use std::time::Instant;

use pushpull_common::ids::TaskId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{self, EndReason};
use pushpull_common::protocol::refusal::Detail;

use super::awaited::Awaited;
use super::output::ShardOutputs;
use super::peers::Peers;
use super::peers::parked_requests::{ParkedRequest, WaitReason};
use super::peers::peer_request::PeerRequest;
use super::steps::Steps;
use crate::aggregate::token_issuer::TokenIssuer;

impl Steps {
    /// Parks a request until the training has ended on all workers. Its sender is at its end.
    pub(super) fn await_end(
        &self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: PeerRequest,
    ) {
        if self.owner.is_none() {
            let detail = Detail::clipped(format!("{} does not own the step", self.id));
            return request.refuse(out, Refusal::Unsupported { kind: request.kind, detail });
        }
        if let Some(client) = request.client {
            peers.registry.set_training(client, false);
        }
        peers.park(out, ParkedRequest { request, wait: WaitReason::End });
    }

    /// Answers the requests that wait for the end of the training, once it has ended on all workers.
    pub(super) fn announce_end(&self, peers: &mut Peers, out: &mut ShardOutputs) {
        let Some(reason) = self.ended_for_all(peers) else { return };
        let ended = peers.parked.take(|entry| matches!(entry.wait, WaitReason::End));
        for ParkedRequest { request, .. } in ended {
            request.answer(out, message::Ended { reason }.into());
        }
    }

    /// Returns why the training has ended, if it has ended on all workers.
    pub(super) fn ended_for_all(&self, peers: &Peers) -> Option<EndReason> {
        let owner = self.owner.as_ref()?;
        let reason = owner.end_reason()?;
        let is_settled = owner.ledger().len() == 0 && peers.registry.training().next().is_none();
        is_settled.then_some(reason)
    }

    /// Returns what a request for the end of the training waits for.
    pub(super) fn awaited_end(&self, peers: &Peers, now: Instant) -> Awaited {
        if self.owner.as_ref().and_then(TokenIssuer::end_reason).is_none() {
            return Awaited::event("the end of the training");
        }
        let training = || peers.registry.training();
        let workers: Vec<TaskId> =
            training().map(|key| peers.registry.client(key).task.clone()).collect();
        let named: Vec<String> = training().map(|key| peers.registry.describe(now, key)).collect();
        let text = match named.is_empty() {
            true => "the last tokens to be spent or returned".to_owned(),
            false => format!("the workers that have not ended: {}", named.join(", ")),
        };
        Awaited { text, workers, ..Awaited::default() }
    }
}
