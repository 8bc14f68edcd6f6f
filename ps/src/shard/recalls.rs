//! Tokens that are taken back in asynchronous mode: the step owner asks the other shards first, and
//! they answer. `aggregate::recall` says why.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, ShardId, TokenId};
use pushpull_common::protocol::{Envelope, message};
use smallvec::SmallVec;

use super::Shard;
use super::output::Output;
use super::replicas::{ClientKey, Presence};
use crate::planted::Bug;

impl Shard {
    /// The other shards that may have applied the push of a token, in asynchronous mode.
    pub(super) fn shards_to_ask(&self) -> SmallVec<[ShardId; 16]> {
        if self.owner.is_none()
            || self.is_synchronous()
            || self.config.planted.has(Bug::TakeBackUnasked)
        {
            return SmallVec::new();
        }
        let mut shards = self.taking_part();
        shards.retain(|shard| *shard != self.id);
        shards
    }

    /// On the step owner: recalls the tokens that are due, and takes back those that are free.
    pub(super) fn recall_tokens(&mut self, now: Instant) {
        let shards = self.shards_to_ask();
        if shards.is_empty() {
            return;
        }
        let kept = self.whole_tokens();
        let replicas = &self.replicas;
        let gone = |client| replicas.client(client).presence != Presence::Present;
        let Some(owner) = &mut self.owner else { return };
        let new = owner.recall(now, gone, |token| kept.contains(&token));
        // An answer may be lost with its connection.
        let again = self.asked_for_recalls.is_none_or(|at| now >= at + self.config.lease / 5);
        if again {
            self.asked_for_recalls = Some(now);
        }
        self.ask_for_recalls(&shards, |token| again || new.contains(&token));
        self.take_back_free_tokens(now, &shards);
        self.retire_the_overdue(now);
    }

    fn ask_for_recalls(&mut self, shards: &[ShardId], asks: impl Fn(TokenId) -> bool) {
        let Some(owner) = &self.owner else { return };
        let mut due: Vec<(u64, message::Recall)> = Vec::new();
        for token in owner.recalls().tokens().filter(|&token| asks(token)) {
            let Some(holder) = owner.holder_of(token) else { continue };
            let recall = message::Recall { token, client: self.replicas.client(holder).epoch };
            let silent = shards.iter().filter(|&&shard| owner.recalls().awaits(token, shard));
            let connections = silent.filter_map(|shard| self.parts.get(shard));
            due.extend(connections.map(|&connection| (connection, recall.clone())));
        }
        for (connection, recall) in due {
            let envelope = Envelope { restore_epoch: self.epoch, ..Envelope::default() };
            self.send(connection, envelope, recall.into());
        }
    }

    /// Which shards have still to say whether they have applied the pushes of tokens that are recalled, in
    /// words; nothing if none has.
    pub(super) fn awaited_recalls(&self, now: Instant) -> Option<String> {
        let recalls = self.owner.as_ref()?.recalls();
        let shards = self.shards_to_ask();
        let awaits =
            |shard: &&ShardId| recalls.tokens().any(|token| recalls.awaits(token, **shard));
        let silent: Vec<String> = shards
            .iter()
            .filter(awaits)
            .map(|&shard| self.last_word_of_other(now, shard))
            .collect();
        (!silent.is_empty())
            .then(|| format!("the word of {} on tokens to be taken back", silent.join(", ")))
    }

    fn take_back_free_tokens(&mut self, now: Instant, shards: &[ShardId]) {
        let kept = self.whole_tokens();
        let Some(owner) = &mut self.owner else { return };
        let returned = owner.take_back_free(shards, |token| kept.contains(&token));
        if returned > 0 {
            self.counters.tokens_taken_back.add(returned as u64);
            self.grant_parked_tokens(now);
        }
    }

    /// Retires clients that stay away although a shard has applied their push. A client that comes back after
    /// that is fenced. A present client may wait for room without a limit.
    fn retire_the_overdue(&mut self, now: Instant) {
        let Some(owner) = &mut self.owner else { return };
        let replicas = &self.replicas;
        owner.put_off_recalls(now, |client| replicas.client(client).presence == Presence::Present);
        let owner = &*owner;
        let comes = |token: TokenId| {
            self.inbox.as_ref().is_some_and(|inbox| !inbox.push_slots_of(token.0).is_empty())
        };
        let overdue = owner.recalls().overdue(now, self.config.lease * 2);
        let holders = overdue.filter(|&token| !comes(token)).filter_map(|t| owner.holder_of(t));
        let mut holders: Vec<ClientKey> = holders.collect();
        holders.sort_unstable();
        holders.dedup();
        for client in holders {
            self.counters.clients_retired.add(1);
            if let Some(connection) = self.replicas.retire(client, now) {
                self.outputs.push_back(Output::Close { connection });
                self.drop_line(now, connection, client);
            }
            if let Some(inbox) = &mut self.inbox {
                inbox.orphan_whole(client);
            }
            self.drop_client(now, client, true);
        }
    }

    /// On the step owner: a shard answers.
    pub(super) fn recall_answered(
        &mut self,
        now: Instant,
        connection: u64,
        answer: &message::Recalled,
    ) {
        let message::Recalled { token, shard, applied } = *answer;
        if self.takes_part(now, connection, shard).is_none() {
            return;
        }
        let shards = self.shards_to_ask();
        let Some(owner) = &mut self.owner else { return };
        owner.recall_answered(token, shard, applied);
        self.take_back_free_tokens(now, &shards);
    }

    /// On another shard: the step owner wants a token back. If its push has not been applied here, what
    /// may be on its way over the client's connection must not arrive.
    pub(super) fn recall(&mut self, now: Instant, token: TokenId, epoch: ClientEpoch) {
        // On a shard that mints none, more than one client may say that an epoch is theirs.
        let holders: SmallVec<[ClientKey; 2]> = self.replicas.of_epoch(epoch).collect();
        let has_applied = |&client: &ClientKey| {
            let window = &self.replicas.client(client).window;
            window.has_applied(token)
        };
        let applied = self.is_whole(token) || holders.iter().any(has_applied);
        for client in holders.into_iter().filter(|_| !applied) {
            if let Some(connection) = self.replicas.client_mut(client).connection.take() {
                self.outputs.push_back(Output::Close { connection });
                self.drop_line(now, connection, client);
            }
        }
        self.tell_owner(message::Recalled { token, shard: self.id, applied }.into());
    }
}
