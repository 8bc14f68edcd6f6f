//! Tokens, on the shard that owns the step.

use std::time::Instant;

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use pushpull_common::protocol::message::{EndReason, ReturnToken};
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal, message};
use smallvec::SmallVec;

use super::parked::{Entry, Wait};
use super::replicas::ClientKey;
use super::{Detail, Shard};
use crate::aggregate::step_coordinator::PerPush;
use crate::aggregate::step_owner::{Issued, Request, StepOwner};

impl Shard {
    pub(super) fn token_request(&mut self, now: Instant, entry: Entry, newest: TokenId) {
        let (connection, request) = (entry.connection, entry.request);
        let lost = entry.client.zip(self.owner.as_ref());
        if let Some(issued) = lost.and_then(|(client, owner)| {
            owner.lost_answer(client, newest, |token| self.is_whole(token))
        }) {
            return self.answer_token(now, &entry, Request::Granted(issued));
        }
        if self.restoring.is_some() {
            return self.refuse(connection, request, Refusal::NotInitialized {});
        }
        let held = lost.map_or(0, |(client, owner)| owner.tokens_of(client).count());
        // What it waits for it will hold.
        let waits =
            |other: &&Entry| other.client == entry.client && matches!(other.wait, Wait::Token);
        let held = held + self.parked.count(waits);
        if held >= TOKENS_PER_CLIENT_MAX {
            let (what, limit) = (Detail::clipped("tokens of one client"), held as u64);
            return self.refuse(connection, request, Refusal::Busy { what, limit });
        }
        match self.ask_owner(now, &entry) {
            None => {
                let detail = Detail::clipped(format!("{} does not own the step", self.id));
                self.refuse(connection, request, Refusal::Unsupported { kind: 20, detail });
            }
            Some(Request::Wait) => self.park(entry),
            Some(settled) => self.answer_token(now, &entry, settled),
        }
    }

    fn ask_owner(&mut self, now: Instant, entry: &Entry) -> Option<Request> {
        let client = entry.client?;
        let epoch = self.replicas.client(client).epoch;
        Some(self.owner.as_mut()?.request(client, epoch, now))
    }

    fn answer_token(&mut self, now: Instant, entry: &Entry, request: Request) {
        let message: Message = match (request, entry.client) {
            (Request::Granted(issued), Some(client)) => {
                let grant = self.grant(now, client, issued);
                message::Granted { grant }.into()
            }
            (Request::Ended(reason), _) => message::Ended { reason }.into(),
            (Request::Wait | Request::Granted(_), _) => return,
        };
        self.answer(entry.connection, entry.request, message);
    }

    /// The grant for a token, with room for its push if some is free and nobody waits for it.
    pub(super) fn grant(&mut self, now: Instant, client: ClientKey, issued: Issued) -> Grant {
        let Issued { token, generation, step } = issued;
        Grant { token, generation, step, push_slot: self.free_push_slot(now, client) }
    }

    /// A token for a client whose push has just been applied, or why there will be none.
    pub(super) fn next_token(
        &mut self,
        now: Instant,
        client: ClientKey,
    ) -> (Option<Grant>, Option<EndReason>) {
        let in_turn = self.owner.as_ref().is_some_and(StepOwner::serves_in_turn);
        // Those who wait were first.
        if in_turn && self.parked.any(|entry| matches!(entry.wait, Wait::Token)) {
            return (None, None);
        }
        // Another token that is out to it may be one whose answer was lost: the client finds out by
        // naming the newest it knows, which a newer one from here would hide.
        let owner = self.owner.as_mut().filter(|owner| !owner.has_out(client));
        let epoch = self.replicas.client(client).epoch;
        match owner.map(|owner| owner.request(client, epoch, now)) {
            Some(Request::Granted(issued)) => {
                let Issued { token, generation, step } = issued;
                (Some(Grant { token, generation, step, push_slot: 0 }), None)
            }
            Some(Request::Ended(reason)) => (None, Some(reason)),
            Some(Request::Wait) | None => (None, None),
        }
    }

    pub(super) fn return_token(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
        returned: &ReturnToken,
    ) {
        let (token, generation) = (returned.token, returned.generation);
        // In synchronous mode a push that is whole here and not everywhere may be given up.
        let kept = !self.is_synchronous() && self.is_whole(token);
        let owner = self.owner.as_mut().filter(|_| !kept);
        if owner.is_some_and(|owner| owner.give_back(client, token, generation)) {
            self.decide(now);
            self.grant_parked_tokens(now);
            self.answer(connection, request, message::Returned {}.into());
        } else {
            self.refuse(connection, request, Refusal::Token { token, generation });
        }
    }

    pub(super) fn finish(&mut self, now: Instant, connection: u64, request: Envelope) {
        if let Some(owner) = &mut self.owner {
            owner.finish();
        }
        self.decide(now);
        self.grant_parked_tokens(now);
        self.answer(connection, request, message::Finished {}.into());
    }

    /// Answers those who wait for a token, first come first served, as far as that goes.
    pub(super) fn grant_parked_tokens(&mut self, now: Instant) {
        // One may wait because it has given its share of a step, or is ahead, and another need not.
        let in_turn = self.owner.as_ref().is_some_and(StepOwner::serves_in_turn);
        let mut waiting: SmallVec<[Entry; 2]> = SmallVec::new();
        while let Some(entry) = self.parked.take_first(|entry| matches!(entry.wait, Wait::Token)) {
            match self.ask_owner(now, &entry) {
                Some(Request::Wait) | None => {
                    waiting.push(entry);
                    if in_turn {
                        break;
                    }
                }
                Some(settled) => self.answer_token(now, &entry, settled),
            }
        }
        // Back to where they came from: nobody can have parked in between.
        for entry in waiting.into_iter().rev() {
            self.parked.put_back(entry);
        }
    }

    /// Whether the push of a token lies whole in the inbox: it belongs to the server.
    pub(super) fn is_whole(&self, token: TokenId) -> bool {
        self.inbox.as_ref().is_some_and(|inbox| inbox.whole_tokens().any(|other| other == token))
    }

    /// The tokens whose push lies whole in the inbox.
    pub(crate) fn whole_tokens(&self) -> PerPush<TokenId> {
        self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect()
    }

    /// What a client waits for that asks for a token in asynchronous mode, in words.
    pub(super) fn awaited_tokens(&self, now: Instant, client: Option<ClientKey>) -> String {
        let Some(owner) = &self.owner else {
            return "a token".into();
        };
        if client.is_some_and(|client| owner.is_ahead(client))
            && let Some(bounded_staleness) = owner.bounded_staleness()
        {
            let slowest =
                bounded_staleness.the_slowest().map(|client| self.last_word_of(now, client));
            let slowest: Vec<String> = slowest.collect();
            let (made, slowest) = (bounded_staleness.slowest().unwrap_or(0), slowest.join(", "));
            return format!("the slowest replicas, which have made {made} gradients: {slowest}");
        }
        let holders: Vec<String> =
            owner.holders().map(|client| self.task_of(client).to_string()).collect();
        let tokens =
            format!("the last {} tokens, held by {}", owner.tokens_out(), holders.join(", "));
        match self.awaited_recalls(now) {
            Some(awaited) => format!("{awaited}; {tokens}"),
            None => tokens,
        }
    }
}
