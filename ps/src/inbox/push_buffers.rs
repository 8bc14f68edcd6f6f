//! Push buffers: push slots in shared memory that clients on the same host write directly.
//!
//! A client may write to its push buffer at any time, so nothing in it is borrowed. Data that is
//! scanned, measured or applied is copied out in pieces, or loaded once by the loop that applies
//! it, and is only used as values. Data that determines positions, such as row numbers, is received
//! over the connection into memory of the slot's own, which is allocated when it is first needed.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::protocol::limits::BUFFER_SLOTS_MAX;
use pushpull_store::arena::{Budget, Memory, Reservation, SharedBytes};

use super::{Inbox, PushSlot, PushSource};
use crate::client_key::ClientKey;
use crate::error::StorageError;

/// The push slots that one client shares.
///
/// Invariants: there is at least one slot. While the buffer is shared, all slots exist and belong
/// to its client. Afterwards only slots with whole pushes exist.
#[derive(Debug)]
pub(super) struct PushBuffer {
    /// The client, until its connection ends.
    shared_with: Option<ClientKey>,
    memory: SharedBytes,
    push_slots: [Option<BufferSlot>; BUFFER_SLOTS_MAX],
    _reservation: Reservation,
}

#[derive(Debug)]
pub(super) struct BufferSlot {
    push_slot: PushSlot,
    /// Memory for parts that are received over the connection.
    own: Option<(Memory, Reservation)>,
}

impl BufferSlot {
    pub(super) fn own_bytes(&self) -> Option<&[u8]> {
        self.own.as_ref().map(|(memory, _)| memory.bytes())
    }

    pub(super) fn own_bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.own.as_mut().map(|(memory, _)| memory.bytes_mut())
    }
}

impl PushBuffer {
    pub(super) fn push_slots(&self) -> impl Iterator<Item = &PushSlot> {
        self.push_slots.iter().flatten().map(|shared| &shared.push_slot)
    }

    pub(super) fn push_slots_mut(&mut self) -> impl Iterator<Item = &mut PushSlot> {
        self.push_slots.iter_mut().flatten().map(|shared| &mut shared.push_slot)
    }

    /// Returns the index of a slot in this push buffer.
    pub(super) fn position(&self, number: u32) -> Option<usize> {
        let is_it = |slot: &BufferSlot| slot.push_slot.number == number;
        self.push_slots.iter().position(|slot| slot.as_ref().is_some_and(is_it))
    }

    /// Returns the memory that the values of the push in the slot with this index are read from.
    /// Slots are `stride` bytes apart.
    pub(super) fn source(&self, index: usize, stride: usize) -> Option<PushSource<'_>> {
        let push_slot = self.push_slots.get(index)?.as_ref()?;
        let ranges = push_slot.push_slot.arrival.as_ref()?.shared.ranges();
        let own = push_slot.own_bytes().unwrap_or_default();
        Some(PushSource::shared(own, &self.memory, index * stride, ranges))
    }
}

impl Inbox {
    /// Returns the size of a push buffer, and the distance between its slots, in bytes.
    pub(crate) fn push_buffer_bytes(&self) -> (u64, u64) {
        let stride = self.buffer_stride as u64;
        (stride.saturating_mul(BUFFER_SLOTS_MAX as u64), stride)
    }

    /// Returns the number of push buffers, including those of departed clients that still hold
    /// whole pushes.
    pub(crate) fn push_buffers(&self) -> usize {
        self.push_buffers.len()
    }

    /// Returns whether a client has a push buffer.
    pub(crate) fn has_push_buffer(&self, client: ClientKey) -> bool {
        self.push_buffers.iter().any(|push_buffer| push_buffer.shared_with == Some(client))
    }

    /// Gives a client a push buffer in this memory, whose size is that of
    /// [`Inbox::push_buffer_bytes`]. Returns the numbers of its slots.
    pub(crate) fn share_push_buffer(
        &mut self,
        client: ClientKey,
        memory: SharedBytes,
        reservation: Reservation,
        now: Instant,
    ) -> Vec<u32> {
        let mut push_buffer = PushBuffer {
            shared_with: Some(client),
            memory,
            push_slots: [None, None],
            _reservation: reservation,
        };
        let mut numbers = Vec::new();
        for slot in &mut push_buffer.push_slots {
            let number = self.next_number;
            let holder = Some(client);
            let requested = true;
            let arrival = None;
            let push_slot = PushSlot { number, holder, requested, last_progress: now, arrival };
            *slot = Some(BufferSlot { push_slot, own: None });
            numbers.push(number);
            self.next_number = number.wrapping_add(1);
            self.skip_taken_numbers();
        }
        self.push_buffers.push(push_buffer);
        numbers
    }

    /// Ends the push buffer of a client whose connection has closed. Slots with whole pushes stay.
    pub(super) fn end_push_buffer(&mut self, client: ClientKey) {
        for push_buffer in self
            .push_buffers
            .iter_mut()
            .filter(|push_buffer| push_buffer.shared_with == Some(client))
        {
            push_buffer.shared_with = None;
            for slot in &mut push_buffer.push_slots {
                if slot.as_ref().is_some_and(|shared| !shared.push_slot.is_whole()) {
                    *slot = None;
                }
            }
        }
        self.push_buffers.retain(|push_buffer| push_buffer.push_slots().next().is_some());
    }

    /// Returns whether a slot is in a push buffer.
    pub(crate) fn is_shared(&self, number: u32) -> bool {
        self.buffer_slot(number).is_some()
    }

    /// Ensures that a slot has memory for parts that are received over the connection. Does nothing
    /// for a slot outside push buffers.
    pub(crate) fn ensure_own_memory(
        &mut self,
        number: u32,
        budget: &Budget,
    ) -> Result<(), StorageError> {
        let bytes = self.memory.stride();
        if let Some(shared) = self.buffer_slot_mut(number).filter(|shared| shared.own.is_none()) {
            let reservation = budget.reserve_unpromised(bytes as u64)?;
            let memory = Memory::anonymous(bytes).map_err(|source| {
                let path = "memory for parts of a push".into();
                StorageError::Io { doing: "map", path, source }
            })?;
            shared.own = Some((memory, reservation));
        }
        Ok(())
    }

    /// Records that these bytes of a push are in the push buffer.
    pub(crate) fn add_shared(&mut self, number: u32, part: Range<u64>, now: Instant) {
        self.add(number, part.clone(), now);
        if let Some(push) =
            self.push_slot_mut(number).and_then(|push_slot| push_slot.arrival.as_mut())
        {
            push.shared.add(part);
        }
    }

    /// Sets whether the push buffer's part of a push must be scanned. Returns false if the push is
    /// no longer there.
    pub(crate) fn set_scanning(&mut self, number: u32, order: u64, scanning: bool) -> bool {
        let push = self.push_slot_mut(number).and_then(|push_slot| push_slot.arrival.as_mut());
        let push = push.filter(|push| push.order == order);
        push.map(|push| push.scanning = scanning).is_some()
    }

    pub(super) fn buffer_slot(&self, number: u32) -> Option<&BufferSlot> {
        let mut push_slots = self
            .push_buffers
            .iter()
            .flat_map(|push_buffer| push_buffer.push_slots.iter().flatten());
        push_slots.find(|shared| shared.push_slot.number == number)
    }

    pub(super) fn buffer_slot_mut(&mut self, number: u32) -> Option<&mut BufferSlot> {
        let mut push_slots = self
            .push_buffers
            .iter_mut()
            .flat_map(|push_buffer| push_buffer.push_slots.iter_mut().flatten());
        push_slots.find(|shared| shared.push_slot.number == number)
    }

    /// Releases a slot of a push buffer from its push.
    pub(super) fn release_shared(&mut self, number: u32) {
        let Some(push_slot) = self.buffer_slot_mut(number) else { return };
        push_slot.push_slot.arrival = None;
        for push_buffer in
            self.push_buffers.iter_mut().filter(|push_buffer| push_buffer.shared_with.is_none())
        {
            push_buffer.push_slots.iter_mut().for_each(|slot| {
                _ = slot.take_if(|shared| shared.push_slot.number == number);
            });
        }
        self.push_buffers.retain(|push_buffer| push_buffer.push_slots().next().is_some());
    }

    /// Asserts the invariants of push buffers.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_push_buffers(&self) {
        for push_buffer in &self.push_buffers {
            let push_slots = || push_buffer.push_slots.iter().flatten();
            assert!(push_slots().next().is_some(), "an unused push buffer is dropped");
            match push_buffer.shared_with {
                Some(client) => {
                    assert_eq!(
                        push_slots().count(),
                        BUFFER_SLOTS_MAX,
                        "all slots of a push buffer are shared"
                    );
                    assert!(
                        push_buffer.push_slots().all(|push_slot| push_slot.holder == Some(client)),
                        "all slots have the same client"
                    );
                }
                None => assert!(
                    push_buffer.push_slots().all(PushSlot::is_whole),
                    "only whole pushes outlive the client"
                ),
            }
            for push in push_buffer.push_slots().filter_map(|push_slot| push_slot.arrival.as_ref())
            {
                let of =
                    |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
                let within = push.shared.ranges().iter();
                let held =
                    within.map(|range| push.extents.bytes_within(range.clone())).sum::<u64>();
                assert_eq!(held, of(push.shared.ranges()), "shared ranges belong to the push");
            }
        }
    }
}
