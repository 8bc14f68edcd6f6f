//! The sharding plan: which bytes of a worker's buffer correspond to which range of which shard.
//!
//! A buffer holds every dense variable whole. First come the unpartitioned variables, in the order
//! of their shard's layout, so a shard's variables usually form one range on both sides. The
//! partitioned variables follow; their partitions are gathered and scattered.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::codec::{Encoding, ScaleBlocks};
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::tensor::{DType, Element};

use super::gradient_buffer::BufferRun;
use crate::error::ViewError;

/// What a range of a shard's layout corresponds to in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayoutSpan {
    /// A range of the buffer of the same length, from this byte on.
    Buffer(usize),
    /// A range of a variable of `f16` or `bf16`, from this byte on: half as many bytes as the shard
    /// keeps.
    Halves(usize),
    /// The padding behind a partition; not in the buffer.
    Padding,
}

impl LayoutSpan {
    /// Returns the span in a buffer that starts at byte `base` of this one. The span must not start
    /// before that.
    pub(crate) fn behind(self, base: usize) -> LayoutSpan {
        match self {
            LayoutSpan::Buffer(start) => LayoutSpan::Buffer(start - base),
            LayoutSpan::Halves(start) => LayoutSpan::Halves(start - base),
            LayoutSpan::Padding => LayoutSpan::Padding,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// The start in the shard's layout.
    start: u64,
    bytes: u64,
    span: LayoutSpan,
    /// Whether it consists of unpartitioned variables and their padding.
    whole: bool,
}

/// The layout of buffers and its relation to the shards. Computed once, at join.
///
/// Invariants: the segments of a shard ascend and cover all dense values of its layout; their
/// ranges of the buffer do not overlap.
#[derive(Debug)]
pub(crate) struct ShardingPlan {
    catalogue: Arc<Catalogue>,
    shards: Vec<ShardId>,
    segments: Vec<Vec<Segment>>,
    /// The start of each variable in the buffer.
    starts: Vec<usize>,
    bytes: usize,
    part_bytes: u64,
    /// The shards that hold dense variables of `f16` or `bf16`.
    with_halves: BTreeSet<ShardId>,
    /// The ranges of the buffer with values that each replica changes by itself.
    replica_ranges: Vec<Range<usize>>,
}

impl ShardingPlan {
    pub(crate) fn new(catalogue: Arc<Catalogue>) -> ShardingPlan {
        let shards: Vec<ShardId> = catalogue.shards().collect();
        let mut starts = vec![usize::MAX; catalogue.variables().len()];
        let mut bytes = 0;
        let whole = |variable| catalogue.partitions_of(variable).len() == 1;
        for &shard in &shards {
            for partition in catalogue.layout(shard).partitions() {
                if whole(partition.variable) && !partition.is_sparse() {
                    starts[partition.variable.0 as usize] = bytes;
                    let variable = catalogue.variable(partition.variable);
                    bytes += (variable.bytes() as usize).next_multiple_of(8);
                }
            }
        }
        for (index, variable) in catalogue.variables().iter().enumerate() {
            if !whole(VariableId(index as u32)) && !variable.is_sparse() {
                starts[index] = bytes;
                bytes += (variable.bytes() as usize).next_multiple_of(8);
            }
        }
        let segments = shards.iter().map(|&shard| segments(&catalogue, shard, &starts)).collect();
        let halves =
            catalogue.partitions().iter().filter(|p| p.own_encoding.is_some() && !p.is_sparse());
        let with_halves = halves.map(|partition| partition.shard).collect();
        let part_bytes = PART_BYTES_MAX;
        let replica_ranges = Vec::new();
        let mut plan = ShardingPlan {
            catalogue,
            shards,
            segments,
            starts,
            bytes,
            part_bytes,
            with_halves,
            replica_ranges,
        };
        let ids = (0..plan.starts.len() as u32).map(VariableId);
        let is_replicated =
            |id: &VariableId| plan.catalogue.variable(*id).replication().is_replicated();
        plan.replica_ranges = ids.filter(is_replicated).map(|id| plan.range(id)).collect();
        plan
    }

    /// Sets smaller parts, so that tests send small variables in several.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn with_parts_of(self, bytes: u64) -> ShardingPlan {
        ShardingPlan { part_bytes: bytes, ..self }
    }

    pub(crate) fn catalogue(&self) -> &Arc<Catalogue> {
        &self.catalogue
    }

    /// Whether both plans have the same buffers. A plan follows from its catalogue.
    pub(crate) fn is_same(&self, other: &ShardingPlan) -> bool {
        std::ptr::eq(self, other) || self.catalogue.digest() == other.catalogue.digest()
    }

    /// Returns the shards that hold a partition.
    pub(crate) fn shards(&self) -> &[ShardId] {
        &self.shards
    }

    /// Returns the length of a buffer, in bytes; a multiple of 8.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the most bytes of a shard's layout that a part may cover.
    pub(crate) fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// Whether there is a dense variable of `f16` or `bf16`.
    pub(crate) fn has_some_halves(&self) -> bool {
        !self.with_halves.is_empty()
    }

    /// Whether a shard holds dense variables of `f16` or `bf16`, so that its values are sent in
    /// their own types.
    pub(crate) fn has_halves(&self, shard: ShardId) -> bool {
        self.with_halves.contains(&shard)
    }

    /// Returns the id of a variable.
    pub(crate) fn find(&self, name: &str) -> Result<VariableId, ViewError> {
        self.catalogue.find(name).ok_or_else(|| ViewError::Unknown { name: name.to_owned() })
    }

    /// Returns a dense variable's id and its range of a buffer, if its elements are of this type.
    pub(crate) fn locate<T: Element>(
        &self,
        name: &str,
    ) -> Result<(VariableId, Range<usize>), ViewError> {
        let id = self.find(name)?;
        let dtype = self.catalogue.variable(id).dtype();
        if dtype != T::DTYPE {
            return Err(ViewError::Type { name: name.to_owned(), asked: T::DTYPE, dtype });
        }
        if self.catalogue.variable(id).is_sparse() {
            return Err(ViewError::Sparse { name: name.to_owned() });
        }
        Ok((id, self.range(id)))
    }

    /// Returns a variable's range of a buffer, in bytes; empty if it is sparse.
    pub(crate) fn range(&self, id: VariableId) -> Range<usize> {
        if self.catalogue.variable(id).is_sparse() {
            return 0..0;
        }
        let start = self.starts[id.0 as usize];
        start..start + self.catalogue.variable(id).bytes() as usize
    }

    /// Returns the ranges of a buffer with the variables that each replica changes by itself.
    pub(crate) fn replica_ranges(&self) -> &[Range<usize>] {
        &self.replica_ranges
    }

    /// Returns the first offset of a shard's layout from `from` on that belongs to a dense
    /// variable; `None` behind the last.
    pub(crate) fn next_value(&self, shard: ShardId, from: u64) -> Option<u64> {
        let segments = &self.segments[self.shards.binary_search(&shard).ok()?];
        let next = segments.partition_point(|segment| segment.start + segment.bytes <= from);
        segments.get(next).map(|segment| segment.start.max(from))
    }

    /// Returns the runs of the eligible unpartitioned variables that shards keep in the type of the
    /// buffer, in ascending order.
    pub(crate) fn runs(&self, is_eligible: impl Fn(VariableId) -> bool) -> Vec<BufferRun> {
        let mut runs: Vec<BufferRun> = Vec::new();
        for &shard in &self.shards {
            let layout = self.catalogue.layout(shard);
            let partitions = layout.partitions().iter();
            for partition in partitions.filter(|p| self.is_whole(p) && is_eligible(p.variable)) {
                let start = self.starts[partition.variable.0 as usize];
                let bytes = (partition.end() - partition.offset) as usize;
                let touches = |last: &&mut BufferRun| {
                    let behind = last.shard_offset + last.buffer_range.len() as u64;
                    last.shard == shard
                        && last.buffer_range.end == start
                        && behind == partition.offset
                };
                match runs.last_mut().filter(touches) {
                    Some(last) => last.buffer_range.end += bytes,
                    None if bytes == 0 => {}
                    None => {
                        let buffer_range = start..start + bytes;
                        let shard_offset = partition.offset;
                        runs.push(BufferRun { shard, buffer_range, shard_offset });
                    }
                }
            }
        }
        runs
    }

    /// Whether a shard keeps an unpartitioned variable in the type of the buffer.
    pub(crate) fn keeps_some_whole(&self, shard: ShardId) -> bool {
        let segments = self.shards.binary_search(&shard).map(|index| &self.segments[index][..]);
        segments.unwrap_or_default().iter().any(|segment| segment.whole)
    }

    /// Whether a partition is all of its variable, in the type of the buffer.
    pub(super) fn is_whole(&self, partition: &Partition) -> bool {
        let one = self.catalogue.partitions_of(partition.variable).len() == 1;
        one && partition.own_encoding.is_none() && !partition.is_sparse()
    }

    /// Returns all dense ranges of a shard's layout: the offset, the span and the length of each.
    pub(crate) fn shard_spans(
        &self,
        shard: ShardId,
    ) -> impl Iterator<Item = (u64, LayoutSpan, u64)> + '_ {
        let segments = self.shards.binary_search(&shard).map(|index| &self.segments[index][..]);
        let segments = segments.unwrap_or_default().iter();
        segments.map(|segment| (segment.start, segment.span, segment.bytes))
    }

    /// Replaces `spans` by the spans of a range of a shard's layout. Returns `None` if the range
    /// includes bytes that are not dense.
    pub(crate) fn spans(
        &self,
        shard: ShardId,
        range: Range<u64>,
        spans: &mut Vec<(LayoutSpan, usize)>,
    ) -> Option<()> {
        spans.clear();
        let segments = &self.segments[self.shards.binary_search(&shard).ok()?];
        let first =
            segments.partition_point(|segment| segment.start + segment.bytes <= range.start);
        let mut at = range.start;
        for segment in &segments[first..] {
            if at >= range.end {
                break;
            }
            let skip = at.checked_sub(segment.start)?;
            let bytes = (segment.bytes - skip).min(range.end - at);
            let span = match segment.span {
                LayoutSpan::Buffer(start) => LayoutSpan::Buffer(start + skip as usize),
                LayoutSpan::Halves(start) => LayoutSpan::Halves(start + skip as usize / 2),
                LayoutSpan::Padding => LayoutSpan::Padding,
            };
            spans.push((span, bytes as usize));
            at += bytes;
        }
        (at >= range.end).then_some(())
    }

    /// Cuts a range of a shard's layout into parts.
    pub(super) fn cut(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let end = range.end;
        let bytes = self.part_bytes;
        range.step_by(bytes as usize).map(move |start| start..end.min(start + bytes))
    }

    /// Cuts this many elements of a half type into parts.
    pub(crate) fn half_parts(
        &self,
        partition: &Partition,
        encoding: Encoding,
        count: usize,
    ) -> impl Iterator<Item = HalfPart> + use<> {
        let dtype = partition.dtype;
        let most = part_elements(encoding, ScaleBlocks::THROUGH, dtype, self.part_bytes);
        (0..count).step_by(most).map(move |start| {
            let end = count.min(start + most);
            let values = 2 * start..2 * end;
            let padding = encoding.bytes_max(dtype, end - start) - values.len();
            HalfPart { before: (start * dtype.size()) as u64, values, padding }
        })
    }
}

/// A part of the elements of a half type.
pub(crate) struct HalfPart {
    /// The bytes of the partition before it, as the shard keeps them.
    pub(crate) before: u64,
    /// Its range of the elements, in bytes as they are sent.
    pub(crate) values: Range<usize>,
    pub(crate) padding: usize,
}

/// Returns how many elements fit into one part, neither encoded nor plain longer than the limit.
/// Even, because parts start at multiples of 8 bytes.
pub(crate) fn part_elements(
    encoding: Encoding,
    blocks: ScaleBlocks,
    dtype: DType,
    part_bytes: u64,
) -> usize {
    let mut elements = part_bytes.min(PART_BYTES_MAX) as usize / dtype.size();
    while encoding.rows_bytes_max(blocks, dtype, elements) as u64 > PART_BYTES_MAX {
        elements /= 2;
    }
    (elements / 2 * 2).max(2)
}

fn segments(catalogue: &Catalogue, shard: ShardId, starts: &[usize]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut push = |next: Segment| match segments.last_mut() {
        Some(last) if joins(last, &next) => last.bytes += next.bytes,
        _ if next.bytes > 0 => segments.push(next),
        _ => {}
    };
    for partition in catalogue.layout(shard).partitions().iter().filter(|p| !p.is_sparse()) {
        let first = starts[partition.variable.0 as usize];
        let padded = partition.end() - partition.offset;
        let offset = partition.offset;
        let bytes = partition.bytes;
        if partition.own_encoding.is_some() {
            let span = LayoutSpan::Halves(first + 2 * partition.elements.start as usize);
            push(Segment { start: offset, bytes, span, whole: false });
            push(padding_at(offset + bytes, padded - bytes));
            continue;
        }
        if catalogue.partitions_of(partition.variable).len() == 1 {
            // The buffer includes its padding.
            let start = partition.offset;
            let span = LayoutSpan::Buffer(first);
            push(Segment { start, bytes: padded, span, whole: true });
            continue;
        }
        let start = first + partition.elements.start as usize * partition.dtype.size();
        push(Segment { start: offset, bytes, span: LayoutSpan::Buffer(start), whole: false });
        push(padding_at(offset + bytes, padded - bytes));
    }
    segments
}

fn padding_at(start: u64, bytes: u64) -> Segment {
    Segment { start, bytes, span: LayoutSpan::Padding, whole: false }
}

/// Whether two segments can be one. Gradients of unpartitioned variables may be in other memory
/// than the rest.
fn joins(last: &Segment, next: &Segment) -> bool {
    if last.start + last.bytes != next.start || last.whole != next.whole {
        return false;
    }
    match (last.span, next.span) {
        (LayoutSpan::Buffer(a), LayoutSpan::Buffer(b)) => a + last.bytes as usize == b,
        _ => false,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;

    pub(in super::super) fn plan(
        variables: Vec<VariableSpec>,
        tasks: u32,
        shards: u16,
    ) -> ShardingPlan {
        let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), shards).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn unpartitioned_variables_of_a_shard_are_one_span() {
        let names = ["w1", "b1", "w2", "b2"];
        let variables = names.map(|name| VariableSpec::f32(name, [3, 3]).unwrap());
        let plan = plan(variables.to_vec(), 2, 1);
        for &shard in plan.shards() {
            let bytes = plan.catalogue().layout(shard).bytes();
            let mut spans = Vec::new();
            plan.spans(shard, 0..bytes, &mut spans).unwrap();
            assert_eq!(spans.len(), 1);
            assert_eq!(plan.spans(shard, 0..bytes + 8, &mut spans), None);
        }
    }
}
