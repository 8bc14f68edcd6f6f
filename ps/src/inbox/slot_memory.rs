//! The memory of push slots: which of them have any, and what that takes off the budget.
//!
//! The first slots keep their memory, so that a push can always be received. Every other slot gets
//! memory when a client requests it, as far as the budget and the file system allow, and gives it
//! back after a time without use.

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
    /// The slots after them.
    lent: Vec<Option<LentMemory>>,
    planted: PlantedBugs,
}

/// The memory of a slot that gives it back.
#[derive(Debug)]
struct LentMemory {
    /// `None` if it did not fit the budget when its whole push was recovered.
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
        let lent = (kept..slots).map(|_| None).collect();
        SlotMemory { memory, stride, budget, kept, lent, planted }
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
        slot < self.kept || self.lent.get(slot - self.kept).is_some_and(Option::is_some)
    }

    /// Returns whether any slot has memory that it will give back.
    pub(super) fn is_any_lent(&self) -> bool {
        self.lent.iter().any(Option::is_some)
    }

    /// Records that a slot is being used.
    pub(super) fn used(&mut self, slot: usize) {
        if let Some(lent) = self.lent_mut(slot).and_then(Option::as_mut) {
            lent.unused_since = None;
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
        let lent = LentMemory { reservation: Some(reservation), unused_since: None };
        self.lent_mut(slot).map(|entry| *entry = Some(lent)).is_some()
    }

    /// Records that a slot has the whole push of an earlier process, and so memory.
    pub(super) fn recovered(&mut self, slot: usize) {
        let reservation = self.budget.reserve(self.stride as u64).ok();
        if let Some(entry) = self.lent_mut(slot) {
            *entry = Some(LentMemory { reservation, unused_since: None });
        }
    }

    /// Brings the memory of a file that an earlier process left in line with the slots: one that
    /// kept fewer or more slots, or was killed while it used others.
    pub(super) fn settle(&mut self) -> std::io::Result<()> {
        for slot in 0..self.kept {
            self.memory.occupy(self.range(slot))?;
        }
        for slot in self.kept..self.kept + self.lent.len() {
            if !self.has(slot) {
                // A file system that cannot take the memory back leaves it with the file.
                let _ = self.memory.vacate(self.range(slot));
            }
        }
        Ok(())
    }

    /// Takes back the memory of a slot that is not in use, if it has not been used for
    /// [`UNUSED_MAX`]. Returns whether the slot has lost its memory.
    pub(super) fn take_back_unused(&mut self, slot: usize, now: Instant) -> bool {
        let Some(lent) = self.lent_mut(slot).and_then(Option::as_mut) else { return false };
        let since = *lent.unused_since.get_or_insert(now);
        if now.saturating_duration_since(since) < UNUSED_MAX {
            return false;
        }
        if self.memory.vacate(self.range(slot)).is_err() {
            return false;
        }
        let lent = self.lent_mut(slot).and_then(Option::take);
        if self.planted.has(Bug::KeepSlotReservation) {
            std::mem::forget(lent);
        }
        true
    }

    /// Returns the bytes that the slots have reserved, without those that keep their memory.
    pub(super) fn lent_bytes(&self) -> u64 {
        let lent = self.lent.iter().flatten();
        lent.filter_map(|lent| lent.reservation.as_ref()).map(Reservation::bytes).sum()
    }

    fn lent_mut(&mut self, slot: usize) -> Option<&mut Option<LentMemory>> {
        self.lent.get_mut(slot.checked_sub(self.kept)?)
    }
}
