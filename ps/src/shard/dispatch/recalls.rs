//! Recalls of tokens in asynchronous mode: the step owner asks the other shards, and they answer.
//! The reasons are in `aggregate::recall`.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, ShardId, TokenId};
use pushpull_common::protocol::message;
use smallvec::SmallVec;

use crate::client_key::ClientKey;
use crate::shard::Shard;
use crate::shard::changes::Changes;

impl Shard {
    /// On the step owner: recalls the tokens that are due, and takes back those that every shard
    /// has reported free. Returns what has changed.
    pub(super) fn recall_tokens(&mut self, now: Instant) -> Changes {
        let shards = self.steps.shards_to_ask();
        if shards.is_empty() {
            return Changes::NONE;
        }
        let complete = self.intake.whole_tokens();
        let peers = &self.peers;
        let absent = |client| !peers.is_present(client);
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return Changes::NONE };
        let timeout = self.config.token_timeout;
        let new = tokens.recall(now, timeout, absent, |token| complete.contains(&token));
        let asks = tokens.recalls.tokens().next().is_some() || !tokens.audits.is_empty();
        // An answer may be lost with its connection.
        let again = self.steps.recall_questions.are_due(now, self.config.lease / 5);
        if !asks {
            return Changes::NONE;
        }
        self.ask_for_recalls(&shards, |token| again || new.contains(&token));
        self.take_back_free_tokens(&shards);
        self.audit_pushes(now, again);
        Changes::ALL
    }

    /// On another shard: answers a recall of the step owner. If the push of the token was not
    /// applied here, the client's connection is closed, so that a push in transit cannot arrive.
    pub(in crate::shard) fn recall(&mut self, token: TokenId, epoch: ClientEpoch) {
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
                self.drop_client_connection(connection, client);
            }
        }
        self.steps.report_to_owner(
            &mut self.out,
            message::Recalled { token, shard: self.id, applied }.into(),
        );
    }

    fn ask_for_recalls(&mut self, shards: &[ShardId], asks: impl Fn(TokenId) -> bool) {
        let Shard { steps, peers, out, .. } = self;
        let Some(tokens) = steps.asynchronous_tokens() else { return };
        for token in tokens.recalls.tokens().filter(|&token| asks(token)) {
            let Some(holder) = tokens.ledger.holder_of(token) else { continue };
            let recall = message::Recall { token, client: peers.registry.client(holder).epoch };
            let silent = shards.iter().filter(|&&shard| tokens.recalls.awaits(token, shard));
            for connection in silent.filter_map(|shard| steps.shards.connection_of(*shard)) {
                let envelope = out.epoch_only();
                out.send(connection, envelope, recall.clone().into());
            }
        }
    }

    fn take_back_free_tokens(&mut self, shards: &[ShardId]) {
        let complete = self.intake.whole_tokens();
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
        let returned = tokens.take_back_free(shards, |token| complete.contains(&token));
        if returned > 0 {
            self.counters.tokens_taken_back.add(returned as u64);
        }
    }

    /// On the step owner: handles a shard's answer.
    pub(super) fn recall_answered(
        &mut self,
        now: Instant,
        connection: u64,
        answer: &message::Recalled,
    ) {
        let message::Recalled { token, shard, applied } = *answer;
        if self.register_shard(now, connection, shard).is_none() {
            return;
        }
        let shards = self.steps.shards_to_ask();
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
        tokens.recall_answered(token, shard, applied);
        self.take_back_free_tokens(&shards);
    }
}
