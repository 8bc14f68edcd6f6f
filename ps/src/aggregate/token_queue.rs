//! The token queue: the barrier of classic synchronous training.

use std::collections::VecDeque;

use pushpull_common::ids::GlobalStep;
use thiserror::Error;

use super::WAITERS_MAX;

/// Names one who waits for a token: a number that the caller chooses. A replica that waits twice at
/// the same time needs two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// What taking from a [`TokenQueue`] gives.
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

/// Tokens, first in, first out, and those who wait for one, in the order in which they came.
///
/// It stands for the queue `sync_token_q` of TensorFlow's `SyncReplicasOptimizer`, which is its
/// barrier: a replica that has pushed takes a token before it computes again, and an update puts
/// tokens in that carry the new step ([`SynchronousTokens`](super::SynchronousTokens) says how many). With two differences: it is
/// bounded, and after [`close`](Self::close) it can be opened again, where TensorFlow's stays
/// closed as long as its server lives.
///
/// A replica that takes a token and goes away takes it along. If too few are left for an update,
/// nobody ever gets another: whoever can tell that a replica is gone has to put its token back.
///
/// Cost: constant for a token, and proportional to the number of waiters for taking and cancelling.
///
/// Invariants: nobody waits while there are tokens, or while the queue is closed; at most
/// `tokens_max` tokens are held; at most [`WAITERS_MAX`] wait or have been served and not polled;
/// no waiter is there twice.
#[derive(Clone, Debug)]
pub struct TokenQueue {
    tokens_max: usize,
    closed: bool,
    tokens: VecDeque<GlobalStep>,
    waiting: VecDeque<WaiterId>,
    taken: VecDeque<(WaiterId, Dequeued)>,
}

/// Why tokens cannot be put into a queue. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PushTokensError {
    /// The queue is closed.
    #[error("cannot put tokens of step {step} into the queue: it is closed")]
    Closed {
        /// The step of the tokens.
        step: GlobalStep,
    },
    /// The queue would hold more than it may: more tokens are given out than pushes are made.
    #[error(
        "cannot put {count} tokens of step {step} into the queue: it holds {held}, {waiting} wait \
         for one, and it may hold {tokens_max}"
    )]
    Full {
        /// The step of the tokens.
        step: GlobalStep,
        /// How many there were to be.
        count: u32,
        /// How many there are.
        held: usize,
        /// How many would have gone to waiters at once.
        waiting: usize,
        /// How many there may be.
        tokens_max: usize,
    },
}

/// Why nobody can wait under this name. The caller's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The same name waits already, or was served and has not been polled.
    #[error("cannot wait for a token as {}: it waits already or was served", .waiter.0)]
    Twice {
        /// The name.
        waiter: WaiterId,
    },
    /// As many as there may be wait, or have got what nobody has polled.
    #[error("cannot wait for a token: {waiters_max} wait or have not fetched theirs")]
    TooMany {
        /// How many there may be: [`WAITERS_MAX`].
        waiters_max: usize,
    },
}

impl TokenQueue {
    /// An empty queue that holds at most `tokens_max` tokens.
    pub const fn new(tokens_max: usize) -> Self {
        TokenQueue {
            tokens_max,
            closed: false,
            tokens: VecDeque::new(),
            waiting: VecDeque::new(),
            taken: VecDeque::new(),
        }
    }

    /// The tokens in the queue.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Puts `count` tokens of a step in. Those who wait get the first of them, in their order.
    ///
    /// # Errors
    ///
    /// All are put in, or none: [`PushTokensError::Closed`] after [`close`](Self::close),
    /// [`PushTokensError::Full`] if more would be left than the queue may hold.
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

    /// Takes the oldest token, also of a closed queue. [`Dequeued::Closed`] if that is empty. `None`
    /// if an open queue is empty: the waiter is in line now, and [`poll_taken`](Self::poll_taken)
    /// will have its token.
    ///
    /// # Errors
    ///
    /// [`WaitError::Twice`] for a waiter that is in line or was not polled yet;
    /// [`WaitError::TooMany`] if it would have to wait and [`WAITERS_MAX`] do.
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

    /// The next waiter that was served, with what it has got; in the order of the calls.
    pub fn poll_taken(&mut self) -> Option<(WaiterId, Dequeued)> {
        self.taken.pop_front()
    }

    /// Ends a wait. False if the waiter is not in line: it was never, or it was served and is to be
    /// polled all the same, so that its token is not lost.
    pub fn cancel(&mut self, waiter: WaiterId) -> bool {
        let place = self.waiting.iter().position(|&other| other == waiter);
        place.and_then(|place| self.waiting.remove(place)).is_some()
    }

    /// Closes the queue: no token comes in, those that are in it can be taken, and then everybody
    /// gets [`Dequeued::Closed`]; those who wait get it at once.
    pub fn close(&mut self) {
        self.closed = true;
        let served = self.waiting.drain(..).map(|waiter| (waiter, Dequeued::Closed));
        self.taken.extend(served);
    }

    /// Opens a closed queue again, with the tokens that nobody has taken since.
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
        assert_eq!(names.len(), waiters.len(), "nobody twice");
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
    fn tokens_and_waiters_are_served_in_their_order() {
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
    fn a_cancelled_waiter_costs_no_token() {
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
    fn a_closed_queue_is_drained_and_opens_again() {
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
        // What TensorFlow's queue cannot: a second chief goes on.
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
        assert_eq!(take(&mut queue, u64::MAX), Some(token(1)), "it need not wait");
    }

    #[derive(Clone, Debug)]
    enum Input {
        Push(u32),
        Take,
        Cancel(u64),
        Poll,
        Close,
        Reopen,
    }

    fn input() -> impl Strategy<Value = Input> {
        prop_oneof![
            3 => (0_u32..5).prop_map(Input::Push),
            8 => Just(Input::Take),
            2 => (0_u64..40).prop_map(Input::Cancel),
            4 => Just(Input::Poll),
            1 => Just(Input::Close),
            1 => Just(Input::Reopen),
        ]
    }

    proptest! {
        #[test]
        fn every_token_is_taken_once_and_in_order(
            inputs in prop::collection::vec(input(), 0..60),
        ) {
            let mut queue = TokenQueue::new(6);
            // Each token is of a step of its own, each taker has a name of its own.
            let (mut pushed, mut taker) = (0, 0);
            let mut served: Vec<(u64, u64)> = Vec::new();
            let mut note = |waiter: u64, taken: Dequeued| {
                if let Dequeued::Token { step } = taken {
                    served.push((step.0, waiter));
                }
            };
            for input in inputs {
                match input {
                    Input::Push(count) => {
                        for _ in 0..count {
                            pushed += u64::from(queue.push_many(GlobalStep(pushed), 1).is_ok());
                        }
                    }
                    Input::Take => {
                        if let Some(taken) = queue.take(WaiterId(taker)).unwrap() {
                            note(taker, taken);
                        }
                        taker += 1;
                    }
                    Input::Cancel(waiter) => {
                        queue.cancel(WaiterId(waiter));
                    }
                    Input::Poll => {
                        if let Some((waiter, taken)) = queue.poll_taken() {
                            note(waiter.0, taken);
                        }
                    }
                    Input::Close => queue.close(),
                    Input::Reopen => queue.reopen(),
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
            prop_assert!(waiters.is_sorted(), "whoever came first has the older token");
        }
    }
}
