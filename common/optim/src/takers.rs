//! Tickets and waiters of both accumulators.

use std::collections::VecDeque;

use pushpull_common::ids::GlobalStep;
use thiserror::Error;

use super::WAITERS_MAX;

/// Identifies one call of `take` on one accumulator. An accumulator never reuses a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// The outcome of applying a gradient to an accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Applied {
    /// The gradient is part of the sum.
    Added {
        /// The number of gradients in the sum, including this one. If a caller waited for that
        /// many, they were taken at once, and the accumulator's own count is 0 again.
        count: u64,
    },
    /// The gradient was computed from the values of an earlier step, and was dropped.
    Stale {
        /// The accumulator's step, the earliest that a gradient may be computed from.
        current: GlobalStep,
    },
}

/// The result of a call of `take`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Taken<V> {
    /// The call.
    pub ticket: Ticket,
    /// The number of gradients: at least the number requested. A mean was divided by it.
    pub count: u64,
    /// The mean or sum of the gradients.
    pub value: V,
}

/// The reason why gradients cannot be taken. The caller is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TakeError {
    /// No gradients were requested; they have no mean.
    #[error("cannot take 0 gradients: at least 1 is needed")]
    Zero,
    /// The maximum number of callers wait, or were served and have not fetched their result.
    #[error("cannot wait for gradients: {waiters_max} callers wait or have not fetched theirs")]
    TooManyWaiters {
        /// The maximum: [`WAITERS_MAX`].
        waiters_max: usize,
    },
}

/// The step of an accumulator, the number of gradients in its sum, and the callers that wait for
/// them.
///
/// Invariants: the first waiter wants more gradients than there are; tickets wait and are served in
/// the order in which they were issued; at most [`WAITERS_MAX`] wait, or were served and not
/// fetched.
#[derive(Clone, Debug)]
pub(super) struct Takers<V> {
    step: GlobalStep,
    count: u64,
    next_ticket: u64,
    /// The waiting tickets, each with the number of gradients it waits for.
    waiting: VecDeque<(Ticket, u64)>,
    taken: VecDeque<Taken<V>>,
}

impl<V> Takers<V> {
    pub(super) fn new() -> Self {
        Takers {
            step: GlobalStep(0),
            count: 0,
            next_ticket: 1,
            waiting: VecDeque::new(),
            taken: VecDeque::new(),
        }
    }

    pub(super) fn step(&self) -> GlobalStep {
        self.step
    }

    pub(super) fn set_step(&mut self, step: GlobalStep) {
        self.step = step;
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the answer to a gradient of this step if it is stale.
    pub(super) fn stale(&self, local_step: GlobalStep) -> Option<Applied> {
        (local_step < self.step).then_some(Applied::Stale { current: self.step })
    }

    /// Counts a gradient that was added to the sum. `reduce` empties the sum of N gradients into a
    /// value; it is called only if a caller is served.
    pub(super) fn added(&mut self, reduce: impl FnOnce(u64) -> V) -> Applied {
        self.count += 1;
        let count = self.count;
        self.serve(reduce);
        Applied::Added { count }
    }

    pub(super) fn take(
        &mut self,
        gradients: u64,
        reduce: impl FnOnce(u64) -> V,
    ) -> Result<Ticket, TakeError> {
        if gradients == 0 {
            return Err(TakeError::Zero);
        }
        if self.waiting.len() + self.taken.len() >= WAITERS_MAX {
            return Err(TakeError::TooManyWaiters { waiters_max: WAITERS_MAX });
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.waiting.push_back((ticket, gradients));
        self.serve(reduce);
        Ok(ticket)
    }

    pub(super) fn cancel(&mut self, ticket: Ticket, reduce: impl FnOnce(u64) -> V) -> bool {
        let position = self.waiting.iter().position(|&(other, _)| other == ticket);
        if let Some(position) = position {
            self.waiting.remove(position);
            // It may have been the first in line, and the next may want fewer.
            self.serve(reduce);
        }
        position.is_some()
    }

    pub(super) fn poll_taken(&mut self) -> Option<Taken<V>> {
        self.taken.pop_front()
    }

    /// Serves the first waiter if there are enough gradients for it. None are left for a second.
    fn serve(&mut self, reduce: impl FnOnce(u64) -> V) {
        if let Some(&(ticket, gradients)) = self.waiting.front()
            && gradients <= self.count
        {
            self.waiting.pop_front();
            let count = std::mem::take(&mut self.count);
            // The step saturates at its largest value.
            self.step = GlobalStep(self.step.0.saturating_add(1));
            self.taken.push_back(Taken { ticket, count, value: reduce(count) });
        }
    }

    /// Asserts the invariants; for tests.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        assert!(self.waiting.front().is_none_or(|&(_, gradients)| gradients > self.count));
        assert!(self.waiting.len() + self.taken.len() <= WAITERS_MAX);
        let taken = self.taken.iter().map(|taken| taken.ticket);
        let tickets: Vec<Ticket> = taken.chain(self.waiting.iter().map(|w| w.0)).collect();
        assert!(tickets.is_sorted_by(|a, b| a < b), "tickets are in the order of issue");
    }
}
