//! Who waits for how many gradients of which step: what both accumulators have in common.

use std::collections::VecDeque;

use pushpull_common::ids::GlobalStep;
use thiserror::Error;

use super::WAITERS_MAX;

/// Names one call of `take` of one accumulator; never reused by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// What became of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Applied {
    /// It is part of the sum.
    Added {
        /// The gradients in the sum, this one included; if somebody waited for so many, they were
        /// taken at once, and the accumulator's own count is 0 again.
        count: u64,
    },
    /// It was computed from values of an earlier step, and was dropped.
    Stale {
        /// The accumulator's step: what the gradient should have been computed from.
        current: GlobalStep,
    },
}

/// What a call of `take` has got.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Taken<V> {
    /// Which call it was.
    pub ticket: Ticket,
    /// How many gradients there were: at least as many as were asked for, and what a mean was
    /// divided by.
    pub count: u64,
    /// Their mean or sum.
    pub value: V,
}

/// Why gradients cannot be taken. The caller's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TakeError {
    /// The mean of no gradients is nothing.
    #[error("cannot take 0 gradients: at least 1 is needed")]
    Zero,
    /// As many calls as there may be wait, or have got what nobody has polled.
    #[error("cannot wait for gradients: {waiters_max} callers wait or have not fetched theirs")]
    TooManyWaiters {
        /// How many there may be: [`WAITERS_MAX`].
        waiters_max: usize,
    },
}

/// The step of an accumulator, the number of gradients in its sum, and who waits for them.
///
/// Invariants: the first waiter wants more gradients than there are; tickets wait and are served in
/// the order in which they were given out; at most [`WAITERS_MAX`] wait or have been served.
#[derive(Clone, Debug)]
pub(super) struct Takers<V> {
    step: GlobalStep,
    count: u64,
    next_ticket: u64,
    /// The tickets, each with how many gradients it waits for.
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

    /// What a gradient of this step meets, if it is too late.
    pub(super) fn stale(&self, local_step: GlobalStep) -> Option<Applied> {
        (local_step < self.step).then_some(Applied::Stale { current: self.step })
    }

    /// A gradient was added to the sum. `reduce` empties the sum of so many into a value; it is
    /// called if somebody has waited for them.
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
        let place = self.waiting.iter().position(|&(other, _)| other == ticket);
        if let Some(place) = place {
            self.waiting.remove(place);
            // It may have been the first, and the next may want fewer.
            self.serve(reduce);
        }
        place.is_some()
    }

    pub(super) fn poll_taken(&mut self) -> Option<Taken<V>> {
        self.taken.pop_front()
    }

    /// Serves the first waiter if there is enough for it. Nothing is left for a second.
    fn serve(&mut self, reduce: impl FnOnce(u64) -> V) {
        if let Some(&(ticket, gradients)) = self.waiting.front()
            && gradients <= self.count
        {
            self.waiting.pop_front();
            let count = std::mem::take(&mut self.count);
            // A step that was set to the last there is stays there.
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
        assert!(tickets.is_sorted_by(|a, b| a < b), "served in their order");
    }
}
