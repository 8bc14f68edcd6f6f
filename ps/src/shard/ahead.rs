//! A step that is applied ahead of its decision.
//!
//! A gradient in a tray is looked at before it is held. If it is the last that its step waits for, and the others lie in
//! trays as well, the look is one with the mean and the rule: what all wait for is read once, and not twice. Nothing of
//! that is seen before the gradient is held and the step decided as usual; if that comes out as another step, or
//! something may be wrong with a gradient, it is forgotten, and everything takes its usual course.

use std::time::Instant;

use super::Shard;
use super::step_work::StepJob;
use super::work::Job;
use crate::aggregate::step_coordinator::PerPush;
use crate::optimizer::MEAN_GRADIENTS_MAX;

/// The step that a gradient completes, while that is looked at.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Whether it has been looked for.
    known: bool,
    step: Option<Step>,
}

/// A step that is being applied ahead, or has been.
#[derive(Debug)]
struct Step {
    job: StepJob,
    /// Which pushes it is made of, of all that came whole.
    orders: PerPush<u64>,
}

impl Ahead {
    /// Whether a step has been begun.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn has_begun(&self) -> bool {
        self.step.as_ref().is_some_and(|step| step.job.has_begun())
    }
}

impl Shard {
    /// A slice of the step that the gradient in this room completes, if there is one: whether it is done.
    /// None, too, where something may be wrong with it.
    pub(super) fn work_ahead(&mut self, push_slot: u32, ahead: &mut Ahead) -> Option<bool> {
        if !std::mem::replace(&mut ahead.known, true) {
            ahead.step = self.step_completed_by(push_slot).map(|push_slots| {
                let orders = self.orders_of(&push_slots);
                Step { job: StepJob::looking(push_slots), orders }
            });
        }
        let job = &mut ahead.step.as_mut()?.job;
        match self.work_on_step(job) {
            Ok(done) if !job.in_doubt => Some(done),
            // Or there is no memory for it, which is waited for with the step.
            _ => {
                ahead.step = None;
                self.forget_ahead();
                None
            }
        }
    }

    /// The rooms of the step that the gradient in this one completes, if they can be looked at as they are
    /// taken, by a change that can be forgotten.
    fn step_completed_by(&self, push_slot: u32) -> Option<PerPush<u32>> {
        if self.is_looked_at_first(push_slot) {
            return None;
        }
        let inbox = self.inbox.as_ref()?;
        let token = inbox.arrival(push_slot)?.token;
        let tokens = self.coordinator()?.completes(self.index_of(self.id)?, token.0)?;
        let push_slot_of = |&other: &u64| match other == token.0 {
            true => Some(push_slot),
            false => inbox.whole_push_slot_of(other),
        };
        let push_slots: PerPush<u32> = tokens.iter().map(push_slot_of).collect::<Option<_>>()?;
        let lies_there = |&push_slot: &u32| {
            inbox
                .arrival(push_slot)
                .is_some_and(|push| push.shared.ranges() == push.extents.ranges())
        };
        let few = push_slots.len() <= MEAN_GRADIENTS_MAX && push_slots.iter().all(lies_there);
        few.then_some(push_slots)
    }

    /// Which pushes lie in these rooms, of all that came whole.
    fn orders_of(&self, push_slots: &[u32]) -> PerPush<u64> {
        let order = |&push_slot| self.inbox.as_ref()?.arrival(push_slot).map(|push| push.order);
        push_slots.iter().filter_map(order).collect()
    }

    /// The gradient that was looked at is held, or dropped: if the step that was applied ahead is the one that
    /// is due now, it is done.
    pub(super) fn catch_up(&mut self, now: Instant, ahead: Ahead) {
        let Some(Step { job, orders }) = ahead.step else { return };
        // Behind what changes nothing.
        let next = self.jobs.iter().position(|job| !matches!(job, Job::Look(_) | Job::Norm(_)));
        match next.and_then(|next| self.jobs.get(next)) {
            Some(Job::Step(due))
                if due.is_same(&job) && self.orders_of(&due.push_slots) == orders =>
            {
                self.jobs.retain(|job| !matches!(job, Job::Step(_)));
                self.rows.leave();
                self.step_applied(now, &job.push_slots);
            }
            _ => self.forget_ahead(),
        }
    }

    /// Forgets what has been applied ahead.
    fn forget_ahead(&mut self) {
        self.rows.leave();
        self.discard_change();
    }
}
