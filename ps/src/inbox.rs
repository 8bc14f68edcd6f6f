//! The inbox of a shard: push slots, the parts received in them, and whole pushes.
//!
//! A push slot has space for one whole push: a copy of the shard's layout, followed by the row
//! numbers of sparse partitions. A client needs a slot before it sends a body byte, so incomplete
//! pushes cannot fill the inbox. A slot that its client does not use is reclaimed when another
//! client waits. Most slots have memory only while they are used (`slot_memory`). Clients on the same
//! host may also have slots in a push buffer, which they write directly (`push_buffers`).

mod push_buffers;
mod push_slot;
mod rows;
mod slot_memory;
mod words;

use std::ops::Range;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::ids::{Sequence, TokenId};
use pushpull_common::protocol::message::Operation;

use crate::client_key::ClientKey;
use push_buffers::PushBuffer;
use push_slot::PushSlot;
pub(crate) use push_slot::{
    Extents, PendingAnswer, PushArrival, PushSource, PushValues, is_for_trainable,
};
pub(crate) use rows::PushedRows;
pub(crate) use slot_memory::{SlotMemory, SlotSizes};
pub(crate) use words::{WholeSlot, map_words, whole_slots};

/// The push slots of a shard.
///
/// Invariants: slot numbers are unique and never 0. A slot with a whole push is neither reclaimed
/// nor reassigned before it is released. A slot has memory if it is requested or has a push, or at
/// least pages if that is the whole push of an earlier process; one that was offered may lose it.
#[derive(Debug)]
pub(crate) struct Inbox {
    memory: SlotMemory,
    push_slots: Vec<Option<PushSlot>>,
    /// The size of a slot in a push buffer, in bytes.
    buffer_stride: usize,
    push_buffers: Vec<PushBuffer>,
    next_number: u32,
    /// Whole pushes are numbered, so that they are applied in the order of arrival after a restart
    /// too.
    next_order: u64,
}

impl Inbox {
    /// Returns the memory for `push_slots` slots, each for a push of the whole layout, in bytes.
    pub(crate) fn need(layout: &ShardLayout, push_slots: usize) -> u64 {
        // Slots are page-aligned.
        layout.push_bytes().next_multiple_of(4096).saturating_mul(push_slots as u64)
    }

    /// Returns the size of the inbox file after its first page, in bytes.
    pub(crate) fn file_bytes(layout: &ShardLayout, push_slots: usize) -> u64 {
        Inbox::need(layout, push_slots)
    }

    /// Creates an empty inbox. Slot numbers start at `next_number`: an inbox that replaces another
    /// does not repeat its numbers.
    pub(crate) fn new(
        memory: SlotMemory,
        layout: &ShardLayout,
        push_slots: usize,
        next_number: u32,
    ) -> Inbox {
        let buffer_stride = layout.bytes().next_multiple_of(4096) as usize;
        let push_slots = (0..push_slots).map(|_| None).collect();
        let push_buffers = Vec::new();
        let next_order = 1;
        Inbox { memory, push_slots, buffer_stride, push_buffers, next_number, next_order }
    }

    /// Returns a free slot with memory for a client that requests one, if there is one. The slot is
    /// reserved long enough for the client to begin its push. Otherwise clients that request slots
    /// in turn would take them from each other forever.
    pub(crate) fn reserve(&mut self, holder: ClientKey, now: Instant) -> Option<u32> {
        self.slot_for(holder, true, now)
    }

    /// Returns a free slot with memory for a client that has not requested one. It may lose the slot
    /// to a client that does.
    pub(crate) fn offer(&mut self, holder: ClientKey, now: Instant) -> Option<u32> {
        self.slot_for(holder, false, now)
    }

    fn slot_for(&mut self, holder: ClientKey, requested: bool, now: Instant) -> Option<u32> {
        let is_unused =
            |push_slot: &PushSlot| push_slot.holder == Some(holder) && push_slot.arrival.is_none();
        for (slot, push_slot) in self.push_slots.iter_mut().enumerate() {
            // The client has forgotten the slot, for example after a reconnect. It never gets a
            // second unused one.
            let Some(found) = push_slot.as_mut().filter(|it| is_unused(it)) else { continue };
            if !self.memory.has(slot) {
                *push_slot = None;
                continue;
            }
            if requested && !found.requested {
                found.requested = true;
                found.last_progress = now;
            }
            return Some(found.number);
        }
        let slot = self.free_slot()?;
        self.memory.used(slot);
        let number = self.next_number;
        let holder = Some(holder);
        self.push_slots[slot] =
            Some(PushSlot { number, holder, requested, last_progress: now, arrival: None });
        self.skip_taken_numbers();
        Some(number)
    }

    /// Makes the unused slot that a client has requested one that it was offered.
    pub(crate) fn offer_unused(&mut self, holder: ClientKey) {
        for push_slot in self.push_slots.iter_mut().flatten() {
            if push_slot.holder == Some(holder) && push_slot.arrival.is_none() {
                push_slot.requested = false;
            }
        }
    }

    /// Frees a slot for a client that waits for one: a slot that gets memory now, or else one that
    /// was offered and is unused. Returns false if no slot with memory is free afterwards.
    pub(crate) fn free_up(&mut self, now: Instant) -> bool {
        self.has_free() || self.allocate_slot(now) || self.reclaim_offered()
    }

    /// Gives memory to a free slot that has none, or else to one that was offered and has lost its
    /// memory. Returns false if there is no such slot, or no memory for it.
    fn allocate_slot(&mut self, now: Instant) -> bool {
        let offered = self.oldest_offered(false);
        let Inbox { memory, push_slots, .. } = self;
        // The budget may have too little for one, and a later one its bytes still, because it has
        // not given back all its pages.
        let mut free = (0..push_slots.len()).filter(|&slot| push_slots[slot].is_none());
        let allocated = free
            .find(|&slot| memory.allocate(slot, now))
            .or_else(|| offered.filter(|&slot| memory.allocate(slot, now)));
        allocated.map(|slot| push_slots[slot] = None).is_some()
    }

    /// Gives memory to a slot that was offered and has lost its memory since. Returns false if there
    /// is none for it.
    pub(crate) fn ensure_memory(&mut self, number: u32, now: Instant) -> bool {
        self.slot(number)
            .is_none_or(|slot| self.memory.has(slot) || self.memory.allocate(slot, now))
    }

    /// Takes back the memory of slots that nobody has used for a time. A slot that was offered stays
    /// so.
    pub(crate) fn take_back_memory(&mut self, now: Instant) {
        let mut allowed = slot_memory::BYTES_AT_ONCE;
        for (slot, push_slot) in self.push_slots.iter().enumerate() {
            match push_slot {
                Some(used) if used.requested || used.arrival.is_some() => self.memory.used(slot),
                _ => allowed = self.memory.take_back_unused(slot, now, allowed),
            }
        }
    }

    /// Brings the memory of an inbox that an earlier process left in line with its whole pushes.
    pub(crate) fn settle_memory(&mut self) -> std::io::Result<()> {
        self.memory.settle()
    }

    /// Returns the bytes that slots have taken off the budget for a time.
    pub(crate) fn on_demand_bytes(&self) -> u64 {
        self.memory.on_demand_bytes()
    }

    /// Returns whether [`Inbox::take_back_memory`] may take any back.
    pub(crate) fn has_reclaimable_memory(&self) -> bool {
        self.memory.has_reclaimable()
    }

    /// Reclaims the offered slot with memory that has been unused for longest. Returns false if
    /// there is none.
    fn reclaim_offered(&mut self) -> bool {
        let oldest = self.oldest_offered(true);
        oldest.map(|slot| self.push_slots[slot] = None).is_some()
    }

    /// Returns the offered slot, with or without memory, that has been unused for longest.
    fn oldest_offered(&self, with_memory: bool) -> Option<usize> {
        let unused = self.push_slots.iter().enumerate().filter_map(|(slot, push_slot)| {
            let offered = push_slot
                .as_ref()
                .filter(|push_slot| push_slot.arrival.is_none() && !push_slot.requested);
            offered.map(|push_slot| (push_slot.last_progress, slot))
        });
        let unused = unused.filter(|&(_, slot)| self.memory.has(slot) == with_memory);
        unused.min().map(|(_, slot)| slot)
    }

    /// Returns whether a slot is requested, or has a push that is not whole.
    pub(crate) fn holds_any(&self) -> bool {
        let is_open = |slot: &PushSlot| match &slot.arrival {
            None => slot.requested,
            Some(push) => push.whole.is_none(),
        };
        self.push_slots.iter().flatten().any(is_open)
    }

    /// Reclaims every slot whose push has made no progress for `limit`. A requested slot that is
    /// unused for that long becomes reclaimable. Returns the number of dropped pushes, and whether
    /// any slot has changed.
    pub(crate) fn reclaim_stalled(&mut self, now: Instant, limit: Duration) -> (usize, bool) {
        let mut count = 0;
        let mut has_changed = false;
        for slot in &mut self.push_slots {
            let Some(push_slot) = slot else { continue };
            if now.saturating_duration_since(push_slot.last_progress) < limit {
                continue;
            }
            match &push_slot.arrival {
                None => has_changed |= std::mem::take(&mut push_slot.requested),
                Some(push) if push.whole.is_some() => {}
                Some(_) => {
                    *slot = None;
                    count += 1;
                }
            }
        }
        (count, has_changed || count > 0)
    }

    /// Extends all deadlines by a pause of this server, during which no client could make progress.
    pub(crate) fn extend_deadlines(&mut self, pause: Duration, now: Instant) {
        for push_slot in self.all_mut() {
            push_slot.last_progress = (push_slot.last_progress + pause).min(now);
        }
    }

    /// Discards the incomplete pushes of a client whose connection has closed, and returns their
    /// number. Its slots remain, but are reclaimable.
    pub(crate) fn discard_incomplete(&mut self, holder: ClientKey) -> usize {
        let mut count = 0;
        for push_slot in self.all_mut() {
            if push_slot.is_unfinished(holder) {
                count += usize::from(push_slot.arrival.take().is_some());
                push_slot.requested = false;
            }
        }
        self.end_push_buffer(holder);
        count
    }

    /// Drops every slot of a client except those with a whole push. A whole push belongs to the
    /// server.
    pub(crate) fn drop_client(&mut self, holder: ClientKey) {
        for slot in &mut self.push_slots {
            slot.take_if(|push_slot| push_slot.is_unfinished(holder));
        }
        self.end_push_buffer(holder);
    }

    /// Detaches the whole pushes of a client. They belong to an older incarnation, and the newer
    /// one numbers its pushes from 1.
    pub(crate) fn orphan_whole(&mut self, holder: ClientKey) {
        for push_slot in self.all_mut() {
            if push_slot.is_whole() && push_slot.holder == Some(holder) {
                push_slot.holder = None;
            }
        }
    }

    /// Yields the tokens that whole pushes will spend.
    pub(crate) fn whole_tokens(&self) -> impl Iterator<Item = TokenId> {
        self.gradients().filter(|(_, push)| push.whole.is_some()).map(|(_, push)| push.token)
    }

    /// Returns the number of slots, without those in push buffers.
    pub(crate) fn push_slots(&self) -> usize {
        self.push_slots.len()
    }

    /// Continues the slot numbers at `number`, skipping numbers in use.
    pub(crate) fn number_from(&mut self, number: u32) {
        self.next_number = number;
        self.skip_taken_numbers();
    }

    fn skip_taken_numbers(&mut self) {
        while self.next_number == 0 || self.push_slot(self.next_number).is_some() {
            self.next_number = self.next_number.wrapping_add(1);
        }
    }

    /// Returns the number of the next slot.
    pub(crate) fn next_number(&self) -> u32 {
        self.next_number
    }

    /// Returns whether a slot with memory is free.
    pub(crate) fn has_free(&self) -> bool {
        self.free_slot().is_some()
    }

    /// Returns the number of slots that have no memory.
    pub(crate) fn without_memory(&self) -> usize {
        (0..self.push_slots.len()).filter(|&slot| !self.memory.has(slot)).count()
    }

    fn free_slot(&self) -> Option<usize> {
        let is_free = |&slot: &usize| self.push_slots[slot].is_none() && self.memory.has(slot);
        (0..self.push_slots.len()).find(is_free)
    }

    /// Removes a whole push and releases its slot. Returns the push, without its shared ranges, and
    /// its client.
    pub(crate) fn take(&mut self, number: u32) -> Option<(Option<ClientKey>, PushArrival)> {
        let push_slot = self.push_slot_mut(number)?;
        let holder = push_slot.holder;
        let arrival = push_slot.arrival.take();
        self.release(number);
        Some((holder, PushArrival { shared: Extents::default(), ..arrival? }))
    }

    /// Returns whether the client has this slot.
    pub(crate) fn holds(&self, holder: ClientKey, number: u32) -> bool {
        self.push_slot(number).is_some_and(|push_slot| push_slot.holder == Some(holder))
    }

    /// Returns the slot in which this push is received or whole.
    pub(crate) fn find(&self, holder: ClientKey, sequence: Sequence) -> Option<u32> {
        let matches = |push_slot: &&PushSlot| {
            push_slot.holder == Some(holder)
                && push_slot.arrival.as_ref().is_some_and(|push| push.sequence == sequence)
        };
        self.all().find(matches).map(|push_slot| push_slot.number)
    }

    /// Yields the slots with whole pushes.
    pub(crate) fn whole_slots(&self) -> impl Iterator<Item = u32> {
        self.all().filter(|push_slot| push_slot.is_whole()).map(|push_slot| push_slot.number)
    }

    /// Returns the client that has a slot.
    pub(crate) fn holder(&self, number: u32) -> Option<ClientKey> {
        self.push_slot(number)?.holder
    }

    /// Returns the slot with the whole gradient of this token.
    pub(crate) fn whole_push_slot_of(&self, token: u64) -> Option<u32> {
        let is_it = |push: &PushArrival| push.token.0 == token && push.whole.is_some();
        self.gradients().find(|(_, push)| is_it(push)).map(|(push_slot, _)| push_slot)
    }

    /// Returns the slots whose pushes claim to be the gradient of this token, whole or not.
    pub(crate) fn push_slots_of(&self, token: u64) -> Vec<u32> {
        self.gradients()
            .filter(|(_, push)| push.token.0 == token)
            .map(|(push_slot, _)| push_slot)
            .collect()
    }

    /// Returns the slots of gradients that were computed before this step began.
    pub(crate) fn gradients_before(&self, step: u64) -> Vec<u32> {
        self.gradients()
            .filter(|(_, push)| push.step.0 < step)
            .map(|(push_slot, _)| push_slot)
            .collect()
    }

    /// Ends the waits for whole gradients whose deadline has passed, or for all of them if `all` is
    /// set. Returns the slots and the answers that were pending.
    pub(crate) fn take_waits(&mut self, now: Instant, all: bool) -> Vec<(u32, PendingAnswer)> {
        let mut ended = Vec::new();
        for push_slot in self.all_mut() {
            let Some(push) = &mut push_slot.arrival else { continue };
            let gradient = matches!(push.operation, Operation::Gradient {});
            let due = |whole: &PendingAnswer| {
                let expired = whole.deadline.is_some_and(|deadline| deadline <= now);
                gradient && whole.connection != 0 && (expired || all)
            };
            if let Some(whole) = push.whole.filter(due) {
                push.whole = Some(PendingAnswer::unawaited());
                ended.push((push_slot.number, whole));
            }
        }
        ended
    }

    /// Returns since when the first client has waited for the outcome of a whole gradient.
    pub(crate) fn oldest_wait(&self) -> Option<Instant> {
        let answers = self.gradients().filter_map(|(_, push)| push.whole);
        answers.filter(|whole| whole.connection != 0).filter_map(|whole| whole.since).min()
    }

    fn gradients(&self) -> impl Iterator<Item = (u32, &PushArrival)> {
        self.all().filter_map(|push_slot| Some((push_slot.number, push_slot.gradient()?)))
    }

    /// Returns the push in a slot.
    pub(crate) fn arrival(&self, number: u32) -> Option<&PushArrival> {
        self.push_slot(number)?.arrival.as_ref()
    }

    /// Yields all pushes with their slots.
    #[cfg(test)]
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = (u32, &PushArrival)> {
        self.all().filter_map(|push_slot| Some((push_slot.number, push_slot.arrival.as_ref()?)))
    }

    /// Records the sum of the squares of the gradient in a slot. Returns the token that it spends.
    pub(crate) fn set_squares(&mut self, number: u32, squares: f64) -> Option<TokenId> {
        let push = self.push_slot_mut(number)?.arrival.as_mut()?;
        push.squares = Some(squares);
        Some(push.token)
    }

    /// Begins to receive a push into a slot.
    pub(crate) fn begin(&mut self, number: u32, arrival: PushArrival, now: Instant) {
        if let Some(slot) = self.slot(number) {
            self.memory.used(slot);
        }
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.arrival = Some(arrival);
            push_slot.last_progress = now;
        }
    }

    /// Records that a part has been received completely.
    pub(crate) fn add(&mut self, number: u32, part: Range<u64>, now: Instant) {
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.last_progress = now;
            if let Some(arrival) = &mut push_slot.arrival {
                arrival.bytes += part.end - part.start;
                arrival.extents.add(part);
            }
        }
    }

    /// Records that bytes of a part have been received.
    pub(crate) fn touch(&mut self, number: u32, now: Instant) {
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.last_progress = now;
        }
    }

    /// Records that the push in this slot is whole.
    pub(crate) fn set_whole(&mut self, number: u32, whole: PendingAnswer) {
        let order = self.next_order;
        if let Some(arrival) =
            self.push_slot_mut(number).and_then(|push_slot| push_slot.arrival.as_mut())
        {
            arrival.whole = Some(whole);
            if arrival.order == 0 {
                arrival.order = order;
                self.next_order += 1;
            }
        }
    }

    /// Releases a slot. A slot in a push buffer stays its client's.
    pub(crate) fn release(&mut self, number: u32) {
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.arrival = None;
        }
        self.release_shared(number);
        for slot in &mut self.push_slots {
            if slot.as_ref().is_some_and(|push_slot| push_slot.number == number) {
                *slot = None;
            }
        }
    }

    /// Returns the bytes of a range of the push in a slot. No part of the range may be in a push
    /// buffer.
    pub(crate) fn bytes(&self, number: u32, range: Range<u64>) -> Option<&[u8]> {
        if let Some(push_slot) = self.buffer_slot(number) {
            return push_slot.own_bytes()?.get(range.start as usize..range.end as usize);
        }
        self.memory.bytes().get(self.memory_range(number, &range)?)
    }

    /// Returns the memory that the values of a push are read from.
    pub(crate) fn source(&self, number: u32) -> Option<PushSource<'_>> {
        let mut buffers = self.push_buffers.iter();
        match buffers.find_map(|buffer| Some((buffer, buffer.position(number)?))) {
            Some((buffer, index)) => buffer.source(index, self.buffer_stride),
            None => Some(PushSource::own(self.bytes(number, 0..self.memory.stride() as u64)?)),
        }
    }

    /// Returns the memory of a range of the push in a slot, to receive into.
    pub(crate) fn bytes_mut(&mut self, number: u32, range: Range<u64>) -> Option<&mut [u8]> {
        if self.buffer_slot(number).is_some() {
            let own = self.buffer_slot_mut(number)?.own_bytes_mut()?;
            return own.get_mut(range.start as usize..range.end as usize);
        }
        let within = self.memory_range(number, &range)?;
        self.memory.bytes_mut().get_mut(within)
    }

    /// Returns the position of a slot's range in the memory, if the range is inside the slot.
    fn memory_range(&self, number: u32, range: &Range<u64>) -> Option<Range<usize>> {
        let of_slot = self.memory.range(self.slot(number)?);
        let at = |offset: u64| usize::try_from(offset).ok().filter(|&at| at <= of_slot.len());
        Some(of_slot.start + at(range.start)?..of_slot.start + at(range.end)?)
    }

    fn slot(&self, number: u32) -> Option<usize> {
        self.push_slots
            .iter()
            .position(|push_slot| push_slot.as_ref().is_some_and(|r| r.number == number))
    }

    fn push_slot(&self, number: u32) -> Option<&PushSlot> {
        self.all().find(|push_slot| push_slot.number == number)
    }

    fn push_slot_mut(&mut self, number: u32) -> Option<&mut PushSlot> {
        self.all_mut().find(|push_slot| push_slot.number == number)
    }

    /// Yields all slots, those in push buffers last.
    fn all(&self) -> impl Iterator<Item = &PushSlot> {
        self.push_slots
            .iter()
            .flatten()
            .chain(self.push_buffers.iter().flat_map(PushBuffer::push_slots))
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut PushSlot> {
        self.push_slots
            .iter_mut()
            .flatten()
            .chain(self.push_buffers.iter_mut().flat_map(PushBuffer::push_slots_mut))
    }

    /// Asserts the invariants; for tests, the simulator and the fuzzer.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn check_invariants(&self) {
        let mut numbers = std::collections::BTreeSet::new();
        let mut pushes = std::collections::BTreeSet::new();
        self.check_push_buffers();
        for (slot, push_slot) in self.push_slots.iter().enumerate() {
            let has_memory = match push_slot {
                Some(it) if it.is_whole() => self.memory.has_pages(slot),
                Some(it) if it.requested || it.arrival.is_some() => self.memory.has(slot),
                _ => true,
            };
            assert!(has_memory, "push slot {slot} has memory");
        }
        for push_slot in self.all() {
            assert!(
                push_slot.number != 0 && numbers.insert(push_slot.number),
                "two push slots {}",
                push_slot.number
            );
            assert!(
                push_slot.holder.is_some() || push_slot.is_whole(),
                "push slot {} has a client or a whole push",
                push_slot.number
            );
            if let (Some(holder), Some(push)) = (push_slot.holder, &push_slot.arrival) {
                assert!(pushes.insert((holder, push.sequence)), "a push has two push slots");
                let bytes: u64 = push.extents.ranges().iter().map(|r| r.end - r.start).sum();
                assert_eq!(push.bytes, bytes, "bytes are counted once");
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
