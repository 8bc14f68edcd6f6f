//! Recalls of tokens in asynchronous mode: the step owner asks the other shards, and they answer.
//! The reasons are in `aggregate::recall`.

use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, ShardId, TokenId};
use pushpull_common::protocol::message;
use pushpull_store::testing::planted::Bug;
use smallvec::SmallVec;

use super::Shard;
use super::intake::Intake;
use super::output::ShardOutputs;
use super::peers::Peers;
use super::peers::client_registry::ClientPresence;
use super::steps::Steps;
use crate::client_key::ClientKey;

/// The questions of the step owner to the other shards about recalled tokens.
#[derive(Debug, Default)]
pub(super) struct RecallQuestions {
    /// When they were last asked about all recalled tokens.
    asked_at: Option<Instant>,
}

impl RecallQuestions {
    /// Returns whether all questions are to be asked again now, and notes it.
    fn are_due(&mut self, now: Instant, interval: Duration) -> bool {
        let due = self.asked_at.is_none_or(|at| now >= at + interval);
        if due {
            self.asked_at = Some(now);
        }
        due
    }
}

impl Shard {
    /// On the step owner: recalls the tokens that are due, and takes back those that every shard
    /// has reported free.
    pub(super) fn recall_tokens(&mut self, now: Instant) {
        let shards = self.steps.shards_to_ask();
        if shards.is_empty() {
            return;
        }
        let complete = self.intake.whole_tokens();
        let registry = &self.peers.registry;
        let absent = |client| registry.client(client).presence != ClientPresence::Present;
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
        let timeout = self.config.token_timeout;
        let new = tokens.recall(now, timeout, absent, |token| complete.contains(&token));
        // An answer may be lost with its connection.
        let again = self.steps.recall_questions.are_due(now, self.config.lease / 5);
        self.steps.ask_for_recalls(&self.peers, &mut self.out, &shards, |token| {
            again || new.contains(&token)
        });
        self.steps.take_back_free_tokens(&self.intake, &shards);
        self.audit_pushes(now, again);
    }

    /// On another shard: answers a recall of the step owner. If the push of the token was not
    /// applied here, the client's connection is closed, so that a push in transit cannot arrive.
    pub(super) fn recall(&mut self, token: TokenId, epoch: ClientEpoch) {
        // On a shard that assigns no epochs, several clients may claim an epoch.
        let holders: SmallVec<[ClientKey; 2]> = self.peers.registry.of_epoch(epoch).collect();
        let has_applied = |&client: &ClientKey| {
            let window = &self.peers.registry.client(client).window;
            window.has_applied(token)
        };
        let applied = self.intake.is_whole(token) || holders.iter().any(has_applied);
        for client in holders.into_iter().filter(|_| !applied) {
            if let Some(connection) = self.peers.registry.client_mut(client).connection.take() {
                self.out.close(connection);
                self.intake.drop_client_connection(&mut self.peers, connection, client);
            }
        }
        self.steps.report_to_owner(
            &mut self.out,
            message::Recalled { token, shard: self.id, applied }.into(),
        );
    }
}

impl Steps {
    /// Returns the other shards that may have applied the push of a token, in asynchronous mode.
    pub(super) fn shards_to_ask(&self) -> SmallVec<[ShardId; 16]> {
        if self.owner.is_none()
            || self.is_synchronous()
            || self.config.planted.has(Bug::TakeBackUnasked)
        {
            return SmallVec::new();
        }
        let mut shards = self.participants.clone();
        shards.retain(|shard| *shard != self.id);
        shards
    }

    /// Names the shards that have not answered for all recalled tokens, with the time since each
    /// was last heard from. `None` if all have.
    pub(super) fn awaited_recalls(&self, now: Instant) -> Option<String> {
        let recalls = &self.asynchronous_tokens()?.recalls;
        let shards = self.shards_to_ask();
        let awaits =
            |shard: &&ShardId| recalls.tokens().any(|token| recalls.awaits(token, **shard));
        let silent: Vec<String> =
            shards.iter().filter(awaits).map(|&shard| self.shards.describe(now, shard)).collect();
        (!silent.is_empty())
            .then(|| format!("the answers of {} about recalled tokens", silent.join(", ")))
    }

    pub(super) fn take_back_free_tokens(&mut self, intake: &Intake, shards: &[ShardId]) {
        let complete = intake.whole_tokens();
        let Some(tokens) = self.asynchronous_tokens_mut() else { return };
        let returned = tokens.take_back_free(shards, |token| complete.contains(&token));
        if returned > 0 {
            self.counters.tokens_taken_back.add(returned as u64);
        }
    }

    pub(super) fn ask_for_recalls(
        &self,
        peers: &Peers,
        out: &mut ShardOutputs,
        shards: &[ShardId],
        asks: impl Fn(TokenId) -> bool,
    ) {
        let Some(tokens) = self.asynchronous_tokens() else { return };
        let mut due: Vec<(u64, message::Recall)> = Vec::new();
        for token in tokens.recalls.tokens().filter(|&token| asks(token)) {
            let Some(holder) = tokens.ledger.holder_of(token) else { continue };
            let recall = message::Recall { token, client: peers.registry.client(holder).epoch };
            let silent = shards.iter().filter(|&&shard| tokens.recalls.awaits(token, shard));
            let connections = silent.filter_map(|shard| self.shards.connection_of(*shard));
            due.extend(connections.map(|connection| (connection, recall.clone())));
        }
        for (connection, recall) in due {
            let envelope = out.epoch_only();
            out.send(connection, envelope, recall.into());
        }
    }

    /// On the step owner: handles a shard's answer.
    pub(super) fn recall_answered(
        &mut self,
        intake: &Intake,
        peers: &Peers,
        out: &mut ShardOutputs,
        now: Instant,
        connection: u64,
        answer: &message::Recalled,
    ) {
        let message::Recalled { token, shard, applied } = *answer;
        if self.register_peer(peers, out, now, connection, shard).is_none() {
            return;
        }
        let shards = self.shards_to_ask();
        let Some(tokens) = self.asynchronous_tokens_mut() else { return };
        tokens.recall_answered(token, shard, applied);
        self.take_back_free_tokens(intake, &shards);
    }
}
