//! Tests of push slots and extents in isolation.

pub(crate) mod model;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RequestId, ShardId};
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::variable::VariableSpec;

use pushpull_store::arena::{Budget, Memory};
use pushpull_store::layout::PAGE_BYTES;
use pushpull_store::planted::PlantedBugs;

use super::*;

const A: ClientKey = ClientKey(0);
const B: ClientKey = ClientKey(1);

impl Inbox {
    /// Returns the durable state of the whole pushes, in the order of arrival, and their bodies.
    pub(crate) fn whole_pushes(&self) -> Vec<(String, Vec<u8>)> {
        let mut push_slots: Vec<&PushSlot> = self.push_slots.iter().flatten().collect();
        push_slots.sort_by_key(|push_slot| push_slot.arrival.as_ref().map(|push| push.order));
        let whole = push_slots.into_iter().filter_map(|push_slot| {
            let PushArrival {
                sequence,
                operation,
                token,
                generation,
                effect,
                step,
                // Not durable.
                read: _,
                squares: _,
                extents,
                shared: _,
                scanning: _,
                bytes,
                whole,
                order,
            } = push_slot.arrival.as_ref()?;
            whole.as_ref()?;
            let number = push_slot.number;
            let holder = push_slot.holder;
            let push = format!(
                "{order}: {sequence:?} of {holder:?} in push slot {number}, {operation:?} under \
                 {token:?}.{generation} for {effect:?} at {step:?}, {bytes} bytes at {extents:?}"
            );
            let ranges = extents.ranges().iter().cloned();
            let bodies: Vec<&[u8]> = ranges.filter_map(|range| self.bytes(number, range)).collect();
            Some((push, bodies.concat()))
        });
        whole.collect()
    }
}

/// Creates a layout of partitions of these sizes.
fn layout(bytes: &[u64]) -> ShardLayout {
    let variable = |(index, bytes): (usize, &u64)| {
        VariableSpec::f32(format!("v{index}"), [bytes / 4]).unwrap()
    };
    let variables: Vec<_> = bytes.iter().enumerate().map(variable).collect();
    let map = ShardMap::new([0], 1).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    Catalogue::new(variables, &placement).unwrap().layout(ShardId::default())
}

fn inbox(push_slots: usize) -> Inbox {
    let layout = layout(&[16]);
    let bytes = PAGE_BYTES + Inbox::file_bytes(&layout, push_slots) as usize;
    let memory = Memory::anonymous(bytes).unwrap();
    let slot_bytes = Inbox::need(&layout, 1) as usize;
    Inbox::new(SlotMemory::kept(memory, slot_bytes, push_slots), &layout, push_slots, 1)
}

fn arrival(sequence: u64) -> PushArrival {
    PushArrival {
        sequence: Sequence(sequence),
        operation: Operation::Gradient {},
        token: TokenId(sequence),
        generation: 1,
        effect: None,
        step: GlobalStep(0),
        read: None,
        extents: Extents::default(),
        shared: Extents::default(),
        scanning: false,
        bytes: 0,
        whole: None,
        order: 0,
        squares: None,
    }
}

const WHOLE: PendingAnswer = PendingAnswer {
    connection: 1,
    request: RequestId(1),
    next: false,
    since: None,
    deadline: None,
};

#[test]
fn extents_merge_in_any_order_and_reject_overlaps() {
    // Random parts of 4 partitions and an empty one, each checked before it is added.
    let layout = layout(&[16, 8, 0, 24, 4]);
    let words = layout.bytes() / 8;
    let mut seed = 7_u64;
    for _ in 0..2000 {
        let mut extents = Extents::default();
        let mut taken = vec![false; words as usize];
        for _ in 0..60 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = (seed >> 33) % words;
            let end = start + 1 + (seed >> 50) % 3;
            let free = (start..end).all(|word| taken.get(word as usize) == Some(&false));
            let follows = layout.starts_at(8 * start) || (start > 0 && taken[start as usize - 1]);
            let part = 8 * start..8 * end;
            let allowed = extents.check(&part, &layout).is_ok();
            assert_eq!(allowed, free && follows, "{part:?} after {extents:?}");
            if allowed {
                extents.add(part);
                (start..end).for_each(|word| taken[word as usize] = true);
            }
            let ranges = extents.ranges();
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
            let held: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            assert_eq!(held, 8 * taken.iter().filter(|&&taken| taken).count() as u64);
            assert!(ranges.len() <= layout.partitions().len());
        }
    }
}

#[test]
fn push_slots_are_disjoint_and_their_numbers_are_unique() {
    let now = Instant::now();
    let mut inbox = inbox(2);
    let a = inbox.reserve(A, now).unwrap();
    let b = inbox.reserve(B, now).unwrap();
    assert_eq!((a, b, inbox.reserve(ClientKey(2), now)), (1, 2, None));
    inbox.bytes_mut(a, 0..16).unwrap().fill(1);
    inbox.bytes_mut(b, 0..16).unwrap().fill(2);
    assert_eq!(inbox.bytes(a, 8..16).unwrap(), [1; 8]);
    inbox.release(a);
    assert!(inbox.bytes(a, 0..8).is_none() && !inbox.holds(A, a));
    // Slot numbers wrap around after four billion pushes, and skip those in use.
    inbox.next_number = u32::MAX;
    assert_eq!(inbox.reserve(A, now), Some(u32::MAX));
    inbox.release(u32::MAX);
    assert_eq!(inbox.reserve(A, now), Some(1));
    inbox.release(1);
    assert_eq!(inbox.reserve(A, now), Some(3), "2 is in use");
    inbox.check_invariants();
}

#[test]
fn unused_push_slots_give_their_pages_back_some_at_a_time() {
    let layout = layout(&[48 << 20]);
    let memory = Memory::anonymous(PAGE_BYTES + Inbox::file_bytes(&layout, 3) as usize).unwrap();
    let slots = SlotMemory::kept(memory, Inbox::need(&layout, 1) as usize, 3);
    let mut inbox = Inbox::new(slots, &layout, 3, 1);
    let mut now = Instant::now();
    for client in 0..3 {
        inbox.reserve(ClientKey(client), now).unwrap();
    }
    (0..3).for_each(|client| inbox.drop_client(ClientKey(client)));
    inbox.take_back_memory(now);
    now += slot_memory::UNUSED_MAX;
    for left in [true, true, false] {
        inbox.take_back_memory(now);
        assert_eq!(inbox.has_reclaimable_memory(), left, "144 MiB, of which 64 at a time");
    }
}

#[test]
fn a_push_slot_that_still_gives_its_pages_back_is_lent_again() {
    let layout = layout(&[160 << 20]);
    let memory = Memory::anonymous(PAGE_BYTES + Inbox::file_bytes(&layout, 3) as usize).unwrap();
    let stride = Inbox::need(&layout, 1);
    let budget = Budget::new(2 * stride);
    let sizes = SlotSizes { stride: stride as usize, slots: 3, kept: 1 };
    let slots = SlotMemory::new(memory, sizes, &budget, PlantedBugs::default());
    let mut inbox = Inbox::new(slots, &layout, 3, 1);
    let mut now = Instant::now();
    for client in 0..3 {
        assert!(inbox.free_up(now), "client {client}");
        inbox.reserve(ClientKey(client), now).unwrap();
    }
    // The second slot has given its pages back, and another shard takes the bytes.
    inbox.drop_client(ClientKey(1));
    (0..2).for_each(|_| inbox.take_back_memory(now));
    now += slot_memory::UNUSED_MAX;
    (0..3).for_each(|_| inbox.take_back_memory(now));
    let _of_other = budget.reserve(stride).unwrap();
    inbox.drop_client(ClientKey(2));
    inbox.take_back_memory(now);
    now += slot_memory::UNUSED_MAX;
    inbox.take_back_memory(now);
    assert!(inbox.has_reclaimable_memory() && !inbox.has_free());
    assert!(inbox.free_up(now), "the third slot has its bytes still");
    inbox.reserve(ClientKey(3), now).unwrap();
    inbox.check_invariants();
}

#[test]
fn whole_pushes_outlive_their_client() {
    let now = Instant::now();
    let mut inbox = inbox(3);
    let whole = inbox.reserve(A, now).unwrap();
    let half = {
        inbox.begin(1, arrival(1), now);
        inbox.set_whole(1, WHOLE);
        inbox.reserve(A, now).unwrap()
    };
    inbox.begin(half, arrival(2), now);
    assert_eq!(inbox.find(A, Sequence(2)), Some(half));
    assert_eq!(inbox.whole_tokens().collect::<Vec<_>>(), [TokenId(1)]);
    assert_eq!(inbox.discard_incomplete(A), 1);
    assert_eq!((inbox.find(A, Sequence(2)), inbox.holds(A, half)), (None, true));
    inbox.drop_client(A);
    assert!(inbox.holds(A, whole) && !inbox.holds(A, half));
    inbox.orphan_whole(A);
    assert_eq!((inbox.find(A, Sequence(1)), inbox.holds(A, whole)), (None, false));
    assert_eq!(inbox.reclaim_stalled(now + Duration::from_secs(9), Duration::ZERO).0, 0);
    assert!(!inbox.reclaim_offered());
    let (client, push) = inbox.take(whole).unwrap();
    assert_eq!((client, push.sequence), (None, Sequence(1)));
    assert!(inbox.take(whole).is_none());
}
