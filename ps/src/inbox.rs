//! Pushes in flight: room, parts, and what is whole.
//!
//! A room holds one whole push: a copy of the shard's layout, and behind it the numbers of the rows
//! of sparse partitions. It is given out before a body byte
//! is sent, so that half-received pushes can never fill the inbox, and taken back from clients
//! that do not use it when another waits. Clients of the same host may have rooms of their own beside
//! those, which they fill by themselves (`push_buffers`).

mod extents;
mod push_buffers;
mod rows;
mod words;

use std::ops::Range;
use std::time::{Duration, Instant};

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::ids::{GlobalStep, RequestId, Sequence, TokenId};
use pushpull_common::protocol::message::Operation;

use crate::arena::Memory;
use crate::layout::PAGE_BYTES;
use crate::shard::replicas::ClientKey;
pub(crate) use extents::Extents;
use push_buffers::PushBuffer;
pub(crate) use push_buffers::{Source, Values};
pub(crate) use rows::Rows;
pub(crate) use words::{WholeSlot, map_words, whole_slots};

/// What is known of a push that is being received.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) sequence: Sequence,
    pub(crate) operation: Operation,
    pub(crate) token: TokenId,
    pub(crate) generation: u32,
    pub(crate) step: GlobalStep,
    /// How many gradients the shard had applied to the values that it was computed from, as far as
    /// the client says. Not kept in the arena.
    pub(crate) read: Option<u64>,
    pub(crate) extents: Extents,
    /// Those of them that lie in a tray: partitions that are not sparse, and whole. Not kept in the arena.
    pub(crate) shared: Extents,
    /// Whether those are still to be looked at before the push counts. Not kept in the arena.
    pub(crate) scanning: bool,
    /// Bytes received.
    pub(crate) bytes: u64,
    /// The last request of the push, once it is whole.
    pub(crate) whole: Option<WholePush>,
    /// Its place among the pushes that came whole; 0 before.
    pub(crate) order: u64,
    /// What the squares of its elements come to, once they are added up. Not kept in the arena.
    pub(crate) squares: Option<f64>,
}

/// How to answer a push that is whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WholePush {
    /// The connection of that request: its number means nothing on another.
    pub(crate) connection: u64,
    pub(crate) request: RequestId,
    pub(crate) next: bool,
    /// Since when it is waited for, and how long.
    pub(crate) since: Option<Instant>,
    pub(crate) deadline: Option<Instant>,
}

impl WholePush {
    /// Nobody waits for the answer.
    pub(crate) fn unheard() -> WholePush {
        let (since, deadline) = (None, None);
        WholePush { connection: 0, request: RequestId(0), next: false, since, deadline }
    }
}

#[derive(Debug)]
struct PushSlot {
    number: u32,
    /// Whose it is; nobody's once an older self of the client, whose push lies whole, is fenced.
    holder: Option<ClientKey>,
    /// Whether the holder asked for it, and did not just find it beside an answer.
    asked: bool,
    /// When the holder last made progress.
    touched: Instant,
    arrival: Option<Arrival>,
}

/// The rooms of a shard.
///
/// Invariants: room numbers are unique and never 0; a room with a whole push is neither taken
/// back nor given away before it is released.
#[derive(Debug)]
pub(crate) struct Inbox {
    memory: Memory,
    stride: usize,
    push_slots: Vec<Option<PushSlot>>,
    /// The bytes of a room of a tray.
    buffer_stride: usize,
    push_buffers: Vec<PushBuffer>,
    next_number: u32,
    /// Whole pushes are numbered, so that they are applied in the order they came after a restart,
    /// too.
    next_order: u64,
}

/// Whether an operation is for partitions that the optimizer trains, or for the others; `None` for
/// one that is for both.
pub(crate) fn is_for_trainable(operation: Operation) -> Option<bool> {
    match operation {
        Operation::Gradient {} => Some(true),
        Operation::AssignAdd {} => Some(false),
        _ => None,
    }
}

impl Inbox {
    /// The bytes that so many rooms for pushes of up to the whole layout take.
    pub(crate) fn need(layout: &ShardLayout, push_slots: usize) -> u64 {
        // Whole pages, so that rooms do not share one.
        layout.push_bytes().next_multiple_of(4096).saturating_mul(push_slots as u64)
    }

    /// The bytes of its file behind the first page.
    pub(crate) fn file_bytes(layout: &ShardLayout, push_slots: usize) -> u64 {
        Inbox::need(layout, push_slots)
    }

    /// An empty inbox of so many rooms. It numbers them from `next_number` on: an inbox that takes
    /// another's place does not repeat its numbers.
    pub(crate) fn new(
        memory: Memory,
        layout: &ShardLayout,
        push_slots: usize,
        next_number: u32,
    ) -> Inbox {
        let stride = Inbox::need(layout, 1) as usize;
        let buffer_stride = layout.bytes().next_multiple_of(4096) as usize;
        let push_slots = (0..push_slots).map(|_| None).collect();
        let (push_buffers, next_order) = (Vec::new(), 1);
        Inbox { memory, stride, push_slots, buffer_stride, push_buffers, next_number, next_order }
    }

    /// A free room for this client, which asks for one, if there is one. It is the client's for
    /// long enough to begin its push: clients that ask in turns would take it from each other
    /// for ever.
    pub(crate) fn reserve(&mut self, holder: ClientKey, now: Instant) -> Option<u32> {
        self.slot_for(holder, true, now)
    }

    /// A free room for this client, which has not asked for one and may lose it to one that does.
    pub(crate) fn offer(&mut self, holder: ClientKey, now: Instant) -> Option<u32> {
        self.slot_for(holder, false, now)
    }

    fn slot_for(&mut self, holder: ClientKey, asked: bool, now: Instant) -> Option<u32> {
        let unused = |push_slot: &&mut PushSlot| {
            push_slot.holder == Some(holder) && push_slot.arrival.is_none()
        };
        if let Some(push_slot) = self.push_slots.iter_mut().flatten().find(unused) {
            // The client has lost count of it, as after a reconnect; it never hoards.
            if asked && !push_slot.asked {
                (push_slot.asked, push_slot.touched) = (true, now);
            }
            return Some(push_slot.number);
        }
        let slot = self.push_slots.iter().position(Option::is_none)?;
        let number = self.next_number;
        let holder = Some(holder);
        self.push_slots[slot] =
            Some(PushSlot { number, holder, asked, touched: now, arrival: None });
        self.skip_taken_numbers();
        Some(number)
    }

    /// Takes back the room that has lain unused for longest and was not asked for, if there is
    /// one.
    pub(crate) fn reclaim_offered(&mut self) -> bool {
        let unused = self.push_slots.iter().enumerate().filter_map(|(slot, push_slot)| {
            let offered = push_slot
                .as_ref()
                .filter(|push_slot| push_slot.arrival.is_none() && !push_slot.asked);
            offered.map(|push_slot| (push_slot.touched, slot))
        });
        match unused.min() {
            Some((_, slot)) => {
                self.push_slots[slot] = None;
                true
            }
            None => false,
        }
    }

    /// Takes back every room whose push has made no progress for `limit`; how many there were.
    /// A room that was asked for and not used for so long is no longer its client's alone.
    pub(crate) fn reclaim_stalled(&mut self, now: Instant, limit: Duration) -> usize {
        let mut count = 0;
        for slot in &mut self.push_slots {
            let Some(push_slot) = slot else { continue };
            if now.saturating_duration_since(push_slot.touched) < limit {
                continue;
            }
            match &push_slot.arrival {
                None => push_slot.asked = false,
                Some(push) if push.whole.is_some() => {}
                Some(_) => {
                    *slot = None;
                    count += 1;
                }
            }
        }
        count
    }

    /// This server was paused: nobody could make progress for so long.
    pub(crate) fn excuse(&mut self, pause: Duration, now: Instant) {
        for push_slot in self.all_mut() {
            push_slot.touched = (push_slot.touched + pause).min(now);
        }
    }

    /// Gives up what was received of a client's pushes over a connection that is gone; how many
    /// there were. The rooms stay the client's until somebody else asks.
    pub(crate) fn give_up(&mut self, holder: ClientKey) -> usize {
        let mut count = 0;
        for push_slot in self.all_mut() {
            let whole = push_slot.arrival.as_ref().is_some_and(|push| push.whole.is_some());
            if push_slot.holder == Some(holder) && !whole {
                count += usize::from(push_slot.arrival.take().is_some());
                push_slot.asked = false;
            }
        }
        self.end_push_buffer(holder);
        count
    }

    /// Takes back every room of a client except those whose push is whole: that push belongs to
    /// the server, whatever becomes of its worker.
    pub(crate) fn drop_client(&mut self, holder: ClientKey) {
        for slot in &mut self.push_slots {
            let gone = slot.as_ref().is_some_and(|push_slot| {
                let whole = push_slot.arrival.as_ref().is_some_and(|push| push.whole.is_some());
                push_slot.holder == Some(holder) && !whole
            });
            if gone {
                *slot = None;
            }
        }
        self.end_push_buffer(holder);
    }

    /// Takes the whole pushes of a client from it: they belong to a self that has been fenced,
    /// and its successor numbers its own pushes anew.
    pub(crate) fn orphan_whole(&mut self, holder: ClientKey) {
        for push_slot in self.all_mut() {
            let whole = push_slot.arrival.as_ref().is_some_and(|push| push.whole.is_some());
            if whole && push_slot.holder == Some(holder) {
                push_slot.holder = None;
            }
        }
    }

    /// The tokens that whole pushes will spend.
    pub(crate) fn whole_tokens(&self) -> impl Iterator<Item = TokenId> {
        let pushes = self.all().filter_map(|push_slot| push_slot.arrival.as_ref());
        let spends = |push: &&Arrival| {
            push.whole.is_some() && matches!(push.operation, Operation::Gradient {})
        };
        pushes.filter(spends).map(|push| push.token)
    }

    /// How many rooms there are, without those of trays.
    pub(crate) fn push_slots(&self) -> usize {
        self.push_slots.len()
    }

    /// Numbers rooms from here on, past those that are taken.
    pub(crate) fn number_from(&mut self, number: u32) {
        self.next_number = number;
        self.skip_taken_numbers();
    }

    fn skip_taken_numbers(&mut self) {
        while self.next_number == 0 || self.push_slot(self.next_number).is_some() {
            self.next_number = self.next_number.wrapping_add(1);
        }
    }

    /// The number of the next room.
    pub(crate) fn next_number(&self) -> u32 {
        self.next_number
    }

    /// Whether a room is free.
    pub(crate) fn has_free(&self) -> bool {
        self.push_slots.iter().any(Option::is_none)
    }

    /// Takes a whole push out of its room, which is free then, and has nothing of it lie in a tray any more;
    /// and whose it is.
    pub(crate) fn take(&mut self, number: u32) -> Option<(Option<ClientKey>, Arrival)> {
        let push_slot = self.push_slot_mut(number)?;
        let (holder, arrival) = (push_slot.holder, push_slot.arrival.take());
        self.release(number);
        Some((holder, Arrival { shared: Extents::default(), ..arrival? }))
    }

    /// Whether the client still has this room.
    pub(crate) fn holds(&self, holder: ClientKey, number: u32) -> bool {
        self.push_slot(number).is_some_and(|push_slot| push_slot.holder == Some(holder))
    }

    /// The room in which this push is being received, or lies whole.
    pub(crate) fn find(&self, holder: ClientKey, sequence: Sequence) -> Option<u32> {
        let matches = |push_slot: &&PushSlot| {
            push_slot.holder == Some(holder)
                && push_slot.arrival.as_ref().is_some_and(|push| push.sequence == sequence)
        };
        self.all().find(matches).map(|push_slot| push_slot.number)
    }

    /// The rooms in which pushes lie whole.
    pub(crate) fn whole_slots(&self) -> impl Iterator<Item = u32> {
        let whole = |push_slot: &&PushSlot| {
            push_slot.arrival.as_ref().is_some_and(|push| push.whole.is_some())
        };
        self.all().filter(whole).map(|push_slot| push_slot.number)
    }

    /// Whose a room is.
    pub(crate) fn holder(&self, number: u32) -> Option<ClientKey> {
        self.push_slot(number)?.holder
    }

    /// The room in which the gradient of this token lies whole.
    pub(crate) fn whole_push_slot_of(&self, token: u64) -> Option<u32> {
        let is_it = |push: &Arrival| push.token.0 == token && push.whole.is_some();
        self.gradients().find(|(_, push)| is_it(push)).map(|(push_slot, _)| push_slot)
    }

    /// The rooms of what is called the gradient of this token, whole or on its way.
    pub(crate) fn push_slots_of(&self, token: u64) -> Vec<u32> {
        self.gradients()
            .filter(|(_, push)| push.token.0 == token)
            .map(|(push_slot, _)| push_slot)
            .collect()
    }

    /// The rooms of the gradients that were computed before this step was begun.
    pub(crate) fn gradients_before(&self, step: u64) -> Vec<u32> {
        self.gradients()
            .filter(|(_, push)| push.step.0 < step)
            .map(|(push_slot, _)| push_slot)
            .collect()
    }

    /// The whole gradients for whose answer nobody waits any longer than until now, or at all if
    /// `all` says so; nobody waits for it after this.
    pub(crate) fn take_waits(&mut self, now: Instant, all: bool) -> Vec<(u32, WholePush)> {
        let mut ended = Vec::new();
        for push_slot in self.all_mut() {
            let Some(push) = &mut push_slot.arrival else { continue };
            let gradient = matches!(push.operation, Operation::Gradient {});
            let due = |whole: &WholePush| {
                let late = whole.deadline.is_some_and(|deadline| deadline <= now);
                gradient && whole.connection != 0 && (late || all)
            };
            if let Some(whole) = push.whole.filter(due) {
                push.whole = Some(WholePush::unheard());
                ended.push((push_slot.number, whole));
            }
        }
        ended
    }

    fn gradients(&self) -> impl Iterator<Item = (u32, &Arrival)> {
        let pushes = self
            .all()
            .filter_map(|push_slot| Some((push_slot.number, push_slot.arrival.as_ref()?)));
        pushes.filter(|(_, push)| matches!(push.operation, Operation::Gradient {}))
    }

    /// The push in a room.
    pub(crate) fn arrival(&self, number: u32) -> Option<&Arrival> {
        self.push_slot(number)?.arrival.as_ref()
    }

    /// The pushes that there are, by their rooms.
    #[cfg(test)]
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = (u32, &Arrival)> {
        self.all().filter_map(|push_slot| Some((push_slot.number, push_slot.arrival.as_ref()?)))
    }

    /// What the squares of the gradient in a room come to is known: the token that it spends.
    pub(crate) fn set_squares(&mut self, number: u32, squares: f64) -> Option<TokenId> {
        let push = self.push_slot_mut(number)?.arrival.as_mut()?;
        push.squares = Some(squares);
        Some(push.token)
    }

    /// Starts receiving a push into a room. Nothing of it has come.
    pub(crate) fn begin(&mut self, number: u32, arrival: Arrival, now: Instant) {
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.arrival = Some(arrival);
            push_slot.touched = now;
        }
    }

    /// A part has come whole.
    pub(crate) fn add(&mut self, number: u32, part: Range<u64>, now: Instant) {
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.touched = now;
            if let Some(arrival) = &mut push_slot.arrival {
                arrival.bytes += part.end - part.start;
                arrival.extents.add(part);
            }
        }
    }

    /// Bytes of a part have come.
    pub(crate) fn touch(&mut self, number: u32, now: Instant) {
        if let Some(push_slot) = self.push_slot_mut(number) {
            push_slot.touched = now;
        }
    }

    /// The push in this room is whole.
    pub(crate) fn set_whole(&mut self, number: u32, whole: WholePush) {
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

    /// Gives a room free; one of a tray stays its client's.
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

    /// The bytes of a range of the push in a room, none of which lies in a tray.
    pub(crate) fn bytes(&self, number: u32, range: Range<u64>) -> Option<&[u8]> {
        if let Some(push_slot) = self.buffer_slot(number) {
            return push_slot.own_bytes()?.get(range.start as usize..range.end as usize);
        }
        self.memory.bytes().get(self.place_of(number, &range)?)
    }

    /// The same for receiving into.
    pub(crate) fn bytes_mut(&mut self, number: u32, range: Range<u64>) -> Option<&mut [u8]> {
        if self.buffer_slot(number).is_some() {
            let own = self.buffer_slot_mut(number)?.own_bytes_mut()?;
            return own.get_mut(range.start as usize..range.end as usize);
        }
        let place = self.place_of(number, &range)?;
        self.memory.bytes_mut().get_mut(place)
    }

    /// Where a range of a room lies in the memory, if it lies within the room.
    fn place_of(&self, number: u32, range: &Range<u64>) -> Option<Range<usize>> {
        let start = PAGE_BYTES + self.slot(number)? * self.stride;
        let at = |offset: u64| usize::try_from(offset).ok().filter(|&at| at <= self.stride);
        Some(start + at(range.start)?..start + at(range.end)?)
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

    /// All rooms, those of trays last.
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
        for push_slot in self.all() {
            assert!(
                push_slot.number != 0 && numbers.insert(push_slot.number),
                "two push slots {}",
                push_slot.number
            );
            let whole = push_slot.arrival.as_ref().is_some_and(|push| push.whole.is_some());
            assert!(
                push_slot.holder.is_some() || whole,
                "push slot {} is nobody's",
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
mod tests;
