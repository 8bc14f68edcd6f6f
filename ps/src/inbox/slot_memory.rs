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

/// The time after which a file system that had no space is asked again.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// The most bytes that all slots give back at a time, which takes a few milliseconds.
pub(super) const BYTES_AT_ONCE: usize = 64 << 20;

/// The memory of all push slots outside push buffers.
///
/// Invariants: a push is received only in a slot with memory, whose bytes are off the budget. Only a
/// slot that has, or had, the whole push of an earlier process may have pages that are not; it
/// counts as one without memory, and gives them back like any other.
#[derive(Debug)]
pub(crate) struct SlotMemory {
    memory: Memory,
    stride: usize,
    budget: Budget,
    /// The number of slots that keep their memory.
    kept: usize,
    slots: Vec<SlotState>,
    /// When the file system had no space for a slot.
    full_since: Option<Instant>,
    planted: PlantedBugs,
}

/// The memory of a slot.
#[derive(Debug, Default)]
struct SlotState {
    /// Whether it has pages. A slot without may still keep its memory.
    has_pages: bool,
    /// The number of its bytes that are still to be given back. 0 if all or none were.
    giving_back: usize,
    /// Its bytes of the budget. `None` for memory that is kept, and for that of a recovered push as
    /// long as the budget has too little.
    reservation: Option<Reservation>,
    unused_since: Option<Instant>,
}

/// The number and the size of push slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSizes {
    /// The bytes of each.
    pub(crate) stride: usize,
    pub(crate) slots: usize,
    /// The number of slots that keep their memory.
    pub(crate) kept: usize,
}

impl SlotMemory {
    /// Takes over the memory of push slots, after a first page. Those that keep theirs have memory,
    /// and a reservation elsewhere.
    pub(crate) fn new(
        memory: Memory,
        sizes: SlotSizes,
        budget: &Budget,
        planted: PlantedBugs,
    ) -> SlotMemory {
        let SlotSizes { stride, slots, kept } = sizes;
        SlotMemory {
            memory,
            stride,
            budget: budget.clone(),
            kept,
            slots: (0..slots).map(|_| SlotState::default()).collect(),
            full_since: None,
            planted,
        }
    }

    /// Takes over the memory of slots that all keep it.
    pub(crate) fn kept(memory: Memory, stride: usize, slots: usize) -> SlotMemory {
        let sizes = SlotSizes { stride, slots, kept: slots };
        SlotMemory::new(memory, sizes, &Budget::new(0), PlantedBugs::default())
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

    /// Returns whether a slot has memory that the budget covers.
    pub(super) fn has(&self, slot: usize) -> bool {
        let is_covered = |state: &SlotState| state.has_pages && state.reservation.is_some();
        slot < self.kept || self.slots.get(slot).is_some_and(is_covered)
    }

    /// Returns whether the bytes of a slot can be written, covered by the budget or not.
    pub(super) fn has_pages(&self, slot: usize) -> bool {
        slot < self.kept || self.slots.get(slot).is_some_and(|state| state.has_pages)
    }

    /// Returns whether any slot has pages that it will give back.
    pub(super) fn has_reclaimable(&self) -> bool {
        let keeps = if self.memory.is_anonymous() { 0 } else { self.kept };
        let is_allocated = |state: &SlotState| state.has_pages || state.giving_back > 0;
        self.slots.iter().skip(keeps).any(is_allocated)
    }

    /// Records that a slot with pages is being used.
    pub(super) fn used(&mut self, slot: usize) {
        let Some(state) = self.slots.get_mut(slot) else { return };
        state.has_pages = true;
        state.giving_back = 0;
        state.unused_since = None;
        if slot >= self.kept && state.reservation.is_none() {
            // It was recovered. Its bytes are taken once the other shards have opened.
            state.reservation = self.budget.reserve_unpromised(self.stride as u64).ok();
        }
    }

    /// Gives memory to a slot that has none. Returns false if the budget or the file system has too
    /// little.
    pub(super) fn allocate(&mut self, slot: usize, now: Instant) -> bool {
        let is_soon = |since| now.saturating_duration_since(since) < RETRY;
        let Some(state) =
            self.slots.get_mut(slot).filter(|_| !self.full_since.is_some_and(is_soon))
        else {
            return false;
        };
        // It has its bytes still while it gives its pages back.
        let kept = state.reservation.take().map(Ok);
        let reserved = kept.unwrap_or_else(|| self.budget.reserve_unpromised(self.stride as u64));
        let Ok(reservation) = reserved else { return false };
        let within = self.range(slot);
        if self.memory.occupy(within.clone()).is_err() {
            // Some of the pages may have memory by now.
            self.memory.vacate(within);
            self.slots[slot] = SlotState::default();
            self.full_since = Some(now);
            return false;
        }
        self.full_since = None;
        self.occupied(slot, Some(reservation));
        true
    }

    /// Records that a slot has the whole push of an earlier process, and so pages.
    pub(super) fn recovered(&mut self, slot: usize) {
        self.occupied(slot, None);
    }

    fn occupied(&mut self, slot: usize, reservation: Option<Reservation>) {
        if let Some(state) = self.slots.get_mut(slot) {
            *state = SlotState { has_pages: true, reservation, ..SlotState::default() };
        }
    }

    /// Brings the memory of a file that an earlier process left in line with the slots: one that
    /// kept fewer or more slots, or was killed while it used others.
    pub(super) fn settle(&mut self) -> std::io::Result<()> {
        let has_pages: Vec<_> = (0..self.slots.len()).map(|slot| self.has_pages(slot)).collect();
        let mut slot = 0;
        let mut ranges = 0;
        for run in has_pages.chunk_by(|a, b| a == b) {
            let bytes = self.range(slot).start..self.range(slot + run.len() - 1).end;
            match run[0] {
                true => ranges += 1,
                // A file system that cannot take the memory back leaves it with the file.
                false => _ = self.memory.vacate(bytes),
            }
            slot += run.len();
        }
        let used = has_pages.iter().filter(|&&has_pages| has_pages).count();
        if self.memory.are_occupied(PAGE_BYTES + used * self.stride, ranges, self.stride) {
            return Ok(());
        }
        (0..self.kept).try_for_each(|slot| self.memory.occupy(self.range(slot)))
    }

    /// Takes back the pages of a slot that is not in use, at most `allowed` bytes at a time, if it
    /// has not been used for [`UNUSED_MAX`]. From then on it has no memory, unless it keeps it.
    /// Returns the bytes that are still allowed.
    pub(super) fn take_back_unused(&mut self, slot: usize, now: Instant, allowed: usize) -> usize {
        let within = self.range(slot);
        // A file system that is full by then would have no pages for a slot that keeps its memory.
        let is_fixed = slot < self.kept && !self.memory.is_anonymous();
        let Some(state) = self.slots.get_mut(slot).filter(|_| !is_fixed) else { return allowed };
        if state.has_pages {
            let since = *state.unused_since.get_or_insert(now);
            if now.saturating_duration_since(since) < UNUSED_MAX {
                return allowed;
            }
            state.has_pages = false;
            state.giving_back = within.len();
        }
        if state.giving_back == 0 || allowed == 0 {
            return allowed;
        }
        let end = within.start + state.giving_back;
        let given = state.giving_back.min(allowed);
        state.giving_back -= given;
        if !self.memory.vacate(within.start + state.giving_back..end) {
            // It keeps its pages, and so its bytes of the budget.
            state.has_pages = true;
            state.giving_back = 0;
            state.unused_since = None;
        } else if state.giving_back == 0 {
            let before = std::mem::take(state);
            if self.planted.has(Bug::KeepSlotReservation) {
                std::mem::forget(before);
            }
        }
        allowed - given
    }

    /// Returns the bytes that the slots have reserved, without those that keep their memory.
    pub(super) fn on_demand_bytes(&self) -> u64 {
        let taken = self.slots.iter().filter_map(|state| state.reservation.as_ref());
        taken.map(Reservation::bytes).sum()
    }
}
