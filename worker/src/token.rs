//! The right to contribute one gradient to one step.

use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::data_set::SampleRange;
use pushpull_common::ids::Sequence;
use pushpull_common::protocol::Grant;

use crate::runtime::{Leadership, OpenOperation};
use crate::session::{GradientCounts, OpId, ReadPoint};

/// The right to push one gradient, from [`crate::Worker::token`].
///
/// [`crate::Worker::push`] consumes it, so a step receives no gradient that was not granted.
/// Dropping it returns it to the step owner, which can then grant it to another worker.
#[derive(Debug)]
#[must_use = "a token that is dropped goes back unspent"]
pub struct Token {
    grant: Option<Grant>,
    /// The newest values pulled under the token, and the oldest counts of rows and single
    /// variables: a gradient is as stale as the oldest value that it was computed from.
    read: Mutex<(ReadPoint, GradientCounts)>,
    returns: Arc<ReturnQueue>,
}

impl Token {
    pub(crate) fn new(grant: Grant, returns: Arc<ReturnQueue>) -> Token {
        let read = ReadPoint { step: grant.step, ..ReadPoint::default() };
        Token { grant: Some(grant), read: Mutex::new((read, GradientCounts::default())), returns }
    }

    /// Returns the global step at which the token was granted.
    pub fn step(&self) -> u64 {
        self.grant.map_or(0, |grant| grant.step.0)
    }

    /// Returns the samples from which the gradient is to be computed: a batch of the declared data
    /// set, which no other token has. `None` without [`crate::WorkerConfig::data`].
    ///
    /// The batch is spent in the commit of the gradient. If the token is dropped or its gradient is
    /// stale, another token gets the batch.
    pub fn samples(&self) -> Option<SampleRange> {
        self.grant.and_then(|grant| grant.samples)
    }

    /// Returns the samples that this worker will probably be granted next, to be read ahead. `None`
    /// at the end of the data.
    pub fn samples_ahead(&self) -> Option<SampleRange> {
        self.grant.and_then(|grant| grant.ahead)
    }

    /// Ends the token, and spends its batch without a gradient: nobody gets it again. For samples
    /// that cannot be used. Without a data set, the same as dropping the token.
    pub fn skip(mut self) {
        if let Some(grant) = self.grant.take() {
            self.returns.add(match grant.samples {
                Some(_) => DroppedItem::SkippedToken(grant),
                None => DroppedItem::Token(grant),
            });
        }
    }

    /// Records that all values were pulled under the token.
    pub(crate) fn record_pull(&self, values: ReadPoint) {
        // Each update is one assignment, so the state is consistent after a panic elsewhere.
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if values.step >= read.0.step {
            read.0 = values;
        }
    }

    /// Records that rows or one variable were pulled under the token.
    pub(crate) fn record_partial_pull(&self, values: ReadPoint) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        for (shard, gradients) in values.gradients.iter() {
            read.1.lower(shard, gradients);
        }
    }

    /// Spends the token: returns the grant, and the values that were read.
    pub(crate) fn spend(mut self) -> Option<(Grant, ReadPoint)> {
        let read = self.read.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (mut read, rows) = std::mem::take(read);
        for (shard, gradients) in rows.iter() {
            read.gradients.lower(shard, gradients);
        }
        self.grant.take().map(|grant| (grant, read))
    }
}

/// Returns the token of a step that no server has granted.
#[cfg(feature = "ring")]
pub fn local_token(step: u64) -> Token {
    let grant = Grant {
        token: pushpull_common::ids::TokenId(step),
        generation: 0,
        step: step.into(),
        push_slot: 0,
        samples: None,
        ahead: None,
    };
    // A queue of its own, which nobody reads: the token can be dropped.
    Token::new(grant, Arc::default())
}

impl Drop for Token {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.returns.add(DroppedItem::Token(grant));
        }
    }
}

/// Tokens, operations and pushes that a caller dropped, until the session has handled them. A
/// destructor cannot wait, so it adds to this queue. The queue is bounded by what the session has
/// handed out.
#[derive(Debug, Default)]
pub(crate) struct ReturnQueue {
    dropped: Mutex<Vec<(DroppedItem, OpenOperation)>>,
    leadership: Arc<Leadership>,
}

/// A dropped value that the session must handle.
#[derive(Debug)]
pub(crate) enum DroppedItem {
    /// A token, to be returned.
    Token(Grant),
    /// A token whose batch is to be spent without a gradient.
    SkippedToken(Grant),
    /// The future of an operation.
    Operation(OpId),
    /// A push that was begun.
    Push(Sequence),
}

impl ReturnQueue {
    pub(crate) fn add(&self, dropped: DroppedItem) {
        // Each update is one call, so the list is consistent after a panic elsewhere.
        let open = self.leadership.open();
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push((dropped, open));
        self.leadership.call();
    }

    /// The leadership of the session that handles the queue.
    pub(crate) fn leadership(&self) -> &Arc<Leadership> {
        &self.leadership
    }

    /// Takes all dropped items in order, each with the guard that keeps the session running for it.
    pub(crate) fn take(&self) -> Vec<(DroppedItem, OpenOperation)> {
        std::mem::take(&mut self.dropped.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::{GlobalStep, ShardId, TokenId};

    use super::*;

    fn token(returns: &Arc<ReturnQueue>) -> Token {
        let grant = Grant {
            token: TokenId(4),
            generation: 1,
            step: GlobalStep(30),
            push_slot: 0,
            samples: None,
            ahead: None,
        };
        Token::new(grant, returns.clone())
    }

    #[test]
    fn a_dropped_token_is_returned_and_a_spent_one_is_not() {
        let returns = Arc::new(ReturnQueue::default());
        drop(token(&returns));
        let dropped = returns.take();
        assert!(
            matches!(dropped[..], [(DroppedItem::Token(grant), _)] if grant.token == TokenId(4))
        );
        let (grant, read) = token(&returns).spend().unwrap();
        assert_eq!((grant.token, read.step), (TokenId(4), GlobalStep(30)));
        assert!(read.gradients.is_empty(), "nothing was pulled under the token");
        assert!(returns.take().is_empty());
    }

    #[test]
    fn a_token_records_the_newest_values_pulled_under_it() {
        let returns = Arc::new(ReturnQueue::default());
        let token = token(&returns);
        let read = |step, count| {
            let gradients = [(ShardId { task: 0, shard: 1 }, count)].into();
            ReadPoint { step: GlobalStep(step), gradients }
        };
        for (step, count) in [(32, 7), (33, 8), (33, 9), (31, 6)] {
            token.record_pull(read(step, count));
        }
        assert_eq!((token.step(), token.spend().unwrap().1), (30, read(33, 9)));
    }

    #[test]
    fn a_gradient_is_as_stale_as_the_oldest_rows() {
        let returns = Arc::new(ReturnQueue::default());
        let token = token(&returns);
        let shards = [0, 1].map(|shard| ShardId { task: 0, shard });
        let read = |step, counts: &[(usize, u64)]| {
            let gradients = counts.iter().map(|&(shard, count)| (shards[shard], count)).into();
            ReadPoint { step: GlobalStep(step), gradients }
        };
        token.record_partial_pull(read(31, &[(0, 5), (1, 8)]));
        token.record_pull(read(33, &[(0, 9)]));
        token.record_partial_pull(read(34, &[(0, 10), (1, 11)]));
        assert_eq!(token.spend().unwrap().1, read(33, &[(0, 5), (1, 8)]));
    }
}
