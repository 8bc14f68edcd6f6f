//! Memory that gradients are written to: of this process, and rooms of trays, which shards lend.
//!
//! A variable that is in one piece lies in a room as its shard keeps it, so that it need not be sent:
//! the shard is told where it lies. No variable lies in two memories.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::ids::ShardId;

use crate::params::Buffer;
use crate::sharding_plan::ShardingPlan;

/// Names a tray among all that a session is ever lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PushBufferId(pub(crate) u64);

/// What is lent to write gradients into. In this process nobody else has any of it.
pub(crate) trait SlotMemory: Debug + Send + Sync {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// A room of a tray, for as long as this is kept.
#[derive(Debug)]
pub(crate) struct BufferSlot {
    pub(crate) shard: ShardId,
    pub(crate) push_buffer: PushBufferId,
    /// What names it to its shard.
    pub(crate) number: u32,
    pub(crate) memory: Box<dyn SlotMemory>,
}

/// Variables that lie one behind the other both in a buffer and on their shard, as it keeps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) shard: ShardId,
    /// Where in the buffer.
    pub(crate) here: Range<usize>,
    /// Where they start on the shard.
    pub(crate) there: u64,
}

/// What gradients are written to: all of it of this process, but for runs of shards that have lent a room.
///
/// Places are those of a buffer of the plan, whatever memory they are of.
#[derive(Debug)]
pub(crate) struct GradientBuffer {
    heap: Buffer,
    /// In rising order.
    runs: Arc<[Run]>,
    /// At most one of a shard.
    push_slots: Vec<BufferSlot>,
}

impl GradientBuffer {
    /// For gradients of a plan of which these may lie in rooms.
    pub(crate) fn new(plan: &ShardingPlan, runs: Arc<[Run]>) -> GradientBuffer {
        // The system gives memory that is never touched no pages.
        GradientBuffer { heap: Buffer::new(plan), runs, push_slots: Vec::new() }
    }

    /// Whether it was made for these runs, which are those of one worker.
    pub(crate) fn is_of(&self, runs: &Arc<[Run]>) -> bool {
        Arc::ptr_eq(&self.runs, runs)
    }

    /// How many rooms it has.
    pub(crate) fn push_slots(&self) -> usize {
        self.push_slots.len()
    }

    /// Its room on a shard.
    pub(crate) fn push_slot_of(&self, shard: ShardId) -> Option<&BufferSlot> {
        self.push_slots.iter().find(|push_slot| push_slot.shard == shard)
    }

    /// Gives back the rooms of trays that are lent no longer, and takes one of each shard that has none
    /// yet and something to lie there. What had been written is of no use then.
    pub(crate) fn renew(
        &mut self,
        is_shared: impl Fn(PushBufferId) -> bool,
        take: impl Fn(ShardId) -> Option<BufferSlot>,
    ) {
        self.push_slots.retain(|push_slot| is_shared(push_slot.push_buffer));
        let runs = self.runs.clone();
        for (index, run) in runs.iter().enumerate() {
            let first = index == 0 || runs[index - 1].shard != run.shard;
            if !first || self.push_slot_of(run.shard).is_some() {
                continue;
            }
            let of_shard = runs[index..].iter().take_while(|other| other.shard == run.shard);
            let end = of_shard.map(Run::end_there).max().unwrap_or(0);
            // A room that is too small is none.
            let fits = |push_slot: &BufferSlot| push_slot.memory.bytes().len() as u64 >= end;
            self.push_slots.extend(take(run.shard).filter(fits));
        }
    }

    /// The bytes of this range, which is of one variable, or of several of one run.
    pub(crate) fn slice(&self, range: Range<usize>) -> &[u8] {
        match self.place(&range) {
            (0, place) => &self.heap.bytes()[place],
            (push_slot, place) => &self.push_slots[push_slot - 1].memory.bytes()[place],
        }
    }

    pub(crate) fn slice_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        match self.place(&range) {
            (0, place) => &mut self.heap.bytes_mut()[place],
            (push_slot, place) => &mut self.push_slots[push_slot - 1].memory.bytes_mut()[place],
        }
    }

    /// Several ranges that do not overlap.
    pub(crate) fn slices_mut<const N: usize>(
        &mut self,
        ranges: [Range<usize>; N],
    ) -> [&mut [u8]; N] {
        let places = ranges.map(|range| self.place(&range));
        let mut slices = std::array::from_fn(|_| &mut [][..]);
        divide(self.heap.bytes_mut(), 0, &places, &mut slices);
        for (index, push_slot) in self.push_slots.iter_mut().enumerate() {
            if places.iter().any(|(memory, _)| *memory == index + 1) {
                divide(push_slot.memory.bytes_mut(), index + 1, &places, &mut slices);
            }
        }
        slices
    }

    /// In which memory a range lies, and where: the first is this process's, and the rooms follow.
    fn place(&self, range: &Range<usize>) -> (usize, Range<usize>) {
        let next = self.runs.partition_point(|run| run.here.end <= range.start);
        let run = self.runs.get(next).filter(|run| run.here.start <= range.start);
        let Some(run) = run else { return (0, range.clone()) };
        let push_slot = self.push_slots.iter().position(|push_slot| push_slot.shard == run.shard);
        let Some(push_slot) = push_slot else { return (0, range.clone()) };
        let start = run.there as usize + (range.start - run.here.start);
        (push_slot + 1, start..start + range.len())
    }
}

impl Run {
    fn end_there(&self) -> u64 {
        self.there + self.here.len() as u64
    }
}

/// Takes those of some places out of a memory that lie in it: they do not overlap.
fn divide<'a, const N: usize>(
    memory: &'a mut [u8],
    which: usize,
    places: &[(usize, Range<usize>); N],
    slices: &mut [&'a mut [u8]; N],
) {
    let (mut rest, mut at) = (memory, 0);
    loop {
        let left = (0..N).filter(|&index| {
            let (memory, place) = &places[index];
            *memory == which && !place.is_empty() && place.start >= at
        });
        let Some(next) = left.min_by_key(|&index| places[index].1.start) else { return };
        let place = places[next].1.clone();
        let (_, from) = rest.split_at_mut(place.start - at);
        let (slice, behind) = from.split_at_mut(place.len());
        (slices[next], rest, at) = (slice, behind, place.end);
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::VariableId;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::params::tests::plan_of;
    use crate::params::{Gradients, Memory};

    impl SlotMemory for Buffer {
        fn bytes(&self) -> &[u8] {
            Buffer::bytes(self)
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            Buffer::bytes_mut(self)
        }
    }

    /// Variables of all kinds on two shards, so that some lie in runs and others between them.
    fn plan() -> Arc<ShardingPlan> {
        let f32 = |name: &str, elements| VariableSpec::f32(name, [elements]).unwrap();
        let variables = vec![
            f32("a", 3),
            f32("b", 5),
            f32("none", 0),
            f32("c", 2),
            VariableSpec::bf16("halves", [6]).unwrap(),
            f32("split", 9).partitioner(Partitioner::Fixed { shards: 2 }),
            VariableSpec::f32("rows", [4, 2]).unwrap().sparse(),
            f32("d", 7),
            f32("e", 1),
            f32("f", 4),
        ];
        plan_of(variables, 2)
    }

    const NAMES: [&str; 8] = ["a", "b", "none", "c", "split", "d", "e", "f"];

    fn push_slot(shard: ShardId, bytes: usize) -> BufferSlot {
        let memory = Box::new(Buffer::of_bytes(bytes));
        BufferSlot {
            shard,
            push_buffer: PushBufferId(shard.task.into()),
            number: 1 + shard.task,
            memory,
        }
    }

    fn gradients(plan: &Arc<ShardingPlan>, push_slots: bool) -> Gradients {
        let mut memory = Memory::new(plan, plan.runs(|_| true).into());
        if push_slots {
            memory.buffer_mut().renew(|_| true, |shard| Some(push_slot(shard, 1 << 10)));
            assert_eq!(memory.buffer.push_slots(), 2);
        }
        Gradients::new(plan.clone(), memory)
    }

    #[test]
    fn gradients_are_the_same_whatever_memory_they_lie_in() {
        let plan = plan();
        let results = [false, true].map(|push_slots| {
            let mut gradients = gradients(&plan, push_slots);
            let views = gradients.views_mut::<f32, 8>(NAMES).unwrap();
            let mut next = (1..).map(|value| value as f32);
            views.into_iter().flatten().zip(&mut next).for_each(|(g, value)| *g = value);
            let norm = gradients.clip_by_global_norm(20.0).unwrap();
            gradients.clip_by_value(5.0).unwrap();
            gradients.scale(3.0);
            gradients.omit("d").unwrap();
            let views = gradients.views_mut::<f32, 8>(NAMES).unwrap().map(|view| view.to_vec());
            (norm, views)
        });
        assert_eq!(results[0], results[1]);
        assert_eq!(results[0].1.concat().len(), 31);
        assert!(results[0].1.concat().iter().all(|&g| g != 0.0));
    }

    #[test]
    fn what_is_in_one_piece_lies_in_a_room_as_on_its_shard_and_nothing_else_does() {
        let plan = plan();
        let mut gradients = gradients(&plan, true);
        for (index, name) in NAMES.iter().enumerate() {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0 + index as f32);
        }
        let mut found = 0;
        for &shard in plan.shards() {
            let push_slot = gradients.memory.buffer.push_slot_of(shard).unwrap();
            let mut expected = vec![0; 1 << 10];
            for partition in plan.catalogue().layout(shard).partitions() {
                let name = plan.catalogue().variable(partition.variable).name();
                let place = NAMES.iter().position(|other| *other == name && name != "split");
                let Some(place) = place else { continue };
                found += 1;
                let bytes = (1.0 + place as f32).to_le_bytes();
                let start = partition.offset as usize;
                let elements = expected[start..start + partition.bytes as usize].chunks_mut(4);
                elements.for_each(|element| element.copy_from_slice(&bytes));
            }
            assert!(push_slot.memory.bytes() == expected, "{shard}");
        }
        assert_eq!(found, NAMES.len() - 1);
    }

    #[test]
    fn a_push_names_what_lies_in_rooms_and_has_parts_for_the_rest() {
        use std::collections::BTreeMap;

        use crate::parts::Scattered;
        let plan = plan();
        let gradients = gradients(&plan, true);
        let ids = (0..plan.catalogue().variables().len() as u32).map(VariableId);
        let dense = ids.filter(|&id| !plan.catalogue().variable(id).is_sparse());
        let scatter = Arc::new(plan.scatter(dense));
        let (buffer, factors) = (gradients.memory.buffer.clone(), BTreeMap::new());
        let scattered = Scattered { scatter, buffer, factors };
        for (index, shard) in scattered.shards().enumerate() {
            let there = scattered.in_push_buffer(index, 2).unwrap();
            assert_eq!(
                (there.push_buffer, there.push_slot),
                (PushBufferId(shard.task.into()), 1 + shard.task)
            );
            let parts: Vec<_> = scattered.parts(index).collect();
            let (named, rest) = parts.split_at(there.parts.end - 2);
            assert_eq!(there.parts.start, 2);
            let named: u64 = named.iter().map(|part| part.bytes()).sum();
            assert_eq!(
                named,
                there.ranges.iter().map(|range| range.end - range.start).sum::<u64>()
            );
            let of =
                |range: &Range<u64>| plan.catalogue().layout(shard).within(range.clone()).count();
            let variables: usize = there.ranges.iter().map(of).sum();
            assert!(variables >= 3 && !rest.is_empty());
        }
        let left_out = plan.runs(|id| id != VariableId(1));
        let lies = |run: &Run| run.here.contains(&plan.range(VariableId(1)).start);
        assert!(!left_out.iter().any(lies) && plan.runs(|_| true).iter().any(lies));
    }

    #[test]
    fn rooms_that_are_of_no_use_are_given_back_and_others_taken() {
        let plan = plan();
        let [first, second] = [plan.shards()[0], plan.shards()[1]];
        let mut buffer = GradientBuffer::new(&plan, plan.runs(|_| true).into());
        buffer.renew(|_| true, |_| None);
        assert_eq!(buffer.push_slots(), 0);
        buffer.renew(
            |_| true,
            |shard| Some(push_slot(shard, if shard == first { 8 } else { 1 << 10 })),
        );
        assert!(buffer.push_slot_of(first).is_none(), "it does not hold what would lie there");
        let take = |shard| {
            assert_eq!(shard, first, "it has the other");
            Some(push_slot(shard, 1 << 10))
        };
        buffer.renew(|_| true, take);
        assert_eq!(buffer.push_slots(), 2);
        buffer.renew(|push_buffer| push_buffer != PushBufferId(second.task.into()), |_| None);
        assert!(buffer.push_slot_of(first).is_some() && buffer.push_slot_of(second).is_none());
    }
}
