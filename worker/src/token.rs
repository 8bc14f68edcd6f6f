//! The right and the duty to contribute one gradient to one step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::ids::{GlobalStep, Sequence};
use pushpull_common::protocol::Grant;
use tokio::sync::Notify;

use crate::session::OpId;

/// The right to push one gradient, from [`crate::Worker::token`].
///
/// It cannot be copied or made, and `push` takes it by value: a gradient for a step that was not
/// granted cannot be written down. Dropping it gives it back, and somebody else gets it.
#[derive(Debug)]
#[must_use = "a token that is dropped goes back unspent"]
pub struct Token {
    grant: Option<Grant>,
    /// The newest global step at which values were pulled under it.
    read: AtomicU64,
    returns: Arc<Returns>,
}

impl Token {
    pub(crate) fn new(grant: Grant, returns: Arc<Returns>) -> Token {
        Token { read: AtomicU64::new(grant.step.0), grant: Some(grant), returns }
    }

    /// The global step at which it was granted.
    pub fn step(&self) -> u64 {
        self.grant.map_or(0, |grant| grant.step.0)
    }

    /// Remembers that values were pulled under it at this step.
    pub(crate) fn read_at(&self, step: GlobalStep) {
        // The owner of the token reads it back later, on whatever thread it is then.
        self.read.fetch_max(step.0, Ordering::Relaxed);
    }

    /// Spends it: the grant, and the step at which values were read.
    pub(crate) fn spend(mut self) -> Option<(Grant, GlobalStep)> {
        let read = GlobalStep(self.read.load(Ordering::Relaxed));
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
    dropped: Mutex<Vec<Dropped>>,
    pub(crate) notify: Notify,
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
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push(dropped);
        self.notify.notify_one();
    }

    pub(crate) fn take(&self) -> Vec<Dropped> {
        std::mem::take(&mut self.dropped.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::TokenId;

    use super::*;

    fn token(returns: &Arc<Returns>) -> Token {
        let grant = Grant { token: TokenId(4), generation: 1, step: GlobalStep(30), room: 0 };
        Token::new(grant, returns.clone())
    }

    #[test]
    fn a_dropped_token_is_returned_and_a_spent_one_is_not() {
        let returns = Arc::new(Returns::default());
        drop(token(&returns));
        let dropped = returns.take();
        assert!(matches!(dropped[..], [Dropped::Token(grant)] if grant.token == TokenId(4)));
        let (grant, read) = token(&returns).spend().unwrap();
        assert_eq!((grant.token, read), (TokenId(4), GlobalStep(30)));
        assert!(returns.take().is_empty());
    }

    #[test]
    fn a_token_knows_the_newest_step_it_read_at() {
        let returns = Arc::new(Returns::default());
        let token = token(&returns);
        token.read_at(GlobalStep(33));
        token.read_at(GlobalStep(31));
        assert_eq!((token.step(), token.spend().unwrap().1), (30, GlobalStep(33)));
    }
}
