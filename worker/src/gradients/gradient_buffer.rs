//! The memory of values and gradients: the heap, and slots of push buffers that shards share.
//!
//! An unpartitioned variable has the same layout in a slot as on its shard. So it need not be sent:
//! the session only names its range. A variable is either on the heap or in one slot.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::ids::ShardId;
use smallvec::SmallVec;

use super::pinned_words::PinnedWords;

/// Memory for values, aligned for every element type; zeroed when allocated.
#[derive(Debug)]
pub struct AlignedBuffer(pub(super) BufferWords);

#[derive(Debug)]
pub(super) enum BufferWords {
    Heap(Vec<u64>),
    /// Pages that a device copies from and to by itself. A copy under way shares them.
    Pinned(Arc<PinnedWords>),
}

impl AlignedBuffer {
    /// Allocates a buffer of this many bytes, all zero.
    pub fn of_bytes(bytes: usize) -> AlignedBuffer {
        AlignedBuffer(BufferWords::Heap(vec![0; bytes.div_ceil(8)]))
    }

    /// Allocates a buffer of this many bytes; `None` if the system has no memory for it. Others ask
    /// for its size, so that must not end the process.
    pub fn try_of_bytes(bytes: usize) -> Option<AlignedBuffer> {
        let mut words = Vec::new();
        let length = bytes.div_ceil(8);
        words.try_reserve_exact(length).ok()?;
        words.resize(length, 0);
        Some(AlignedBuffer(BufferWords::Heap(words)))
    }

    /// Allocates a buffer of this many bytes in pages of the same device. Without memory for such
    /// pages it is on the heap.
    pub(crate) fn pinned_like(pinned: &PinnedWords, bytes: usize) -> AlignedBuffer {
        match pinned.another(bytes.div_ceil(8)) {
            Ok(another) => AlignedBuffer(BufferWords::Pinned(Arc::new(another))),
            Err(_) => AlignedBuffer::of_bytes(bytes),
        }
    }

    /// Whether its length is that of a buffer of this many bytes.
    pub(crate) fn is_of(&self, bytes: usize) -> bool {
        self.words().len() == bytes.div_ceil(8)
    }

    /// Sets its length to that of a buffer of this many bytes. The content is arbitrary.
    pub(crate) fn resize(&mut self, bytes: usize) {
        match &mut self.0 {
            BufferWords::Heap(words) => words.resize(bytes.div_ceil(8), 0),
            BufferWords::Pinned(_) => *self = AlignedBuffer::of_bytes(bytes),
        }
    }

    /// The pages that a device copies from by itself, if the values are in such.
    pub(crate) fn pinned(&self) -> Option<&Arc<PinnedWords>> {
        match &self.0 {
            BufferWords::Heap(_) => None,
            BufferWords::Pinned(pinned) => Some(pinned),
        }
    }

    /// Returns the bytes, up to the end of the last word.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.words())
    }

    /// Returns the bytes, up to the end of the last word, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // A copy to a device that was given up may still read the pages.
        if let BufferWords::Pinned(pinned) = &mut self.0
            && Arc::get_mut(pinned).is_none()
        {
            self.0 = BufferWords::Heap(pinned.to_vec());
        }
        let words = match &mut self.0 {
            BufferWords::Heap(words) => &mut words[..],
            BufferWords::Pinned(pinned) => Arc::get_mut(pinned).expect("no copy shares the pages"),
        };
        bytemuck::cast_slice_mut(words)
    }

    fn words(&self) -> &[u64] {
        match &self.0 {
            BufferWords::Heap(words) => words,
            BufferWords::Pinned(pinned) => pinned,
        }
    }
}

/// The clone is on the heap.
impl Clone for AlignedBuffer {
    fn clone(&self) -> AlignedBuffer {
        AlignedBuffer(BufferWords::Heap(self.words().to_vec()))
    }
}

/// The id of a push buffer, unique within the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PushBufferId(pub(crate) u64);

/// The memory of a buffer slot. Nothing else in this process accesses it.
pub(crate) trait SlotMemory: Debug + Send + Sync {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Locks its pages if that is possible, so that a device copies to them by itself.
    #[cfg(feature = "devices")]
    fn lock_pages(&self, _device: &pushpull_device::Device) {}
}

/// A slot of a shard's push buffer. Dropping it makes the slot available again.
#[derive(Debug)]
pub(crate) struct GradientSlot {
    pub(crate) shard: ShardId,
    pub(crate) push_buffer: PushBufferId,
    /// The shard's number of the slot.
    pub(crate) number: u32,
    pub(crate) memory: Box<dyn SlotMemory>,
}

/// Variables that are contiguous both in a gradient buffer and on their shard, in the type that the
/// shard keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BufferRun {
    pub(crate) shard: ShardId,
    /// Their range of the buffer.
    pub(crate) buffer_range: Range<usize>,
    /// Their start in the shard's layout.
    pub(crate) shard_offset: u64,
}

/// The memory of gradients: runs of shards with a push buffer are in a slot, all else is on the
/// heap.
///
/// All ranges are those of a buffer of the plan, whether they are on the heap or in a slot.
#[derive(Debug)]
pub(crate) struct GradientBuffer {
    pub(super) heap: AlignedBuffer,
    /// In ascending order.
    runs: Arc<[BufferRun]>,
    /// At most one slot of each shard.
    pub(super) slots: Vec<GradientSlot>,
}

impl GradientBuffer {
    /// Allocates heap memory of this many bytes. `runs` may be in slots.
    pub(crate) fn new(bytes: usize, runs: Arc<[BufferRun]>) -> GradientBuffer {
        // The operating system backs only pages that are touched.
        GradientBuffer { heap: AlignedBuffer::of_bytes(bytes), runs, slots: Vec::new() }
    }

    /// Returns its memory if all gradients are on the heap, in a buffer of this many bytes.
    pub(crate) fn into_heap(self, bytes: usize) -> Result<AlignedBuffer, GradientBuffer> {
        match self.slots.is_empty() && self.heap.is_of(bytes) {
            true => Ok(self.heap),
            false => Err(self),
        }
    }

    /// Whether it was made for these runs. Each worker has its own.
    pub(crate) fn is_of(&self, runs: &Arc<[BufferRun]>) -> bool {
        Arc::ptr_eq(&self.runs, runs)
    }

    /// Returns the number of slots that it has.
    pub(crate) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// Returns its slot of a shard's push buffer.
    pub(crate) fn slot_of(&self, shard: ShardId) -> Option<&GradientSlot> {
        self.slots.iter().find(|slot| slot.shard == shard)
    }

    /// Returns the slots of push buffers that are no longer shared, and takes a slot of each shard
    /// that has runs but no slot yet. Discards all gradients.
    pub(crate) fn renew(
        &mut self,
        is_shared: impl Fn(PushBufferId) -> bool,
        take: impl Fn(ShardId) -> Option<GradientSlot>,
    ) {
        self.slots.retain(|slot| is_shared(slot.push_buffer));
        let runs = self.runs.clone();
        for (index, run) in runs.iter().enumerate() {
            let first = index == 0 || runs[index - 1].shard != run.shard;
            if !first || self.slot_of(run.shard).is_some() {
                continue;
            }
            let of_shard = runs[index..].iter().take_while(|other| other.shard == run.shard);
            let end = of_shard.map(BufferRun::shard_end).max().unwrap_or(0);
            // A slot that is too small is not used.
            let fits = |slot: &GradientSlot| slot.memory.bytes().len() as u64 >= end;
            self.slots.extend(take(run.shard).filter(fits));
        }
    }

    /// Returns the bytes of a range. The range must be within one variable, or within one run.
    pub(crate) fn slice(&self, range: Range<usize>) -> &[u8] {
        match self.locate(&range) {
            (0, place) => &self.heap.bytes()[place],
            (slot, place) => &self.slots[slot - 1].memory.bytes()[place],
        }
    }

    pub(crate) fn slice_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        match self.locate(&range) {
            (0, place) => &mut self.heap.bytes_mut()[place],
            (slot, place) => &mut self.slots[slot - 1].memory.bytes_mut()[place],
        }
    }

    /// Writes several ranges that do not overlap to `slices`, one for each.
    pub(crate) fn slices_mut<'a>(
        &'a mut self,
        ranges: &[Range<usize>],
        slices: &mut [&'a mut [u8]],
    ) {
        let places: Places = ranges.iter().map(|range| self.locate(range)).collect();
        split_slices(self.heap.bytes_mut(), 0, &places, slices);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if places.iter().any(|(memory, _)| *memory == index + 1) {
                split_slices(slot.memory.bytes_mut(), index + 1, &places, slices);
            }
        }
    }

    /// Returns the memory of a range and the range in it. Memory 0 is the heap, memory *n* is slot
    /// *n - 1*.
    pub(super) fn locate(&self, range: &Range<usize>) -> (usize, Range<usize>) {
        let next = self.runs.partition_point(|run| run.buffer_range.end <= range.start);
        let run = self.runs.get(next).filter(|run| run.buffer_range.start <= range.start);
        let Some(run) = run else { return (0, range.clone()) };
        let slot = self.slots.iter().position(|slot| slot.shard == run.shard);
        let Some(slot) = slot else { return (0, range.clone()) };
        let start = run.shard_offset as usize + (range.start - run.buffer_range.start);
        (slot + 1, start..start + range.len())
    }
}

impl BufferRun {
    fn shard_end(&self) -> u64 {
        self.shard_offset + self.buffer_range.len() as u64
    }
}

/// Memories and ranges in them; a few need no allocation.
type Places = SmallVec<[(usize, Range<usize>); 16]>;

/// Splits off the slices of memory `which`, which do not overlap.
fn split_slices<'a>(
    memory: &'a mut [u8],
    which: usize,
    places: &[(usize, Range<usize>)],
    slices: &mut [&'a mut [u8]],
) {
    let mut rest = memory;
    let mut at = 0;
    loop {
        let left = (0..places.len()).filter(|&index| {
            let (memory, place) = &places[index];
            *memory == which && !place.is_empty() && place.start >= at
        });
        let Some(next) = left.min_by_key(|&index| places[index].1.start) else { return };
        let place = places[next].1.clone();
        let (_, from) = rest.split_at_mut(place.start - at);
        let (slice, behind) = from.split_at_mut(place.len());
        slices[next] = slice;
        rest = behind;
        at = place.end;
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::VariableId;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::params::{GradientMemory, Gradients};
    use crate::gradients::scatter::{Scatter, ScatteredGradients};
    use crate::gradients::sharding_plan::ShardingPlan;
    use crate::testing::plans::plan_of;

    impl SlotMemory for AlignedBuffer {
        fn bytes(&self) -> &[u8] {
            AlignedBuffer::bytes(self)
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            AlignedBuffer::bytes_mut(self)
        }
    }

    /// Variables of all kinds on two shards, so that some are in runs and others between them.
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

    fn slot(shard: ShardId, bytes: usize) -> GradientSlot {
        let memory = Box::new(AlignedBuffer::of_bytes(bytes));
        GradientSlot {
            shard,
            push_buffer: PushBufferId(shard.task.into()),
            number: 1 + shard.task,
            memory,
        }
    }

    fn gradients(plan: &Arc<ShardingPlan>, slots: bool) -> Gradients {
        let mut memory = GradientMemory::new(plan, plan.runs(|_| true).into());
        if slots {
            memory.buffer_mut().renew(|_| true, |shard| Some(slot(shard, 1 << 10)));
            assert_eq!(memory.buffer.slot_count(), 2);
        }
        Gradients::new(plan.clone(), memory)
    }

    #[test]
    fn gradients_do_not_depend_on_the_memory_they_are_in() {
        let plan = plan();
        let results = [false, true].map(|slots| {
            let mut gradients = gradients(&plan, slots);
            let views = gradients.views_mut::<f32, 8>(NAMES).unwrap();
            let mut next = (1..).map(|value| value as f32);
            views.into_iter().flatten().zip(&mut next).for_each(|(g, value)| *g = value);
            let norm = gradients.clip_by_global_norm(20.0).unwrap();
            gradients.clip_by_value(5.0).unwrap();
            gradients.scale(3.0);
            let views = gradients.views_mut::<f32, 8>(NAMES).unwrap().map(|view| view.to_vec());
            (norm, views)
        });
        assert_eq!(results[0], results[1]);
        assert_eq!(results[0].1.concat().len(), 31);
        assert!(results[0].1.concat().iter().all(|&g| g != 0.0));
    }

    #[test]
    fn a_slot_has_the_layout_of_its_shard_and_unpartitioned_variables_only() {
        let plan = plan();
        let mut gradients = gradients(&plan, true);
        for (index, name) in NAMES.iter().enumerate() {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0 + index as f32);
        }
        let mut found = 0;
        for &shard in plan.shards() {
            let slot = gradients.memory.buffer.slot_of(shard).unwrap();
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
            assert!(slot.memory.bytes() == expected, "{shard}");
        }
        assert_eq!(found, NAMES.len() - 1);
    }

    #[test]
    fn a_push_names_the_ranges_in_slots_and_has_parts_for_the_rest() {
        use std::collections::BTreeMap;

        let plan = plan();
        let gradients = gradients(&plan, true);
        let ids = (0..plan.catalogue().variables().len() as u32).map(VariableId);
        let dense = ids.filter(|&id| !plan.catalogue().variable(id).is_sparse());
        let scatter = Arc::new(Scatter::new(&plan, dense));
        let buffer = gradients.memory.buffer.clone();
        let factors = BTreeMap::new();
        let scattered = ScatteredGradients { scatter, buffer, factors };
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
        let covers = |run: &BufferRun| run.buffer_range.contains(&plan.range(VariableId(1)).start);
        assert!(!left_out.iter().any(covers) && plan.runs(|_| true).iter().any(covers));
    }

    #[test]
    fn useless_slots_are_returned_and_others_taken() {
        let plan = plan();
        let [first, second] = [plan.shards()[0], plan.shards()[1]];
        let mut buffer = GradientBuffer::new(plan.bytes(), plan.runs(|_| true).into());
        buffer.renew(|_| true, |_| None);
        assert_eq!(buffer.slot_count(), 0);
        buffer.renew(|_| true, |shard| Some(slot(shard, if shard == first { 8 } else { 1 << 10 })));
        assert!(buffer.slot_of(first).is_none(), "it is too small for the runs");
        let take = |shard| {
            assert_eq!(shard, first, "it has a slot of the other shard");
            Some(slot(shard, 1 << 10))
        };
        buffer.renew(|_| true, take);
        assert_eq!(buffer.slot_count(), 2);
        buffer.renew(|push_buffer| push_buffer != PushBufferId(second.task.into()), |_| None);
        assert!(buffer.slot_of(first).is_some() && buffer.slot_of(second).is_none());
    }
}
