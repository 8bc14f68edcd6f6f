//! Tokens on the step owner's shard: requests, grants and returns, and the end of the training.
//!
//! A worker learns that the training has ended when it asks for another token. Others may be
//! pushing at that time. The values are final once the owner grants no more tokens, none is
//! outstanding, and every member that was granted one has left, is lost, or has reported that its
//! pushes are settled on all shards. [`AwaitEnd`](message::AwaitEnd) is that report and the wait
//! for this moment. Of those that left or are lost the other shards are asked
//! (`aggregate::push_audit`): while one may still apply a gradient that another has, the values are
//! not final. They never are with a gradient that is on some shards only for good.

use std::time::Instant;

use pushpull_common::ids::{TaskId, TokenId};
use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use pushpull_common::protocol::message::{EndReason, ReturnToken};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal, message};
use smallvec::SmallVec;

use super::awaited::Awaited;
use super::intake::Intake;
use super::output::ShardOutputs;
use super::peers::Peers;
use super::peers::parked_requests::{ParkedRequest, WaitReason};
use super::peers::peer_request::PeerRequest;
use super::steps::Steps;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::token_issuer::{TokenIssuer, TokenResponse};
use crate::client_key::ClientKey;

/// A client's request for a token.
pub(super) struct ClientTokenRequest {
    pub(super) entry: ParkedRequest,
    /// The newest token that the client knows.
    pub(super) newest: TokenId,
}

impl ClientTokenRequest {
    /// Grants a token if there is one, otherwise parks or refuses the request.
    pub(super) fn answer(
        self,
        steps: &mut Steps,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let ClientTokenRequest { entry, newest } = self;
        let request = entry.request;
        if let Some(Err(refusal)) = request.client.map(|client| steps.check_reader(peers, client)) {
            return request.refuse(out, refusal);
        }
        let owner = request.client.zip(steps.owner.as_ref());
        let lost = owner.and_then(|(client, owner)| {
            owner.lost_answer(client, newest, |token| intake.is_whole(token))
        });
        if let Some(issued) = lost {
            let lost = TokenResponse::Granted(issued);
            return intake.answer_token(steps, peers, out, now, &entry, lost);
        }
        let held = owner.map_or(0, |(client, owner)| owner.ledger().count_of(client));
        // Tokens that the client waits for count as held.
        let waits = |other: &&ParkedRequest| {
            other.request.client == entry.request.client && matches!(other.wait, WaitReason::Token)
        };
        let held = held + peers.parked.count(waits);
        if held >= TOKENS_PER_CLIENT_MAX {
            let (what, limit) = (Detail::clipped("tokens of one client"), held as u64);
            return request.refuse(out, Refusal::Busy { what, limit });
        }
        match steps.ask_owner(peers, now, &entry) {
            None => {
                let detail = Detail::clipped(format!("{} does not own the step", steps.id));
                request.refuse(out, Refusal::Unsupported { kind: 20, detail });
            }
            Some(TokenResponse::Wait) => peers.park(out, entry),
            Some(settled) => intake.answer_token(steps, peers, out, now, &entry, settled),
        }
    }
}

impl Steps {
    pub(super) fn finish(&mut self, out: &mut ShardOutputs, connection: u64, request: Envelope) {
        if let Some(owner) = &mut self.owner {
            owner.finish();
        }
        out.answer(connection, request, message::Finished {}.into());
    }

    pub(super) fn return_token(
        &mut self,
        intake: &Intake,
        out: &mut ShardOutputs,
        connection: u64,
        client: ClientKey,
        request: Envelope,
        returned: &ReturnToken,
    ) {
        let (token, generation) = (returned.token, returned.generation);
        // In synchronous mode a push that is complete here but not on every shard may be dropped.
        let kept = !self.is_synchronous() && intake.is_whole(token);
        let owner = self.owner.as_mut().filter(|_| !kept);
        if owner.is_some_and(|owner| owner.give_back(client, token, generation)) {
            out.answer(connection, request, message::Returned {}.into());
        } else {
            out.refuse(connection, request, Refusal::Token { token, generation });
        }
    }

    pub(super) fn ask_owner(
        &mut self,
        peers: &Peers,
        now: Instant,
        entry: &ParkedRequest,
    ) -> Option<TokenResponse> {
        let client = entry.request.client?;
        let epoch = peers.registry.client(client).epoch;
        Some(self.owner.as_mut()?.request(client, epoch, now))
    }

    /// Returns a token for a client whose push has just been applied, or why there are no more.
    pub(super) fn next_token(
        &mut self,
        peers: &mut Peers,
        now: Instant,
        client: ClientKey,
    ) -> (Option<Grant>, Option<EndReason>) {
        let in_turn = self.owner.as_ref().is_some_and(TokenIssuer::serves_in_turn);
        // Parked requests come first.
        if in_turn && peers.parked.any(|entry| matches!(entry.wait, WaitReason::Token)) {
            return (None, None);
        }
        // The answer with another token of this client may have been lost. The client notices by
        // naming the newest token it knows, which a newer one from here would hide.
        let reads = self.check_reader(peers, client).is_ok();
        let owner = self.owner.as_mut().filter(|owner| !owner.has_out(client));
        let epoch = peers.registry.client(client).epoch;
        let Some(owner) = owner.filter(|_| reads) else { return (None, None) };
        match owner.request(client, epoch, now) {
            TokenResponse::Granted(issued) => {
                peers.registry.set_training(client, true);
                (Some(owner.grant(client, issued, 0)), None)
            }
            TokenResponse::Ended(reason) => (None, Some(reason)),
            TokenResponse::Wait => (None, None),
        }
    }

    /// Returns what a request for a token waits for, in asynchronous mode.
    pub(super) fn awaited_tokens(
        &self,
        peers: &Peers,
        now: Instant,
        client: Option<ClientKey>,
    ) -> Awaited {
        let Some(tokens) = self.asynchronous_tokens() else {
            return Awaited::event("a token");
        };
        let task = |client: ClientKey| peers.registry.client(client).task.clone();
        if client.is_some_and(|client| tokens.is_ahead(client))
            && let Some(bounded_staleness) = tokens.bounded_staleness()
        {
            let slowest =
                bounded_staleness.the_slowest().map(|client| peers.registry.describe(now, client));
            let slowest: Vec<String> = slowest.collect();
            let (made, slowest) = (bounded_staleness.slowest().unwrap_or(0), slowest.join(", "));
            let text = format!("the slowest replicas, which have made {made} gradients: {slowest}");
            let workers = bounded_staleness.the_slowest().map(task).collect();
            return Awaited { text, workers, ..Awaited::default() };
        }
        let tokens = &tokens.ledger;
        let workers: Vec<TaskId> = tokens.holders().map(task).collect();
        let holders = workers.iter().map(TaskId::to_string).collect::<Vec<String>>().join(", ");
        let tokens = format!("the last {} tokens, held by {holders}", tokens.len());
        let text = match self.awaited_recalls(now) {
            Some(awaited) => format!("{awaited}; {tokens}"),
            None => tokens,
        };
        Awaited { text, workers, ..Awaited::default() }
    }

    /// Grants tokens to the parked requests, first come first served, as far as possible.
    pub(super) fn grant_parked_tokens(
        &mut self,
        intake: &mut Intake,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        // A client may have to wait because it has given its share of a step, or is too far ahead,
        // while the next one need not.
        let in_turn = self.owner.as_ref().is_some_and(TokenIssuer::serves_in_turn);
        let mut waiting: SmallVec<[ParkedRequest; 2]> = SmallVec::new();
        while let Some(entry) =
            peers.parked.take_first(|entry| matches!(entry.wait, WaitReason::Token))
        {
            match self.ask_owner(peers, now, &entry) {
                Some(TokenResponse::Wait) | None => {
                    waiting.push(entry);
                    if in_turn {
                        break;
                    }
                }
                Some(settled) => intake.answer_token(self, peers, out, now, &entry, settled),
            }
        }
        // The requests return to the front, because none can have been parked in between.
        for entry in waiting.into_iter().rev() {
            peers.parked.put_back(entry);
        }
    }

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

    /// Answers the requests that wait for the end of the training, once it has ended on all
    /// workers.
    pub(super) fn announce_end(&self, peers: &mut Peers, out: &mut ShardOutputs) {
        let Some(reason) = self.ended_for_all(peers) else { return };
        let pushes = self.owner.as_ref().map_or(0, |owner| owner.steps().partly_applied);
        let ended = peers.parked.take(|entry| matches!(entry.wait, WaitReason::End));
        for ParkedRequest { request, .. } in ended {
            match pushes {
                0 => request.answer(out, message::Ended { reason }.into()),
                _ => request.refuse(out, Refusal::NotFinal { pushes }),
            }
        }
    }

    /// Returns why the training has ended, if it has ended on all workers.
    pub(super) fn ended_for_all(&self, peers: &Peers) -> Option<EndReason> {
        let owner = self.owner.as_ref()?;
        let reason = owner.end_reason()?;
        let audits = |tokens: &AsynchronousTokens| tokens.audits.is_empty();
        let is_settled = owner.ledger().len() == 0
            && peers.registry.training().next().is_none()
            && owner.asynchronous_tokens().is_none_or(audits);
        is_settled.then_some(reason)
    }

    /// Returns what a request for the end of the training waits for.
    pub(super) fn awaited_end(&self, peers: &Peers, now: Instant) -> Awaited {
        if self.owner.as_ref().and_then(TokenIssuer::end_reason).is_none() {
            return Awaited::event("the end of the training");
        }
        let training: Vec<ClientKey> = peers.registry.training().collect();
        let audited: Vec<ClientKey> = self.asynchronous_tokens().map_or_else(Vec::new, |tokens| {
            tokens.audits.clients().map(|(client, _)| client).collect()
        });
        let (clients, what) = match training.is_empty() {
            true => (audited, "the gradients of lost workers on all shards"),
            false => (training, "the workers that have not ended"),
        };
        let workers = clients.iter().map(|&key| peers.registry.client(key).task.clone()).collect();
        let named: Vec<String> =
            clients.iter().map(|&key| peers.registry.describe(now, key)).collect();
        let text = match named.is_empty() {
            true => "the last tokens to be spent or returned".to_owned(),
            false => format!("{what}: {}", named.join(", ")),
        };
        Awaited { text, workers, ..Awaited::default() }
    }
}

impl Intake {
    /// Answers a request for a token, with a push slot if one is free.
    pub(super) fn answer_token(
        &mut self,
        steps: &mut Steps,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
        entry: &ParkedRequest,
        response: TokenResponse,
    ) {
        let owner = entry.request.client.zip(steps.owner.as_mut());
        let message: Message = match (response, owner) {
            (TokenResponse::Granted(issued), Some((client, owner))) => {
                peers.registry.set_training(client, true);
                let push_slot = self.free_push_slot(peers, now, client);
                message::Granted { grant: owner.grant(client, issued, push_slot) }.into()
            }
            (TokenResponse::Ended(reason), _) => message::Ended { reason }.into(),
            (TokenResponse::Wait | TokenResponse::Granted(_), _) => return,
        };
        entry.request.answer(out, message);
    }
}
