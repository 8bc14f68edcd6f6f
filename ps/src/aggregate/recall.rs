//! Recalls: how the step owner asks the other shards before it takes a token back in asynchronous
//! mode.
//!
//! A push goes to all shards at once. Another shard may have applied its share while the owner's
//! share is still in transit. If the owner then gave the token's step to another client, that shard
//! would count one gradient more than there are steps. So the owner asks first:
//!
//! - A shard that has not applied the push closes its client's connection and reports the token
//!   free. Data in transit to that shard never arrives. Over a newer connection the client sends no
//!   older push before the owner has applied it.
//! - The owner takes the token back once every shard has reported it free.
//! - If one shard has applied the push, the token stays with its holder, which must still send the
//!   owner's share.
//!
//! This module has no connections: the caller passes answers. A holder that stays away although a
//! shard has applied its push is ended by its audit (`push_audit`).

use std::collections::BTreeMap;

use pushpull_common::ids::{ShardId, TokenId};
use smallvec::SmallVec;

/// A token that is being recalled.
#[derive(Debug, Default)]
struct Recall {
    /// The shards that have not applied the push, and will not before the owner has.
    free: SmallVec<[ShardId; 8]>,
    /// A shard that has applied the push.
    applied: Option<ShardId>,
}

/// The tokens that are being recalled.
///
/// Invariant: a recall ends only with its token, which is taken back, spent, or given back by its
/// holder. It is never abandoned, so a delayed answer cannot count for another recall.
#[derive(Debug, Default)]
pub(crate) struct Recalls(BTreeMap<u64, Recall>);

impl Recalls {
    /// Begins to recall a token. Returns false if its recall has already begun.
    pub(crate) fn begin(&mut self, token: TokenId) -> bool {
        let new = !self.has(token);
        self.0.entry(token.0).or_default();
        new
    }

    /// Returns whether the token is being recalled.
    pub(crate) fn has(&self, token: TokenId) -> bool {
        self.0.contains_key(&token.0)
    }

    /// Ends the recall of a token that is no longer outstanding.
    pub(crate) fn end(&mut self, token: u64) {
        self.0.remove(&token);
    }

    /// Records a shard's answer.
    pub(crate) fn answered(&mut self, token: TokenId, shard: ShardId, applied: bool) {
        let Some(recall) = self.0.get_mut(&token.0) else { return };
        match applied {
            true => recall.applied = Some(shard),
            false if recall.free.contains(&shard) => {}
            false => recall.free.push(shard),
        }
    }

    /// Returns the recalled tokens, in ascending order.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = TokenId> {
        self.0.keys().map(|&token| TokenId(token))
    }

    /// Returns whether this shard still has to answer for the token.
    pub(crate) fn awaits(&self, token: TokenId, shard: ShardId) -> bool {
        let recall = self.0.get(&token.0);
        recall.is_some_and(|recall| recall.applied.is_none() && !recall.free.contains(&shard))
    }

    /// Returns the tokens that all these shards have reported free.
    pub(crate) fn free(&self, shards: &[ShardId]) -> impl Iterator<Item = TokenId> {
        let free = |recall: &Recall| shards.iter().all(|shard| recall.free.contains(shard));
        self.0.iter().filter(move |(_, recall)| free(recall)).map(|(&token, _)| TokenId(token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: TokenId = TokenId(7);

    fn shard(task: u32) -> ShardId {
        ShardId { task, shard: 0 }
    }

    fn free(recalls: &Recalls, shards: &[ShardId]) -> Vec<TokenId> {
        recalls.free(shards).collect()
    }

    #[test]
    fn a_token_is_free_once_every_shard_has_reported_it() {
        let shards = [shard(1), shard(2)];
        let mut recalls = Recalls::default();
        assert!(recalls.begin(T));
        assert!(recalls.awaits(T, shard(1)) && recalls.awaits(T, shard(2)));
        recalls.answered(T, shard(1), false);
        recalls.answered(T, shard(1), false);
        assert_eq!(free(&recalls, &shards), []);
        assert!(!recalls.awaits(T, shard(1)) && recalls.awaits(T, shard(2)));
        // A second request continues the same recall.
        assert!(!recalls.begin(T));
        recalls.answered(T, shard(2), false);
        assert_eq!(free(&recalls, &shards), [T]);
        recalls.end(T.0);
        assert_eq!(free(&recalls, &shards), []);
    }

    #[test]
    fn a_token_whose_push_is_applied_on_one_shard_is_never_free() {
        let shards = [shard(1), shard(2)];
        let mut recalls = Recalls::default();
        recalls.begin(T);
        recalls.answered(T, shard(1), true);
        recalls.answered(T, shard(2), false);
        assert_eq!(free(&recalls, &shards), []);
    }

    #[test]
    fn an_answer_for_a_token_that_is_not_recalled_is_ignored() {
        let mut recalls = Recalls::default();
        recalls.answered(T, shard(1), false);
        assert!(!recalls.has(T) && free(&recalls, &[shard(1)]).is_empty());
    }
}
