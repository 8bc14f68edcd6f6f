//! The push that is applied as its parts come, before it is whole.

use std::ops::Range;

use super::staleness::Treatment;
use super::work::change_of;
use super::{Shard, Variables};
use crate::store::{NoSpareBlock, Store};

/// A push that is applied as its parts come.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) room: u32,
    /// Since its first part.
    pub(super) treatment: Treatment,
}

impl Shard {
    /// A part of a push has come: applies it while it is in cache, if nothing stands in the way.
    /// `may_begin` says that it is the first of several. Whatever comes between, the whole of the
    /// push lies in the inbox and can be applied from there.
    pub(super) fn apply_on_arrival(&mut self, room: u32, range: &Range<u64>, may_begin: bool) {
        if self.round.is_some() {
            // A gradient waits for its step; what else comes is small.
            return;
        }
        let numbers =
            |store: &Store| store.layout().touched_by_index(range.clone()).next().is_some();
        let waits = self.groups.within(range.clone()).any(|group| group.waits);
        if waits || self.store().is_some_and(numbers) {
            // Which rows they are, or what their sums are, is known once the push is whole.
            if self.draft.as_ref().is_some_and(|draft| draft.room == room) {
                self.give_draft_up();
            }
            return;
        }
        let free = self.draft.is_none() && self.jobs.is_empty() && may_begin;
        let begun = free.then(|| self.treatment_of(room));
        let (Some(inbox), Variables::Ready(store)) = (&self.inbox, &mut self.variables) else {
            return;
        };
        if let Some(treatment) = begun {
            store.discard();
            self.draft = Some(Draft { room, treatment });
        }
        let Some(draft) = self.draft.as_ref().filter(|draft| draft.room == room) else {
            return;
        };
        let Some(push) = inbox.arrival(room) else {
            return;
        };
        let (treatment, at) = (&draft.treatment, draft.treatment.at);
        let rules = &self.rules;
        let mut apply = || {
            store.can_change(std::iter::once(range.clone()))?;
            for group in self.groups.within(range.clone()) {
                let range = group.part_of(range);
                let Some(bytes) = inbox.bytes(room, range.clone()).filter(|b| !b.is_empty()) else {
                    continue;
                };
                let change = change_of(rules, push.operation, at, group.partition(store.layout()));
                let (dtype, tile) = (group.dtype, &mut self.tile);
                treatment.each(
                    store,
                    dtype,
                    range,
                    bytes.into(),
                    tile,
                    |store, range, input| store.change(change, range, input),
                )?;
            }
            Ok(())
        };
        if let Err(NoSpareBlock) = apply() {
            self.give_draft_up();
        }
    }

    pub(super) fn give_draft_up(&mut self) {
        self.draft = None;
        self.discard_change();
    }

    /// Forgets what a change has made that has not come to its end.
    pub(super) fn discard_change(&mut self) {
        if let Variables::Ready(store) = &mut self.variables {
            store.discard();
        }
    }

    /// Forgets the draft of a push that will not come whole.
    pub(super) fn drop_stale_draft(&mut self) {
        let Some(room) = self.draft.as_ref().map(|draft| draft.room) else { return };
        let stale = self.inbox.as_ref().is_none_or(|inbox| inbox.arrival(room).is_none());
        if stale {
            self.give_draft_up();
        }
    }
}
