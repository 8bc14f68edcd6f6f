//! The right and the duty to contribute one gradient to one step.

use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::Grant;
use tokio::sync::Notify;

use crate::runtime::{Leadership, OpenOperation};
use crate::session::{Counts, OpId, Read};

/// The right to push one gradient, from [`crate::Worker::token`].
///
/// It cannot be copied or made, and `push` takes it by value: a gradient for a step that was not
/// granted cannot be written down. Dropping it gives it back, and somebody else gets it.
#[derive(Debug)]
#[must_use = "a token that is dropped goes back unspent"]
pub struct Token {
    grant: Option<Grant>,
    /// The newest values that were pulled under it at once, and the oldest of rows and single variables: a gradient is as stale as
    /// the oldest of what it was computed from.
    read: Mutex<(Read, Counts)>,
    returns: Arc<Returns>,
}

impl Token {
    pub(crate) fn new(grant: Grant, returns: Arc<Returns>) -> Token {
        let read = Read { step: grant.step, ..Read::default() };
        Token { grant: Some(grant), read: Mutex::new((read, Counts::default())), returns }
    }

    /// The global step at which it was granted.
    pub fn step(&self) -> u64 {
        self.grant.map_or(0, |grant| grant.step.0)
    }

    /// Remembers that these values were pulled under it.
    pub(crate) fn has_read(&self, values: Read) {
        // What lies in it is whole at any time, whatever a panic elsewhere interrupted.
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if values.step >= read.0.step {
            read.0 = values;
        }
    }

    /// Remembers that rows, or a variable alone, were pulled under it.
    pub(crate) fn has_read_some(&self, values: Read) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        for (shard, gradients) in values.gradients.iter() {
            read.1.lower(shard, gradients);
        }
    }

    /// Spends it: the grant, and the values that were read.
    pub(crate) fn spend(mut self) -> Option<(Grant, Read)> {
        let read = self.read.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (mut read, rows) = std::mem::take(read);
        for (shard, gradients) in rows.iter() {
            read.gradients.lower(shard, gradients);
        }
        self.grant.take().map(|grant| (grant, read))
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.returns.add(Dropped::Token(grant));
        }
    }
}

/// What was dropped on the caller's side, on its way to the session: a destructor cannot wait.
/// There is never more here than was given out.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    dropped: Mutex<Vec<(Dropped, OpenOperation)>>,
    pub(crate) notify: Notify,
    leadership: Arc<Leadership>,
}

/// Something that was dropped.
#[derive(Debug)]
pub(crate) enum Dropped {
    /// A token.
    Token(Grant),
    /// The future of an operation.
    Operation(OpId),
    /// A push that had been begun.
    Push(Sequence),
}

impl Returns {
    pub(crate) fn add(&self, dropped: Dropped) {
        // A list of numbers is whole whatever a panic elsewhere interrupted.
        let open = self.leadership.open();
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push((dropped, open));
        self.notify.notify_one();
        self.leadership.call();
    }

    /// Who runs the session that it is on its way to.
    pub(crate) fn leadership(&self) -> &Arc<Leadership> {
        &self.leadership
    }

    /// What has been dropped, in order, each with what says that it is to be done.
    pub(crate) fn take(&self) -> Vec<(Dropped, OpenOperation)> {
        std::mem::take(&mut self.dropped.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::{GlobalStep, ShardId, TokenId};

    use super::*;

    fn token(returns: &Arc<Returns>) -> Token {
        let grant = Grant { token: TokenId(4), generation: 1, step: GlobalStep(30), push_slot: 0 };
        Token::new(grant, returns.clone())
    }

    #[test]
    fn a_dropped_token_is_returned_and_a_spent_one_is_not() {
        let returns = Arc::new(Returns::default());
        drop(token(&returns));
        let dropped = returns.take();
        assert!(matches!(dropped[..], [(Dropped::Token(grant), _)] if grant.token == TokenId(4)));
        let (grant, read) = token(&returns).spend().unwrap();
        assert_eq!((grant.token, read.step), (TokenId(4), GlobalStep(30)));
        assert!(read.gradients.is_empty(), "nothing was pulled under it");
        assert!(returns.take().is_empty());
    }

    #[test]
    fn a_token_knows_the_newest_values_that_it_has_read() {
        let returns = Arc::new(Returns::default());
        let token = token(&returns);
        let read = |step, count| {
            let gradients = [(ShardId { task: 0, shard: 1 }, count)].into();
            Read { step: GlobalStep(step), gradients }
        };
        for (step, count) in [(32, 7), (33, 8), (33, 9), (31, 6)] {
            token.has_read(read(step, count));
        }
        assert_eq!((token.step(), token.spend().unwrap().1), (30, read(33, 9)));
    }

    #[test]
    fn a_gradient_is_as_stale_as_the_oldest_rows() {
        let returns = Arc::new(Returns::default());
        let token = token(&returns);
        let shards = [0, 1].map(|shard| ShardId { task: 0, shard });
        let read = |step, counts: &[(usize, u64)]| {
            let gradients = counts.iter().map(|&(shard, count)| (shards[shard], count)).into();
            Read { step: GlobalStep(step), gradients }
        };
        token.has_read_some(read(31, &[(0, 5), (1, 8)]));
        token.has_read(read(33, &[(0, 9)]));
        token.has_read_some(read(34, &[(0, 10), (1, 11)]));
        assert_eq!(token.spend().unwrap().1, read(33, &[(0, 5), (1, 8)]));
    }
}
