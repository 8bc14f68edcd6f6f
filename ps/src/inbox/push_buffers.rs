//! Trays: rooms that clients of the same host fill by themselves, in memory that each of them is lent.
//!
//! A client may write to its tray at any time. So nothing of it is borrowed: what is looked at, measured
//! or applied is copied out piece by piece, or loaded once by the loop that applies it, and is only ever
//! values. What says where something goes, as the numbers of rows do, comes over the connection into memory
//! of the room's own, which there is once something comes so.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::finite::Exponents;
use pushpull_common::protocol::limits::BUFFER_SLOTS_MAX;

use super::{Inbox, PushSlot};
use crate::arena::{Budget, Loan, Memory, SharedBytes};
use crate::error::StorageError;
use crate::shard::replicas::ClientKey;
use crate::volatile::Volatile;

/// What is copied out of a tray at a time where it is only looked at, at most: small enough to stay in the
/// first cache while it is.
const PIECE_BYTES: u64 = 8 << 10;

/// The rooms that one client is lent.
///
/// Invariants: there is a room that is there. While it is lent, all are, and are its client's; then
/// only those are whose push is whole.
#[derive(Debug)]
pub(super) struct PushBuffer {
    /// Whose it is, until its connection ends.
    shared_with: Option<ClientKey>,
    memory: SharedBytes,
    push_slots: [Option<BufferSlot>; BUFFER_SLOTS_MAX],
    _loan: Loan,
}

#[derive(Debug)]
pub(super) struct BufferSlot {
    push_slot: PushSlot,
    /// For what comes over the connection.
    own: Option<(Memory, Loan)>,
}

impl BufferSlot {
    pub(super) fn own_bytes(&self) -> Option<&[u8]> {
        self.own.as_ref().map(|(memory, _)| memory.bytes())
    }

    pub(super) fn own_bytes_mut(&mut self) -> Option<&mut [u8]> {
        self.own.as_mut().map(|(memory, _)| memory.bytes_mut())
    }

    fn is_whole(&self) -> bool {
        self.push_slot.arrival.as_ref().is_some_and(|push| push.whole.is_some())
    }
}

impl PushBuffer {
    pub(super) fn push_slots(&self) -> impl Iterator<Item = &PushSlot> {
        self.push_slots.iter().flatten().map(|shared| &shared.push_slot)
    }

    pub(super) fn push_slots_mut(&mut self) -> impl Iterator<Item = &mut PushSlot> {
        self.push_slots.iter_mut().flatten().map(|shared| &mut shared.push_slot)
    }
}

impl Inbox {
    /// The bytes of a tray, and from the start of one of its rooms to that of the next.
    pub(crate) fn push_buffer_bytes(&self) -> (u64, u64) {
        let stride = self.buffer_stride as u64;
        (stride.saturating_mul(BUFFER_SLOTS_MAX as u64), stride)
    }

    /// How many trays there are, with those whose clients are gone and have left whole pushes.
    pub(crate) fn push_buffers(&self) -> usize {
        self.push_buffers.len()
    }

    /// Whether a client has a tray.
    pub(crate) fn has_push_buffer(&self, client: ClientKey) -> bool {
        self.push_buffers.iter().any(|push_buffer| push_buffer.shared_with == Some(client))
    }

    /// Lends a client a tray in this memory, of as many bytes as [`Inbox::push_buffer_bytes`] says; the numbers
    /// of its rooms.
    pub(crate) fn share_push_buffer(
        &mut self,
        client: ClientKey,
        (memory, loan): (SharedBytes, Loan),
        now: Instant,
    ) -> Vec<u32> {
        let mut push_buffer =
            PushBuffer { shared_with: Some(client), memory, push_slots: [None, None], _loan: loan };
        let mut numbers = Vec::new();
        for slot in &mut push_buffer.push_slots {
            let number = self.next_number;
            let (holder, asked, arrival) = (Some(client), true, None);
            let push_slot = PushSlot { number, holder, asked, touched: now, arrival };
            *slot = Some(BufferSlot { push_slot, own: None });
            numbers.push(number);
            self.next_number = number.wrapping_add(1);
            self.skip_taken_numbers();
        }
        self.push_buffers.push(push_buffer);
        numbers
    }

    /// The client's connection has ended: its tray goes, but for what lies whole there.
    pub(super) fn end_push_buffer(&mut self, client: ClientKey) {
        for push_buffer in self
            .push_buffers
            .iter_mut()
            .filter(|push_buffer| push_buffer.shared_with == Some(client))
        {
            push_buffer.shared_with = None;
            for slot in &mut push_buffer.push_slots {
                if slot.as_ref().is_some_and(|shared| !shared.is_whole()) {
                    *slot = None;
                }
            }
        }
        self.push_buffers.retain(|push_buffer| push_buffer.push_slots().next().is_some());
    }

    /// Whether a room is one of a tray.
    pub(crate) fn is_shared(&self, number: u32) -> bool {
        self.buffer_slot(number).is_some()
    }

    /// Makes sure that what comes of a push over the connection has a place. Costs nothing for a room that
    /// is none of a tray.
    pub(crate) fn have_own(&mut self, number: u32, budget: &Budget) -> Result<(), StorageError> {
        let bytes = self.stride;
        if let Some(shared) = self.buffer_slot_mut(number).filter(|shared| shared.own.is_none()) {
            let loan = budget.take(bytes as u64)?;
            let memory = Memory::anonymous(bytes).map_err(|source| {
                let path = "memory for parts of a push".into();
                StorageError::Io { doing: "map", path, source }
            })?;
            shared.own = Some((memory, loan));
        }
        Ok(())
    }

    /// These bytes of the push in a room lie in the tray.
    pub(crate) fn add_shared(&mut self, number: u32, part: Range<u64>, now: Instant) {
        self.add(number, part.clone(), now);
        if let Some(push) =
            self.push_slot_mut(number).and_then(|push_slot| push_slot.arrival.as_mut())
        {
            push.shared.add(part);
        }
    }

    /// What lies in the tray is to be looked at, or has been; false if it is no longer there.
    pub(crate) fn set_scanning(&mut self, number: u32, order: u64, scanning: bool) -> bool {
        let push = self.push_slot_mut(number).and_then(|push_slot| push_slot.arrival.as_mut());
        let push = push.filter(|push| push.order == order);
        push.map(|push| push.scanning = scanning).is_some()
    }

    /// Where the values of the push in a room are read.
    pub(crate) fn source(&self, number: u32) -> Option<Source<'_>> {
        let shares = |push_buffer: &PushBuffer| {
            push_buffer.push_slots().any(|push_slot| push_slot.number == number)
        };
        let Some(push_buffer) = self.push_buffers.iter().find(|push_buffer| shares(push_buffer))
        else {
            return Some(Source { own: self.bytes(number, 0..self.stride as u64)?, shared: None });
        };
        let mut push_slots = push_buffer.push_slots.iter().enumerate();
        let (place, push_slot) = push_slots.find_map(|(place, slot)| {
            let shared = slot.as_ref().filter(|shared| shared.push_slot.number == number)?;
            Some((place, shared))
        })?;
        let ranges = push_slot.push_slot.arrival.as_ref()?.shared.ranges();
        let start = place * self.buffer_stride;
        let shared = Some(SharedPart { memory: &push_buffer.memory, start, ranges });
        Some(Source { own: push_slot.own_bytes().unwrap_or_default(), shared })
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

    /// A room of a tray is done with its push.
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

    /// Asserts the invariants of trays.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_push_buffers(&self) {
        for push_buffer in &self.push_buffers {
            let push_slots = || push_buffer.push_slots.iter().flatten();
            assert!(push_slots().next().is_some(), "a push buffer is kept for something");
            match push_buffer.shared_with {
                Some(client) => {
                    assert_eq!(
                        push_slots().count(),
                        BUFFER_SLOTS_MAX,
                        "a push buffer is shared whole"
                    );
                    assert!(
                        push_buffer.push_slots().all(|push_slot| push_slot.holder == Some(client)),
                        "to one client"
                    );
                }
                None => assert!(push_slots().all(BufferSlot::is_whole), "what nobody fills goes"),
            }
            for push in push_buffer.push_slots().filter_map(|push_slot| push_slot.arrival.as_ref())
            {
                let of =
                    |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
                let within = push.shared.ranges().iter();
                let held =
                    within.map(|range| push.extents.bytes_within(range.clone())).sum::<u64>();
                assert_eq!(held, of(push.shared.ranges()), "shared ranges are of the push");
            }
        }
    }
}

/// Where the values of one push are read: in its room, or what of them is lent in the tray.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    own: &'a [u8],
    shared: Option<SharedPart<'a>>,
}

#[derive(Clone, Copy, Debug)]
struct SharedPart<'a> {
    memory: &'a SharedBytes,
    /// Where its room starts there.
    start: usize,
    ranges: &'a [Range<u64>],
}

/// Values of a push that lie in one place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values<'a> {
    /// In its room.
    Own(&'a [u8]),
    /// In the tray.
    Shared(Volatile<'a>),
}

/// Values of a push.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) bytes: &'a [u8],
    /// Where they end.
    pub(crate) end: u64,
}

impl<'a> Source<'a> {
    /// The first values of a range of the push that lie in one place, and where they end. Nothing if the range
    /// is empty, or is not of this push.
    pub(crate) fn values(&self, range: Range<u64>) -> Option<(Values<'a>, u64)> {
        if range.is_empty() {
            return None;
        }
        let next = self.shared.and_then(|shared| {
            let next = shared.ranges.partition_point(|held| held.end <= range.start);
            Some((shared, shared.ranges.get(next)?)).filter(|(_, held)| held.start < range.end)
        });
        match next {
            Some((shared, held)) if held.start <= range.start => {
                let (at, end) = (shared.start + range.start as usize, range.end.min(held.end));
                let values = shared.memory.bytes(at, (end - range.start) as usize);
                Some((Values::Shared(values), end))
            }
            next => {
                let end = next.map_or(range.end, |(_, held)| held.start.min(range.end));
                let bytes = self.own.get(range.start as usize..end as usize)?;
                Some((Values::Own(bytes), end))
            }
        }
    }

    /// Copies the same; where they end.
    ///
    /// # Panics
    /// If there is no room for the range.
    pub(crate) fn copy(&self, range: Range<u64>, to: &mut [u8]) -> Option<u64> {
        let (values, end) = self.values(range.clone())?;
        let to = &mut to[..(end - range.start) as usize];
        match values {
            Values::Shared(shared) => _ = shared.copy(to, Exponents::NONE),
            Values::Own(bytes) => to.copy_from_slice(bytes),
        }
        Some(end)
    }

    /// The same for who looks at them, in pieces where they are lent: those are copied, aligned for every type
    /// if the range is.
    pub(crate) fn piece<'b>(&self, range: Range<u64>, copy: &'b mut Vec<u64>) -> Option<Piece<'b>>
    where
        'a: 'b,
    {
        let (values, end) = self.values(range.clone())?;
        match values {
            Values::Shared(shared) => {
                let end = end.min((range.start / PIECE_BYTES + 1) * PIECE_BYTES);
                let bytes = (end - range.start) as usize;
                copy.resize(copy.len().max(bytes.div_ceil(8)), 0);
                let bytes = &mut bytemuck::cast_slice_mut(copy)[..bytes];
                shared.copy(bytes, Exponents::NONE);
                Some(Piece { bytes, end })
            }
            Values::Own(bytes) => Some(Piece { bytes, end }),
        }
    }
}
