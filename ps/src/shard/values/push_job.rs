//! The update by one push, part by part as it arrives or by a job once it is whole in the inbox.

use std::ops::Range;

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::Refusal;
use pushpull_store::change::{NoFreeBlock, Stalled};
use pushpull_store::commit::Journal;

use super::dense_input::DenseInput;
use super::staleness::StalenessAdjustment;
use super::update::{Update, UpdateMemory, UpdateProgress};
use super::update_target::{Scratch, UpdatePushes, UpdateTarget};
use super::variables::Variables;
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::inbox::Inbox;

/// A push that is applied as its parts arrive.
#[derive(Debug)]
pub(in crate::shard) struct StreamingApply {
    pub(super) push_slot: u32,
    /// The update. Its staleness adjustment is decided at the first part.
    update: Update,
}

/// A part of a push that has just arrived in its slot.
pub(in crate::shard) struct ArrivedPart<'a> {
    pub(in crate::shard) push_slot: u32,
    pub(in crate::shard) range: &'a Range<u64>,
    /// Whether it may be the first of a push that is applied as it arrives.
    pub(in crate::shard) may_begin: bool,
}

/// A push that is whole in the inbox and is being applied.
#[derive(Debug)]
pub(in crate::shard) struct PushJob {
    pub(in crate::shard) push_slot: u32,
    update: Update,
    /// Whether a [`ScanJob`](super::scan::ScanJob) has scanned its ranges in a push buffer.
    /// Otherwise they are scanned as they are applied.
    is_scanned: bool,
    /// Why the push is refused, if it is.
    pub(in crate::shard) refusal: Option<Refusal>,
}

impl StreamingApply {
    /// Begins with the push in this slot.
    pub(super) fn begin(
        push_slot: u32,
        inbox: &Inbox,
        variables: &mut Variables,
        tokens: Option<&AsynchronousTokens>,
    ) -> StreamingApply {
        let adjustment = StalenessAdjustment::of(push_slot, inbox, variables, tokens);
        variables.discard_change();
        StreamingApply { push_slot, update: Update::new(adjustment) }
    }

    /// Applies a part, while it is in cache. Returns how far it came; `None` if there are no values
    /// to change or no block to change them in.
    pub(super) fn apply(
        &mut self,
        inbox: &Inbox,
        variables: &mut Variables,
        scratch: &mut Scratch,
        range: &Range<u64>,
    ) -> Option<Result<UpdateProgress, NoFreeBlock>> {
        let push = inbox.arrival(self.push_slot)?;
        let source = inbox.source(self.push_slot)?;
        let input = DenseInput::Push { source, scans_own: true, scans_shared: true };
        let at = self.update.adjustment.at;
        let mut target = UpdateTarget::new(variables, push.operation, at, scratch)?;
        Some(self.update.apply_part(&mut target, input, range))
    }
}

impl PushJob {
    /// Creates the job for the push in this slot.
    pub(in crate::shard) fn new(push_slot: u32, is_scanned: bool) -> PushJob {
        PushJob { push_slot, update: Update::default(), is_scanned, refusal: None }
    }

    /// Returns whether the job has begun to change values.
    pub(in crate::shard) fn has_begun(&self) -> bool {
        self.update.has_begun()
    }

    /// Returns the count and the rate of the update.
    pub(in crate::shard) fn adjustment(&self) -> &StalenessAdjustment {
        &self.update.adjustment
    }

    /// The push was applied as it arrived, and nothing was committed since.
    pub(super) fn was_applied(&mut self, streaming: StreamingApply) {
        self.update = streaming.update;
    }

    /// Applies a slice; returns whether the job is done. `made_step` returns the step at which a
    /// push is applied that names another.
    pub(super) fn slice(
        &mut self,
        memory: &mut UpdateMemory,
        inbox: &Inbox,
        variables: &mut Variables,
        tokens: Option<&AsynchronousTokens>,
        made_step: impl Fn(&Variables, GlobalStep) -> GlobalStep,
        journal: &mut Journal,
    ) -> Result<bool, Stalled> {
        let push_slot = self.push_slot;
        let (Some(push), Some(source)) = (inbox.arrival(push_slot), inbox.source(push_slot)) else {
            return Ok(true);
        };
        let operation = push.operation;
        let push_slots = &[push_slot][..];
        let pushes = UpdatePushes { inbox, push_slots, factors: &[], operation };
        if !self.has_begun() {
            let step = made_step(variables, push.step).0;
            let adjustment = StalenessAdjustment::of(push_slot, inbox, variables, tokens);
            let rows = &mut memory.rows;
            self.update.begin(rows, variables, journal, pushes, adjustment, step)?;
        }
        // Parts that were sent were scanned on arrival.
        let scans_own = false;
        let scans_shared = !self.is_scanned;
        let input = DenseInput::Push { source, scans_own, scans_shared };
        match self.update.slice(memory, variables, pushes, input)? {
            UpdateProgress::Unfinished => return Ok(false),
            UpdateProgress::Done => {}
            UpdateProgress::Refused(refusal) => self.refusal = Some(refusal),
        }
        Ok(true)
    }
}
