//! Applies a push part by part as it arrives, before it is whole.

use std::ops::Range;

use pushpull_common::protocol::Refusal;
use pushpull_optim::volatile::Volatile;
use pushpull_store::change::NoFreeBlock;
use pushpull_store::store::{ChangeInput, Store};

use super::intake::whole_push::overflow_refusal;
use super::scan::{NonFiniteScan, ScanningInput};
use super::staleness::StalenessAdjustment;
use super::work::change_of;
use super::{Shard, VariablesState};

/// A push that is applied as its parts arrive.
#[derive(Debug)]
pub(super) struct StreamingApply {
    pub(super) push_slot: u32,
    /// The staleness adjustment computed at its first part.
    pub(super) adjustment: StalenessAdjustment,
}

impl Shard {
    /// Applies a part of a push on arrival, while it is in cache, and scans it in the same loop.
    /// Returns whether it was applied. `may_begin` is true for the first of several parts.
    ///
    /// If the part cannot be applied now, the inbox still has it, and the push is applied from
    /// there once it is whole.
    ///
    /// # Errors
    /// If the scan or the overflow check refuses the push.
    pub(super) fn apply_on_arrival(
        &mut self,
        push_slot: u32,
        range: &Range<u64>,
        may_begin: bool,
    ) -> Result<bool, Refusal> {
        if self.steps.follower.is_some() {
            // Gradients wait for their step, and other pushes are small.
            return Ok(false);
        }
        let has_indexed_rows =
            |store: &Store| store.layout().touched_by_index(range.clone()).next().is_some();
        let is_deferred = self
            .variables
            .fused_ranges
            .within(range.clone())
            .any(|fused_range| fused_range.is_deferred);
        if is_deferred || self.variables.store().is_some_and(has_indexed_rows) {
            // The row ids, or the sums of a two-pass rule, are known only once the push is whole.
            if self
                .applier
                .streaming
                .as_ref()
                .is_some_and(|streaming_apply| streaming_apply.push_slot == push_slot)
            {
                self.applier.abandon_streaming(&mut self.variables);
            }
            return Ok(false);
        }
        let can_begin =
            self.applier.streaming.is_none() && self.applier.jobs.is_empty() && may_begin;
        let begun = can_begin.then(|| self.adjustment_of(push_slot));
        let (Some(inbox), VariablesState::Ready(store)) =
            (&self.intake.inbox, &mut self.variables.state)
        else {
            return Ok(false);
        };
        if let Some(adjustment) = begun {
            store.discard();
            self.applier.streaming = Some(StreamingApply { push_slot, adjustment });
        }
        let Some(streaming_apply) = self
            .applier
            .streaming
            .as_ref()
            .filter(|streaming_apply| streaming_apply.push_slot == push_slot)
        else {
            return Ok(false);
        };
        let Some(push) = inbox.arrival(push_slot) else {
            return Ok(false);
        };
        let (adjustment, at) = (&streaming_apply.adjustment, streaming_apply.adjustment.at);
        let scan = NonFiniteScan { policy: self.config.non_finite, counters: &self.counters };
        let (rules, refuses) = (&self.variables.rules, self.config.refuses_overflows());
        let mut apply = || {
            store.can_change(std::iter::once(range.clone()))?;
            for fused_range in self.variables.fused_ranges.within(range.clone()) {
                let range = fused_range.part_of(range);
                let Some(bytes) = inbox.bytes(push_slot, range.clone()).filter(|b| !b.is_empty())
                else {
                    continue;
                };
                let change =
                    change_of(rules, push.operation, at, fused_range.partition(store.layout()));
                let (dtype, tile) = (fused_range.dtype, &mut self.applier.tile);
                let bytes = Volatile::of(bytes);
                let mut scanning = ScanningInput::new(bytes, range.start, dtype, Some(scan));
                adjustment.each(
                    store,
                    dtype,
                    range,
                    ChangeInput::Source(&mut scanning),
                    tile,
                    |store, range, input| store.change(change, range, input),
                )?;
                if let Some(found) = scanning.found() {
                    return Ok(Some(found.refusal(store.layout())));
                }
                if let Some(overflow) = store.overflow().filter(|_| refuses) {
                    self.counters.overflows_refused.add(1);
                    return Ok(Some(overflow_refusal(overflow)));
                }
            }
            Ok(None)
        };
        match apply() {
            Ok(None) => Ok(true),
            Ok(Some(refusal)) => {
                self.applier.abandon_streaming(&mut self.variables);
                Err(refusal)
            }
            Err(NoFreeBlock) => {
                self.applier.abandon_streaming(&mut self.variables);
                Ok(false)
            }
        }
    }
}
