//! The memory of push slots: which of them have any, and what that takes off the budget.
//!
//! The first slots keep their memory, so that a push can always be received. Every other slot gets
//! memory when a client requests it, as far as the budget and the file system allow, and gives it
//! back after a time without use. Slots that keep their memory give back its pages, if these come
//! by themselves when they are written.

use std::ops::Range;
use std::time::{Duration, Instant};

use pushpull_store::arena::{Budget, Memory, Reservation};
use pushpull_store::layout::PAGE_BYTES;
use pushpull_store::planted::{Bug, PlantedBugs};

/// The time without use after which a slot gives its memory back. Memory that is given and taken
/// back costs a push about a tenth of its time, so pushes a few seconds apart keep it.
pub(crate) const UNUSED_MAX: Duration = Duration::from_secs(5);

/// The memory of all push slots outside push buffers.
///
/// Invariants: a slot is used only while it has memory. The bytes of all slots with memory are off
/// the budget, except those of whole pushes that an earlier process left and that did not fit.
#[derive(Debug)]
pub(crate) struct SlotMemory {
    memory: Memory,
    stride: usize,
    budget: Budget,
    /// The number of slots that keep their memory.
    kept: usize,
    slots: Vec<SlotState>,
    planted: PlantedBugs,
}

/// The memory of a slot.
#[derive(Debug, Default)]
struct SlotState {
    /// Whether it has pages. A slot without may still keep its memory.
    has_pages: bool,
    /// What it has taken off the budget. `None` for memory that is kept, and for that of a
    /// recovered push that did not fit.
    reservation: Option<Reservation>,
    unused_since: Option<Instant>,
}

impl SlotMemory {
    /// Takes over the memory of `slots` slots of `stride` bytes each, after a first page. The first
    /// `kept` slots have memory, and a reservation elsewhere.
    pub(crate) fn new(
        memory: Memory,
        stride: usize,
        slots: usize,
        kept: usize,
        budget: Budget,
        planted: PlantedBugs,
    ) -> SlotMemory {
        let slots = (0..slots).map(|_| SlotState::default()).collect();
        SlotMemory { memory, stride, budget, kept, slots, planted }
    }

    /// Takes over the memory of slots that all keep it.
    pub(crate) fn kept(memory: Memory, stride: usize, slots: usize) -> SlotMemory {
        SlotMemory::new(memory, stride, slots, slots, Budget::new(0), PlantedBugs::default())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }

    /// Returns the size of a slot, in bytes.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the position of a slot in the memory.
    pub(super) fn range(&self, slot: usize) -> Range<usize> {
        let start = PAGE_BYTES + slot * self.stride;
        start..start + self.stride
    }

    /// Returns whether a slot has memory.
    pub(super) fn has(&self, slot: usize) -> bool {
        slot < self.kept || self.slots.get(slot).is_some_and(|state| state.has_pages)
    }

    /// Returns whether any slot has pages that it will give back.
    pub(super) fn is_any_lent(&self) -> bool {
        let keeps = if self.memory.is_anonymous() { 0 } else { self.kept };
        self.slots.iter().skip(keeps).any(|state| state.has_pages)
    }

    /// Records that a slot with memory is being used.
    pub(super) fn used(&mut self, slot: usize) {
        if let Some(state) = self.slots.get_mut(slot) {
            state.has_pages = true;
            state.unused_since = None;
        }
    }

    /// Gives memory to a slot that has none. Returns false if the budget or the file system has too
    /// little.
    pub(super) fn lend(&mut self, slot: usize) -> bool {
        let Ok(reservation) = self.budget.reserve(self.stride as u64) else { return false };
        if self.memory.occupy(self.range(slot)).is_err() {
            // Some of the pages may have memory by now.
            let _ = self.memory.vacate(self.range(slot));
            return false;
        }
        self.occupied(slot, Some(reservation));
        true
    }

    /// Records that a slot has the whole push of an earlier process, and so memory.
    pub(super) fn recovered(&mut self, slot: usize) {
        let taken = (slot >= self.kept).then(|| self.budget.reserve(self.stride as u64));
        self.occupied(slot, taken.and_then(Result::ok));
    }

    fn occupied(&mut self, slot: usize, reservation: Option<Reservation>) {
        if let Some(state) = self.slots.get_mut(slot) {
            *state = SlotState { has_pages: true, reservation, unused_since: None };
        }
    }

    /// Brings the memory of a file that an earlier process left in line with the slots: one that
    /// kept fewer or more slots, or was killed while it used others.
    pub(super) fn settle(&mut self) -> std::io::Result<()> {
        for slot in 0..self.kept {
            self.memory.occupy(self.range(slot))?;
        }
        for slot in self.kept..self.slots.len() {
            if !self.has(slot) {
                // A file system that cannot take the memory back leaves it with the file.
                let _ = self.memory.vacate(self.range(slot));
            }
        }
        Ok(())
    }

    /// Takes back the pages of a slot that is not in use, if it has not been used for
    /// [`UNUSED_MAX`]. Returns whether the slot has lost its memory.
    pub(super) fn take_back_unused(&mut self, slot: usize, now: Instant) -> bool {
        let within = self.range(slot);
        let keeps = slot < self.kept;
        // A file system that is full by then would have no pages for a slot that keeps its memory.
        let is_fixed = keeps && !self.memory.is_anonymous();
        let Some(state) = self.slots.get_mut(slot).filter(|state| state.has_pages) else {
            return false;
        };
        let since = *state.unused_since.get_or_insert(now);
        let is_due = now.saturating_duration_since(since) >= UNUSED_MAX;
        if is_fixed || !is_due || self.memory.vacate(within).is_err() {
            return false;
        }
        let before = std::mem::take(state);
        if self.planted.has(Bug::KeepSlotReservation) {
            std::mem::forget(before);
        }
        !keeps
    }

    /// Returns the bytes that the slots have reserved, without those that keep their memory.
    pub(super) fn lent_bytes(&self) -> u64 {
        let lent = self.slots.iter().filter_map(|state| state.reservation.as_ref());
        lent.map(Reservation::bytes).sum()
    }
}
