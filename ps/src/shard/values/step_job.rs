//! [`StepJob`]: the job that applies a synchronous step.

use pushpull_common::protocol::message::Operation;
use pushpull_optim::optimizer::ApplyAt;
use pushpull_store::change::Stalled;
use pushpull_store::commit::Journal;
use pushpull_store::planted::Bug;

use super::dense_input::{DenseInput, StepShare};
use super::staleness::StalenessAdjustment;
use super::update::{Update, UpdateMemory, UpdateProgress};
use super::update_target::UpdatePushes;
use super::variables::Variables;
use crate::aggregate::current_step::PerPush;
use crate::inbox::Inbox;

/// A synchronous step that is being applied: the mean of its gradients, summed in order of
/// admission, is one gradient. A variable's mean is over the gradients that contain it.
#[derive(Debug)]
pub(in crate::shard) struct StepJob {
    /// The slots of its pushes, in order of admission, and the factors of their gradients.
    pub(in crate::shard) push_slots: PerPush<u32>,
    factors: PerPush<f64>,
    /// The steps that the shard has applied before.
    step: u64,
    update: Update,
}

impl StepJob {
    /// Creates the job for the pushes in these slots, in this order, each times its factor, on a
    /// shard that has applied `step` steps.
    pub(in crate::shard) fn new(
        push_slots: PerPush<u32>,
        factors: PerPush<f64>,
        step: u64,
    ) -> StepJob {
        StepJob { push_slots, factors, step, update: Update::default() }
    }

    /// Returns whether the job has begun.
    pub(in crate::shard) fn has_begun(&self) -> bool {
        self.update.has_begun()
    }

    /// Applies a slice; returns whether the step is applied.
    pub(super) fn slice(
        &mut self,
        memory: &mut UpdateMemory,
        inbox: &Inbox,
        variables: &mut Variables,
        journal: &mut Journal,
    ) -> Result<bool, Stalled> {
        if !variables.is_ready() {
            return Ok(true);
        }
        let push_slots = &self.push_slots[..];
        let factors = &self.factors[..];
        let operation = Operation::Gradient {};
        let update = UpdatePushes { inbox, push_slots, factors, operation };
        if !self.update.has_begun() {
            let step = self.step;
            let at = ApplyAt::new(variables.gradients + 1, step);
            let adjustment = StalenessAdjustment::none(at);
            self.update.begin(&mut memory.rows, variables, journal, update, adjustment, step)?;
        }
        let config = &variables.config;
        let total = config.rule().filter(|_| config.planted.has(Bug::MeanOfAll));
        let planted_divisor = total.map(|rule| rule.aggregate);
        let pushes = StepShare::of(update);
        let input = DenseInput::Step { pushes: &pushes, planted_divisor };
        let progress = self.update.slice(memory, variables, update, input)?;
        // A step is never refused: overflows are refused only in asynchronous mode.
        Ok(!matches!(progress, UpdateProgress::Unfinished))
    }
}
