//! Applies a push part by part as it arrives, before it is whole.

use std::ops::Range;

use pushpull_common::protocol::Refusal;
use pushpull_store::change::NoFreeBlock;
use pushpull_store::store::Store;

use super::applier::Applier;
use super::intake::Intake;
use super::pulls::Pulls;
use super::push_job::PushInput;
use super::staleness::StalenessAdjustment;
use super::steps::Steps;
use super::update::{DenseInput, Update, UpdateProgress, UpdateTarget};
use super::variables::Variables;

/// A push that is applied as its parts arrive.
#[derive(Debug)]
pub(super) struct StreamingApply {
    pub(super) push_slot: u32,
    /// The update. Its staleness adjustment is decided at the first part.
    pub(super) update: Update,
}

/// A part of a push that has just arrived in its slot.
pub(super) struct ArrivedPart<'a> {
    pub(super) push_slot: u32,
    pub(super) range: &'a Range<u64>,
    /// Whether it may be the first of a push that is applied as it arrives.
    pub(super) may_begin: bool,
}

impl Applier {
    /// Applies a part of a push on arrival, while it is in cache. Returns whether it was applied.
    ///
    /// If the part cannot be applied now, the inbox still has it, and the push is applied from
    /// there once it is whole.
    ///
    /// # Errors
    /// If the scan or the overflow check refuses the push.
    pub(super) fn apply_on_arrival(
        &mut self,
        intake: &Intake,
        variables: &mut Variables,
        steps: &Steps,
        pulls: &Pulls,
        part: ArrivedPart<'_>,
    ) -> Result<bool, Refusal> {
        let ArrivedPart { push_slot, range, may_begin } = part;
        let (Some(inbox), true) = (&intake.inbox, variables.is_ready()) else { return Ok(false) };
        if steps.is_synchronous() {
            // Gradients wait for their step, and other pushes are small.
            return Ok(false);
        }
        let is_current = |streaming: &StreamingApply| streaming.push_slot == push_slot;
        if variables.defers(range) {
            // The row ids, or the sums of a two-pass rule, are known only once the push is whole.
            if self.streaming.as_ref().is_some_and(is_current) {
                self.abandon_streaming(variables);
            }
            return Ok(false);
        }
        if may_begin && self.streaming.is_none() && self.jobs.is_empty() {
            let (owner, last_pulls) = (steps.asynchronous_tokens(), &pulls.last_pulls);
            let adjustment =
                StalenessAdjustment::of(push_slot, inbox, variables, owner, last_pulls);
            variables.discard_change();
            let update = Update::new(adjustment);
            self.streaming = Some(StreamingApply { push_slot, update });
        }
        let streaming = self.streaming.as_mut().filter(|streaming| is_current(streaming));
        let (Some(StreamingApply { update, .. }), Some(push), Some(source)) =
            (streaming, inbox.arrival(push_slot), inbox.source(push_slot))
        else {
            return Ok(false);
        };
        let (operation, at, scratch) = (push.operation, update.adjustment.at, &mut self.scratch);
        let input = PushInput { source, scans_own: true, scans_shared: true };
        let Some(mut target) = UpdateTarget::new(variables, operation, at, scratch) else {
            return Ok(false);
        };
        match update.apply_part(&mut target, DenseInput::Push(&input), range) {
            Ok(UpdateProgress::Done) => Ok(true),
            Ok(UpdateProgress::Unfinished) => Ok(false),
            Ok(UpdateProgress::Refused(refusal)) => {
                self.abandon_streaming(variables);
                Err(refusal)
            }
            Err(NoFreeBlock) => {
                self.abandon_streaming(variables);
                Ok(false)
            }
        }
    }

    fn abandon_streaming(&mut self, variables: &mut Variables) {
        self.streaming = None;
        variables.discard_change();
    }

    /// Discards the change of a push that was dropped before it was whole.
    pub(super) fn drop_stale_streaming(&mut self, intake: &Intake, variables: &mut Variables) {
        let Some(StreamingApply { push_slot, .. }) = self.streaming else { return };
        let inbox = intake.inbox.as_ref();
        if inbox.is_none_or(|inbox| inbox.arrival(push_slot).is_none()) {
            self.abandon_streaming(variables);
        }
    }
}

impl Variables {
    /// Returns whether a range is changed only once its push is whole: it has rows, or its rule
    /// needs sums over whole variables.
    fn defers(&self, range: &Range<u64>) -> bool {
        let has_index =
            |store: &Store| store.layout().touched_by_index(range.clone()).next().is_some();
        self.fused_ranges.within(range.clone()).any(|fused_range| fused_range.is_deferred)
            || self.store().is_some_and(has_index)
    }
}
