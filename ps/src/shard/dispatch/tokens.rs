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
use pushpull_common::protocol::message::{EndReason, ReturnToken, SkipBatch};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Grant, Message, Refusal, message};
use smallvec::SmallVec;

use super::awaited::Awaited;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::token_issuer::{TokenIssuer, TokenResponse};
use crate::client_key::ClientKey;
use crate::shard::Shard;
use crate::shard::request::PeerRequest;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};

/// A client's request for a token.
pub(super) struct ClientTokenRequest {
    pub(super) entry: ParkedRequest,
    /// The newest token that the client knows.
    pub(super) newest: TokenId,
}

impl Shard {
    /// Grants a token if there is one, otherwise parks or refuses the request.
    pub(super) fn request_token(&mut self, now: Instant, token_request: ClientTokenRequest) {
        let ClientTokenRequest { entry, newest } = token_request;
        let request = entry.request;
        if let Some(Err(refusal)) = request.client.map(|client| self.check_reader(client)) {
            return request.refuse(&mut self.out, refusal);
        }
        let owner = request.client.zip(self.steps.owner.as_ref());
        let lost = owner.and_then(|(client, owner)| {
            owner.lost_answer(client, newest, |token| self.intake.is_whole(token))
        });
        if let Some(issued) = lost {
            return self.answer_token(now, &entry, TokenResponse::Granted(issued));
        }
        let held = owner.map_or(0, |(client, owner)| owner.ledger().count_of(client));
        // Tokens that the client waits for count as held.
        let waits = |other: &&ParkedRequest| {
            other.request.client == request.client && matches!(other.wait, WaitReason::Token)
        };
        let held = held + self.peers.parked.count(waits);
        if held >= TOKENS_PER_CLIENT_MAX {
            let what = Detail::clipped("tokens of one client");
            let refusal = Refusal::Busy { what, limit: held as u64 };
            return request.refuse(&mut self.out, refusal);
        }
        match self.ask_owner(now, &request) {
            None => {
                let detail = Detail::clipped(format!("{} does not own the step", self.id));
                let refusal = Refusal::Unsupported { kind: 20, detail };
                request.refuse(&mut self.out, refusal);
            }
            Some(TokenResponse::Wait) => self.peers.park(&mut self.out, entry),
            Some(settled) => self.answer_token(now, &entry, settled),
        }
    }

    fn ask_owner(&mut self, now: Instant, request: &PeerRequest) -> Option<TokenResponse> {
        let client = request.client?;
        let epoch = self.peers.registry.client(client).epoch;
        Some(self.steps.owner.as_mut()?.request(client, epoch, now))
    }

    /// Answers a request for a token, with a push slot if one is free.
    fn answer_token(&mut self, now: Instant, entry: &ParkedRequest, response: TokenResponse) {
        let message: Message = match (response, entry.request.client) {
            (TokenResponse::Granted(issued), Some(client)) if self.steps.owner.is_some() => {
                self.peers.registry.set_training(client, true);
                let push_slot = self.offer_push_slot(now, client);
                let Some(owner) = &mut self.steps.owner else { return };
                message::Granted { grant: owner.grant(client, issued, push_slot) }.into()
            }
            (TokenResponse::Ended(reason), _) => message::Ended { reason }.into(),
            (TokenResponse::Wait | TokenResponse::Granted(_), _) => return,
        };
        entry.request.answer(&mut self.out, message);
    }

    /// Returns a token for a client whose push has just been applied, or why there are no more.
    pub(super) fn next_token(
        &mut self,
        now: Instant,
        client: ClientKey,
    ) -> (Option<Grant>, Option<EndReason>) {
        let in_turn = self.steps.owner.as_ref().is_some_and(TokenIssuer::serves_in_turn);
        // Parked requests come first.
        if in_turn && self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::Token)) {
            return (None, None);
        }
        // The answer with another token of this client may have been lost. The client notices by
        // naming the newest token it knows, which a newer one from here would hide.
        let reads = self.check_reader(client).is_ok();
        let owner = self.steps.owner.as_mut().filter(|owner| !owner.has_out(client));
        let epoch = self.peers.registry.client(client).epoch;
        let Some(owner) = owner.filter(|_| reads) else { return (None, None) };
        match owner.request(client, epoch, now) {
            TokenResponse::Granted(issued) => {
                self.peers.registry.set_training(client, true);
                (Some(owner.grant(client, issued, 0)), None)
            }
            TokenResponse::Ended(reason) => (None, Some(reason)),
            TokenResponse::Wait => (None, None),
        }
    }

    /// Grants tokens to the parked requests, first come first served, as far as possible.
    pub(in crate::shard) fn grant_parked_tokens(&mut self, now: Instant) {
        // A client may have to wait because it has given its share of a step, or is too far ahead,
        // while the next one need not.
        let in_turn = self.steps.owner.as_ref().is_some_and(TokenIssuer::serves_in_turn);
        let mut waiting: SmallVec<[ParkedRequest; 2]> = SmallVec::new();
        while let Some(entry) =
            self.peers.parked.take_first(|entry| matches!(entry.wait, WaitReason::Token))
        {
            match self.ask_owner(now, &entry.request) {
                Some(TokenResponse::Wait) | None => {
                    waiting.push(entry);
                    if in_turn {
                        break;
                    }
                }
                Some(settled) => self.answer_token(now, &entry, settled),
            }
        }
        // The requests return to the front, because none can have been parked in between.
        for entry in waiting.into_iter().rev() {
            self.peers.parked.put_back(entry);
        }
    }

    /// Takes back a token that its client returns unspent.
    pub(super) fn return_token(
        &mut self,
        request: &PeerRequest,
        client: ClientKey,
        returned: &ReturnToken,
    ) {
        let &ReturnToken { token, generation } = returned;
        let owner = self.owner_of_unspent(token);
        if owner.is_some_and(|owner| owner.give_back(client, token, generation)) {
            request.answer(&mut self.out, message::Returned {}.into());
        } else {
            request.refuse(&mut self.out, Refusal::Token { token, generation });
        }
    }

    /// Spends the batch of an unspent token without a gradient, and ends the token.
    pub(super) fn skip_batch(
        &mut self,
        request: &PeerRequest,
        client: ClientKey,
        skipped: &SkipBatch,
    ) {
        let &SkipBatch { token, generation } = skipped;
        let owner = self.owner_of_unspent(token);
        if owner.is_some_and(|owner| owner.skip(client, token, generation)) {
            self.counters.batches_skipped.add(1);
            request.answer(&mut self.out, message::Returned {}.into());
        } else {
            request.refuse(&mut self.out, Refusal::Token { token, generation });
        }
    }

    /// Returns the issuer of a token that no complete push spends. In synchronous mode a push that
    /// is complete here but not on every shard may be dropped.
    fn owner_of_unspent(&mut self, token: TokenId) -> Option<&mut TokenIssuer> {
        let is_spent = !self.steps.is_synchronous() && self.intake.is_whole(token);
        self.steps.owner.as_mut().filter(|_| !is_spent)
    }

    /// Grants no more tokens: the training ends.
    pub(in crate::shard) fn finish(&mut self) {
        if let Some(owner) = &mut self.steps.owner {
            owner.finish();
        }
    }

    /// Parks a request until the training has ended on all workers. Its sender is at its end.
    pub(super) fn await_end(&mut self, request: PeerRequest) {
        if self.steps.owner.is_none() {
            let detail = Detail::clipped(format!("{} does not own the step", self.id));
            let refusal = Refusal::Unsupported { kind: request.kind, detail };
            return request.refuse(&mut self.out, refusal);
        }
        if let Some(client) = request.client {
            self.peers.registry.set_training(client, false);
        }
        self.peers.park(&mut self.out, ParkedRequest { request, wait: WaitReason::End });
    }

    /// Answers the requests that wait for the end of the training, once it has ended on all
    /// workers.
    pub(in crate::shard) fn announce_end(&mut self) {
        let Some(reason) = self.ended_for_all() else { return };
        let pushes = self.steps.owner.as_ref().map_or(0, |owner| owner.steps().partly_applied);
        let ended = self.peers.parked.take(|entry| matches!(entry.wait, WaitReason::End));
        for ParkedRequest { request, .. } in ended {
            match pushes {
                0 => request.answer(&mut self.out, message::Ended { reason }.into()),
                _ => request.refuse(&mut self.out, Refusal::NotFinal { pushes }),
            }
        }
    }

    /// Returns why the training has ended, if it has ended on all workers.
    pub(in crate::shard) fn ended_for_all(&self) -> Option<EndReason> {
        let owner = self.steps.owner.as_ref()?;
        let reason = owner.end_reason()?;
        let audits = |tokens: &AsynchronousTokens| tokens.audits.is_empty();
        let is_settled = owner.ledger().len() == 0
            && self.peers.registry.training().next().is_none()
            && owner.asynchronous_tokens().is_none_or(audits);
        is_settled.then_some(reason)
    }

    /// Returns what a request for a token waits for, in asynchronous mode.
    pub(in crate::shard) fn awaited_tokens(
        &self,
        now: Instant,
        client: Option<ClientKey>,
    ) -> Awaited {
        let Some(tokens) = self.steps.asynchronous_tokens() else {
            return Awaited::event("a token");
        };
        let registry = &self.peers.registry;
        let task = |client: ClientKey| registry.client(client).task.clone();
        if client.is_some_and(|client| tokens.is_ahead(client))
            && let Some(bounded_staleness) = tokens.bounded_staleness()
        {
            let slowest =
                bounded_staleness.the_slowest().map(|client| registry.describe(now, client));
            let slowest = slowest.collect::<Vec<String>>().join(", ");
            let made = bounded_staleness.slowest().unwrap_or(0);
            let text = format!("the slowest replicas, which have made {made} gradients: {slowest}");
            let workers = bounded_staleness.the_slowest().map(task).collect();
            return Awaited { text, workers, ..Awaited::default() };
        }
        let tokens = &tokens.ledger;
        let workers: Vec<TaskId> = tokens.holders().map(task).collect();
        let holders = workers.iter().map(TaskId::to_string).collect::<Vec<String>>().join(", ");
        let tokens = format!("the last {} tokens, held by {holders}", tokens.len());
        let text = match self.steps.awaited_recalls(now) {
            Some(awaited) => format!("{awaited}; {tokens}"),
            None => tokens,
        };
        Awaited { text, workers, ..Awaited::default() }
    }

    /// Returns what a request for the end of the training waits for.
    pub(in crate::shard) fn awaited_end(&self, now: Instant) -> Awaited {
        if self.steps.owner.as_ref().and_then(TokenIssuer::end_reason).is_none() {
            return Awaited::event("the end of the training");
        }
        let registry = &self.peers.registry;
        let training: Vec<ClientKey> = registry.training().collect();
        let audits = self.steps.asynchronous_tokens().map(|tokens| tokens.audits.clients());
        let audited: Vec<ClientKey> =
            audits.into_iter().flatten().map(|(client, _)| client).collect();
        let (clients, what) = match training.is_empty() {
            true => (audited, "the gradients of lost workers on all shards"),
            false => (training, "the workers that have not ended"),
        };
        let workers = clients.iter().map(|&key| registry.client(key).task.clone()).collect();
        let named: Vec<String> = clients.iter().map(|&key| registry.describe(now, key)).collect();
        let text = match named.is_empty() {
            true => "the last tokens to be spent or returned".to_owned(),
            false => format!("{what}: {}", named.join(", ")),
        };
        Awaited { text, workers, ..Awaited::default() }
    }
}
