//! The token queue: the barrier of classic synchronous training.

use std::collections::VecDeque;

use pushpull_common::ids::GlobalStep;
use thiserror::Error;

use super::WAITERS_MAX;

/// Identifies a waiter for a token, by a number that the caller chooses. A replica that waits twice
/// at the same time needs two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// The result of taking from a [`TokenQueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dequeued {
    /// A token.
    Token {
        /// The step it carries: the local step of the gradient that its holder computes next.
        step: GlobalStep,
    },
    /// The queue is closed and empty.
    Closed,
}

/// A bounded first-in, first-out queue of tokens, with a first-in, first-out list of waiters.
///
/// It corresponds to the queue `sync_token_q` of TensorFlow's `SyncReplicasOptimizer`, which is
/// that optimizer's barrier. A replica that has pushed takes a token before it computes again. An
/// update adds tokens that carry the new step; [`SynchronousTokens`](super::SynchronousTokens)
/// defines how many. There are two differences. This queue is bounded. It can be reopened after
/// [`close`](Self::close), whereas TensorFlow's stays closed for the lifetime of its server.
///
/// A replica that takes a token and goes away keeps it. If too few replicas are left for an update,
/// no token is ever added again. A caller that detects the loss must put the token back.
///
/// Cost: constant for a token; linear in the number of waiters for taking and cancelling.
///
/// Invariants:
///
/// - No waiter is in line while there are tokens or while the queue is closed.
/// - The queue holds at most `tokens_max` tokens.
/// - At most [`WAITERS_MAX`] waiters are in line or have been served and not polled.
/// - No waiter occurs twice.
#[doc(alias = "get_chief_queue_runner")]
#[doc(alias = "get_init_tokens_op")]
#[derive(Clone, Debug)]
pub struct TokenQueue {
    tokens_max: usize,
    closed: bool,
    tokens: VecDeque<GlobalStep>,
    waiting: VecDeque<WaiterId>,
    taken: VecDeque<(WaiterId, Dequeued)>,
}

/// The reason why tokens cannot be added to a queue. The queue is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PushTokensError {
    /// The queue is closed.
    #[error("cannot put tokens of step {step} into the queue: it is closed")]
    Closed {
        /// The step of the tokens.
        step: GlobalStep,
    },
    /// The queue would exceed its capacity: more tokens are added than pushes are made.
    #[error(
        "cannot put {count} tokens of step {step} into the queue: it holds {held}, {waiting} wait \
         for one, and it may hold {tokens_max}"
    )]
    Full {
        /// The step of the tokens.
        step: GlobalStep,
        /// The number of tokens to add.
        count: u32,
        /// The number of tokens in the queue.
        held: usize,
        /// The number of waiters that would have been served at once.
        waiting: usize,
        /// The capacity of the queue.
        tokens_max: usize,
    },
}

/// The reason why a caller cannot wait under this name. The caller is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The waiter is in line already, or was served and has not been polled.
    #[error("cannot wait for a token as {}: it already waits or was served", .waiter.0)]
    Twice {
        /// The waiter.
        waiter: WaiterId,
    },
    /// The maximum number of waiters are in line, or have been served and not polled.
    #[error("cannot wait for a token: {waiters_max} callers wait or have not fetched theirs")]
    TooMany {
        /// The maximum: [`WAITERS_MAX`].
        waiters_max: usize,
    },
}

impl TokenQueue {
    /// Creates an empty queue that holds at most `tokens_max` tokens.
    pub const fn new(tokens_max: usize) -> Self {
        TokenQueue {
            tokens_max,
            closed: false,
            tokens: VecDeque::new(),
            waiting: VecDeque::new(),
            taken: VecDeque::new(),
        }
    }

    /// Returns the number of tokens in the queue.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether the queue holds no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns whether the queue is closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Adds `count` tokens of a step. Waiters receive the first of them, in their order.
    ///
    /// # Errors
    ///
    /// Either all tokens are added or none: [`PushTokensError::Closed`] after
    /// [`close`](Self::close), [`PushTokensError::Full`] if more than `tokens_max` would remain.
    pub fn push_many(&mut self, step: GlobalStep, count: u32) -> Result<(), PushTokensError> {
        if self.closed {
            return Err(PushTokensError::Closed { step });
        }
        let (held, waiting) = (self.tokens.len(), self.waiting.len());
        let served = waiting.min(count as usize);
        let kept = count as usize - served;
        if kept > self.tokens_max.saturating_sub(held) {
            let tokens_max = self.tokens_max;
            return Err(PushTokensError::Full { step, count, held, waiting, tokens_max });
        }
        let served = self.waiting.drain(..served);
        self.taken.extend(served.map(|waiter| (waiter, Dequeued::Token { step })));
        self.tokens.extend(std::iter::repeat_n(step, kept));
        Ok(())
    }

    /// Takes the oldest token, even from a closed queue. Returns [`Dequeued::Closed`] if the queue
    /// is closed and empty. Returns `None` if it is open and empty: the waiter is then in line, and
    /// [`poll_taken`](Self::poll_taken) returns its token later.
    ///
    /// # Errors
    ///
    /// [`WaitError::Twice`] for a waiter that is in line or has not been polled yet;
    /// [`WaitError::TooMany`] if it would have to wait and there are [`WAITERS_MAX`] already.
    pub fn take(&mut self, waiter: WaiterId) -> Result<Option<Dequeued>, WaitError> {
        let served = self.taken.iter().any(|&(other, _)| other == waiter);
        if served || self.waiting.contains(&waiter) {
            return Err(WaitError::Twice { waiter });
        }
        if let Some(step) = self.tokens.pop_front() {
            return Ok(Some(Dequeued::Token { step }));
        }
        if self.closed {
            return Ok(Some(Dequeued::Closed));
        }
        if self.waiting.len() + self.taken.len() >= WAITERS_MAX {
            return Err(WaitError::TooMany { waiters_max: WAITERS_MAX });
        }
        self.waiting.push_back(waiter);
        Ok(None)
    }

    /// Returns the next served waiter with its result, in the order of the calls.
    pub fn poll_taken(&mut self) -> Option<(WaiterId, Dequeued)> {
        self.taken.pop_front()
    }

    /// Ends a wait. Returns false if the waiter is not in line: it never was, or it was served. A
    /// served waiter must still be polled, or its token is lost.
    pub fn cancel(&mut self, waiter: WaiterId) -> bool {
        let place = self.waiting.iter().position(|&other| other == waiter);
        place.and_then(|place| self.waiting.remove(place)).is_some()
    }

    /// Closes the queue. No token can be added. The remaining tokens can be taken; after them every
    /// caller gets [`Dequeued::Closed`]. Waiters get it at once.
    pub fn close(&mut self) {
        self.closed = true;
        let served = self.waiting.drain(..).map(|waiter| (waiter, Dequeued::Closed));
        self.taken.extend(served);
    }

    /// Reopens a closed queue, with the tokens that remain in it.
    pub fn reopen(&mut self) {
        self.closed = false;
    }

    /// Asserts the invariants; for tests.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        assert!(self.waiting.is_empty() || (self.tokens.is_empty() && !self.closed));
        assert!(self.tokens.len() <= self.tokens_max);
        let taken = self.taken.iter().map(|taken| taken.0);
        let waiters: Vec<WaiterId> = taken.chain(self.waiting.iter().copied()).collect();
        assert!(waiters.len() <= WAITERS_MAX);
        let names: std::collections::BTreeSet<&WaiterId> = waiters.iter().collect();
        assert_eq!(names.len(), waiters.len(), "no waiter occurs twice");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(step: u64) -> Dequeued {
        Dequeued::Token { step: GlobalStep(step) }
    }

    fn take(queue: &mut TokenQueue, waiter: u64) -> Option<Dequeued> {
        let taken = queue.take(WaiterId(waiter)).unwrap();
        queue.check_invariants();
        taken
    }

    fn polled(queue: &mut TokenQueue) -> Vec<(u64, Dequeued)> {
        std::iter::from_fn(|| queue.poll_taken()).map(|(waiter, taken)| (waiter.0, taken)).collect()
    }

    #[test]
    fn tokens_and_waiters_are_served_first_in_first_out() {
        let mut queue = TokenQueue::new(8);
        queue.push_many(GlobalStep(1), 1).unwrap();
        queue.push_many(GlobalStep(2), 1).unwrap();
        assert_eq!(take(&mut queue, 0), Some(token(1)));
        assert_eq!(take(&mut queue, 0), Some(token(2)));
        for waiter in [7, 5, 6] {
            assert_eq!(take(&mut queue, waiter), None);
        }
        queue.push_many(GlobalStep(3), 2).unwrap();
        assert_eq!(polled(&mut queue), [(7, token(3)), (5, token(3))]);
        queue.push_many(GlobalStep(4), 3).unwrap();
        assert_eq!(polled(&mut queue), [(6, token(4))]);
        assert_eq!((queue.len(), queue.is_empty()), (2, false));
        queue.check_invariants();
    }

    #[test]
    fn a_cancelled_waiter_consumes_no_token() {
        let mut queue = TokenQueue::new(8);
        for waiter in [0, 1] {
            assert_eq!(take(&mut queue, waiter), None);
        }
        assert!(queue.cancel(WaiterId(0)) && !queue.cancel(WaiterId(0)));
        queue.push_many(GlobalStep(1), 1).unwrap();
        assert!(!queue.cancel(WaiterId(1)), "it was served");
        assert_eq!((polled(&mut queue), queue.len()), (vec![(1, token(1))], 0));
    }

    #[test]
    fn a_closed_queue_can_be_drained_and_reopened() {
        let mut queue = TokenQueue::new(8);
        queue.push_many(GlobalStep(1), 2).unwrap();
        queue.close();
        let refused = queue.push_many(GlobalStep(2), 1);
        assert_eq!(refused, Err(PushTokensError::Closed { step: GlobalStep(2) }));
        assert_eq!(take(&mut queue, 0), Some(token(1)));
        assert_eq!(take(&mut queue, 1), Some(token(1)));
        assert_eq!(take(&mut queue, 2), Some(Dequeued::Closed));
        queue.close();
        queue.reopen();
        assert!(!queue.is_closed());
        assert_eq!(take(&mut queue, 3), None);
        assert_eq!(take(&mut queue, 2), None);
        queue.close();
        queue.check_invariants();
        let closed = Dequeued::Closed;
        assert_eq!(polled(&mut queue), [(3, closed), (2, closed)]);
        // TensorFlow's queue cannot be reopened; here a second chief can continue.
        queue.reopen();
        queue.push_many(GlobalStep(2), 1).unwrap();
        assert_eq!(take(&mut queue, 2), Some(token(2)));
    }

    #[test]
    fn tokens_and_waiters_are_bounded() {
        let mut queue = TokenQueue::new(3);
        for waiter in 0..WAITERS_MAX as u64 {
            assert_eq!(take(&mut queue, waiter), None);
        }
        let more = WaiterId(u64::MAX);
        let too_many = WaitError::TooMany { waiters_max: WAITERS_MAX };
        assert_eq!(queue.take(more), Err(too_many));
        assert_eq!(queue.take(WaiterId(5)), Err(WaitError::Twice { waiter: WaiterId(5) }));
        let count = WAITERS_MAX as u32;
        let full = |count, held, waiting| {
            Err(PushTokensError::Full { step: GlobalStep(1), count, held, waiting, tokens_max: 3 })
        };
        let refused = queue.push_many(GlobalStep(1), count + 4);
        assert_eq!(refused, full(count + 4, 0, WAITERS_MAX));
        assert_eq!(queue.poll_taken(), None, "all or none");
        queue.push_many(GlobalStep(1), count + 3).unwrap();
        queue.check_invariants();
        assert_eq!(queue.len(), 3);
        let refused = queue.take(WaiterId(5));
        assert_eq!(refused, Err(WaitError::Twice { waiter: WaiterId(5) }), "not polled yet");
        assert_eq!(queue.push_many(GlobalStep(1), 1), full(1, 3, 0));
        assert_eq!(queue.push_many(GlobalStep(1), u32::MAX), full(u32::MAX, 3, 0));
        queue.push_many(GlobalStep(1), 0).unwrap();
        assert_eq!(take(&mut queue, u64::MAX), Some(token(1)), "it does not have to wait");
    }

    #[derive(Clone, Debug)]
    enum QueueInput {
        Push(u32),
        Take,
        Cancel(u64),
        Poll,
        Close,
        Reopen,
    }

    fn input() -> impl Strategy<Value = QueueInput> {
        prop_oneof![
            3 => (0_u32..5).prop_map(QueueInput::Push),
            8 => Just(QueueInput::Take),
            2 => (0_u64..40).prop_map(QueueInput::Cancel),
            4 => Just(QueueInput::Poll),
            1 => Just(QueueInput::Close),
            1 => Just(QueueInput::Reopen),
        ]
    }

    proptest! {
        #[test]
        fn every_token_is_taken_once_in_order(
            inputs in prop::collection::vec(input(), 0..60),
        ) {
            let mut queue = TokenQueue::new(6);
            // Each token has its own step, and each taker its own name.
            let (mut pushed, mut taker) = (0, 0);
            let mut served: Vec<(u64, u64)> = Vec::new();
            let mut note = |waiter: u64, taken: Dequeued| {
                if let Dequeued::Token { step } = taken {
                    served.push((step.0, waiter));
                }
            };
            for input in inputs {
                match input {
                    QueueInput::Push(count) => {
                        for _ in 0..count {
                            pushed += u64::from(queue.push_many(GlobalStep(pushed), 1).is_ok());
                        }
                    }
                    QueueInput::Take => {
                        if let Some(taken) = queue.take(WaiterId(taker)).unwrap() {
                            note(taker, taken);
                        }
                        taker += 1;
                    }
                    QueueInput::Cancel(waiter) => {
                        queue.cancel(WaiterId(waiter));
                    }
                    QueueInput::Poll => {
                        if let Some((waiter, taken)) = queue.poll_taken() {
                            note(waiter.0, taken);
                        }
                    }
                    QueueInput::Close => queue.close(),
                    QueueInput::Reopen => queue.reopen(),
                }
                queue.check_invariants();
            }
            while let Some((waiter, taken)) = queue.poll_taken() {
                note(waiter.0, taken);
            }
            served.sort_unstable();
            let left = queue.len() as u64;
            prop_assert!(served.iter().map(|served| served.0).eq(0..pushed - left), "each once");
            let waiters = served.iter().map(|served| served.1);
            prop_assert!(waiters.is_sorted(), "earlier waiters get older tokens");
        }
    }
}
