//! Splitting by placement: which bytes of a worker's buffer go to, or come from, which range of
//! which shard.
//!
//! A buffer holds every variable whole that is not sparse. A variable in one piece lies where it lies on its shard,
//! so that all of a shard's variables are usually one stretch on both sides; a partitioned one
//! lies behind those, and its parts are gathered and scattered.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::codec::{Blocks, Encoding};
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::tensor::DType;

use crate::parts::{Cut, Part, Piece, Scatter, ShardCuts, Stretch};
use crate::push_buffers::Run;

/// What a stretch of a shard's layout is on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// A stretch of the buffer, from this byte on.
    Buffer(usize),
    /// The same of a variable of `f16` or `bf16`: half as many bytes as the shard keeps.
    Halves(usize),
    /// The padding behind a partition.
    Padding,
}

impl Span {
    /// The same of a buffer that begins at this byte of one of all variables, and does not end before it.
    pub(crate) fn behind(self, base: usize) -> Span {
        match self {
            Span::Buffer(start) => Span::Buffer(start - base),
            Span::Halves(start) => Span::Halves(start - base),
            Span::Padding => Span::Padding,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// Where it starts in the shard's layout.
    start: u64,
    bytes: u64,
    span: Span,
    /// Whether it is of variables that are in one piece, with what pads them.
    whole: bool,
}

/// Where everything lies: made once at join.
///
/// Invariants: the segments of a shard follow each other and cover what is not sparse of its layout;
/// the stretches of the buffer do not overlap.
#[derive(Debug)]
pub(crate) struct ShardingPlan {
    catalogue: Arc<Catalogue>,
    shards: Vec<ShardId>,
    segments: Vec<Vec<Segment>>,
    /// Where each variable starts in the buffer.
    starts: Vec<usize>,
    bytes: usize,
    part_bytes: u64,
    /// The shards that hold variables of `f16` or `bf16` that are not sparse.
    with_halves: BTreeSet<ShardId>,
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
        let halves = catalogue.partitions().iter().filter(|p| p.own.is_some() && !p.is_sparse());
        let with_halves = halves.map(|partition| partition.shard).collect();
        let part_bytes = PART_BYTES_MAX;
        ShardingPlan { catalogue, shards, segments, starts, bytes, part_bytes, with_halves }
    }

    /// The same with smaller parts, so that small variables travel in several.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn with_parts_of(self, bytes: u64) -> ShardingPlan {
        ShardingPlan { part_bytes: bytes, ..self }
    }

    pub(crate) fn catalogue(&self) -> &Arc<Catalogue> {
        &self.catalogue
    }

    /// Whether buffers of the one plan are buffers of the other: a plan follows from its catalogue.
    pub(crate) fn is_same(&self, other: &ShardingPlan) -> bool {
        std::ptr::eq(self, other) || self.catalogue.digest() == other.catalogue.digest()
    }

    /// The shards that hold something.
    pub(crate) fn shards(&self) -> &[ShardId] {
        &self.shards
    }

    /// The length of a buffer for all variables, in bytes; a multiple of 8.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The most of a shard's layout that a part may cover, in bytes.
    pub(crate) fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// Whether some variable of `f16` or `bf16` is not sparse.
    pub(crate) fn has_some_halves(&self) -> bool {
        !self.with_halves.is_empty()
    }

    /// Whether a shard holds variables of `f16` or `bf16` that are not sparse: its values come in their own
    /// type.
    pub(crate) fn has_halves(&self, shard: ShardId) -> bool {
        self.with_halves.contains(&shard)
    }

    /// Where a variable lies in a buffer, in bytes; nowhere if it is sparse.
    pub(crate) fn range(&self, id: VariableId) -> Range<usize> {
        if self.catalogue.variable(id).is_sparse() {
            return 0..0;
        }
        let start = self.starts[id.0 as usize];
        start..start + self.catalogue.variable(id).bytes() as usize
    }

    /// Where the first byte of a shard's layout from this one on is that is not sparse; `None` behind
    /// the last.
    pub(crate) fn next_value(&self, shard: ShardId, from: u64) -> Option<u64> {
        let segments = &self.segments[self.shards.binary_search(&shard).ok()?];
        let next = segments.partition_point(|segment| segment.start + segment.bytes <= from);
        segments.get(next).map(|segment| segment.start.max(from))
    }

    /// The runs of those of these variables that are in one piece and that shards keep as they lie in a
    /// buffer, in rising order.
    pub(crate) fn runs(&self, row_requests: impl Fn(VariableId) -> bool) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for &shard in &self.shards {
            let layout = self.catalogue.layout(shard);
            let partitions = layout.partitions().iter();
            for partition in partitions.filter(|p| self.is_whole(p) && row_requests(p.variable)) {
                let start = self.starts[partition.variable.0 as usize];
                let bytes = (partition.end() - partition.offset) as usize;
                let touches = |last: &&mut Run| {
                    let behind = last.there + last.here.len() as u64;
                    last.shard == shard && last.here.end == start && behind == partition.offset
                };
                match runs.last_mut().filter(touches) {
                    Some(last) => last.here.end += bytes,
                    None if bytes == 0 => {}
                    None => {
                        let (here, there) = (start..start + bytes, partition.offset);
                        runs.push(Run { shard, here, there });
                    }
                }
            }
        }
        runs
    }

    /// Whether a shard keeps some variable whole, as it lies in a buffer.
    pub(crate) fn keeps_some_whole(&self, shard: ShardId) -> bool {
        let segments = self.shards.binary_search(&shard).map(|index| &self.segments[index][..]);
        segments.unwrap_or_default().iter().any(|segment| segment.whole)
    }

    /// Whether a partition is all of its variable, and kept as it lies in a buffer.
    fn is_whole(&self, partition: &Partition) -> bool {
        let one = self.catalogue.partitions_of(partition.variable).len() == 1;
        one && partition.own.is_none() && !partition.is_sparse()
    }

    /// All stretches of a shard's layout that are not sparse: where each starts there, what it is here, and
    /// its length there.
    pub(crate) fn stretches(&self, shard: ShardId) -> impl Iterator<Item = (u64, Span, u64)> + '_ {
        let segments = self.shards.binary_search(&shard).map(|index| &self.segments[index][..]);
        let segments = segments.unwrap_or_default().iter();
        segments.map(|segment| (segment.start, segment.span, segment.bytes))
    }

    /// Lists the stretches that a range of a shard's layout is made of, in place of what was listed;
    /// `None` if it reaches beyond what is not sparse.
    pub(crate) fn spans(
        &self,
        shard: ShardId,
        range: Range<u64>,
        spans: &mut Vec<(Span, usize)>,
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
                Span::Buffer(start) => Span::Buffer(start + skip as usize),
                Span::Halves(start) => Span::Halves(start + skip as usize / 2),
                Span::Padding => Span::Padding,
            };
            spans.push((span, bytes as usize));
            at += bytes;
        }
        (at >= range.end).then_some(())
    }

    /// How these variables travel. Those of `f16` and `bf16` have parts of their own.
    pub(crate) fn scatter(&self, variables: impl Iterator<Item = VariableId>) -> Scatter {
        let none: Vec<Vec<Range<u64>>> = vec![Vec::new(); self.shards.len()];
        let (mut whole, mut others) = (none.clone(), none);
        let mut halves: Vec<Vec<&Partition>> = vec![Vec::new(); self.shards.len()];
        for partition in variables.flat_map(|id| self.catalogue.partitions_of(id)) {
            let shard = self.shards.binary_search(&partition.shard).expect("it holds a partition");
            match partition.own {
                None if self.is_whole(partition) => {
                    whole[shard].push(partition.offset..partition.end());
                }
                None => others[shard].push(partition.offset..partition.end()),
                Some(_) => halves[shard].push(partition),
            }
        }
        let (mut shards, mut pieces) = (Vec::new(), Vec::new());
        let ranges = whole.into_iter().zip(others);
        for ((&shard, (whole, others)), halves) in self.shards.iter().zip(ranges).zip(halves) {
            let mut cuts = Vec::new();
            let whole = joined(whole);
            self.range_cuts(shard, &whole, &mut pieces, &mut cuts);
            let wholes = cuts.len();
            self.range_cuts(shard, &joined(others), &mut pieces, &mut cuts);
            for partition in halves {
                self.half_cuts(partition, &mut pieces, &mut cuts);
            }
            if !cuts.is_empty() {
                let whole = whole.into();
                shards.push(ShardCuts { shard, cuts, wholes, whole });
            }
        }
        Scatter { shards, pieces: pieces.into() }
    }

    /// The parts that ranges of a shard's layout travel in as they are.
    fn range_cuts(
        &self,
        shard: ShardId,
        ranges: &[Range<u64>],
        pieces: &mut Vec<Piece>,
        cuts: &mut Vec<Cut>,
    ) {
        let ranges = ranges.iter().flat_map(|range| cut(range.clone(), self.part_bytes));
        cuts.extend(ranges.map(|range| self.range_cut(shard, range, pieces)));
    }

    /// A part that is a range of a shard's layout as it is.
    fn range_cut(&self, shard: ShardId, range: Range<u64>, pieces: &mut Vec<Piece>) -> Cut {
        let first = pieces.len();
        let mut spans = Vec::new();
        // Variables that are not sparse lie within the segments, all of them.
        let _ = self.spans(shard, range.clone(), &mut spans);
        pieces.extend(spans.into_iter().filter_map(|(span, bytes)| match span {
            Span::Buffer(start) => Some(Piece::Buffer(start..start + bytes)),
            // Only what lies in the buffer as the shard keeps it travels by ranges.
            Span::Halves(_) => None,
            Span::Padding => Some(Piece::Padding(bytes)),
        }));
        let (offset, bytes) = (range.start, range.end - range.start);
        Cut { offset, pieces: first..pieces.len(), bytes, stretch: None }
    }

    /// The parts in which a partition of `f16` or `bf16` travels.
    fn half_cuts(&self, partition: &Partition, pieces: &mut Vec<Piece>, cuts: &mut Vec<Cut>) {
        let Some(own) = partition.own else { return };
        let (id, elements) = (partition.variable, &partition.elements);
        let count = (elements.end - elements.start) as usize;
        let first = self.starts[id.0 as usize] + 2 * elements.start as usize;
        for half in self.half_parts(partition, own, count) {
            let (place, values) =
                (pieces.len(), first + half.values.start..first + half.values.end);
            pieces.push(Piece::Buffer(values));
            pieces.extend(Some(Piece::Padding(half.padding)).filter(|_| half.padding > 0));
            let stretch = Some((id, Stretch::of(partition, half.values.len() / 2, own)));
            let bytes = (half.values.len() + half.padding) as u64;
            let offset = partition.offset + half.before;
            cuts.push(Cut { offset, pieces: place..pieces.len(), bytes, stretch });
        }
    }

    /// The parts in which these variables travel, by shard; `body` lends a stretch of the buffer.
    pub(crate) fn parts(
        &self,
        variables: impl Iterator<Item = VariableId>,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Vec<(ShardId, Vec<Part>)> {
        self.scatter(variables).parts(body)
    }

    /// Cuts so many bytes into parts.
    pub(crate) fn cut(&self, bytes: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        cut(0..bytes, self.part_bytes)
    }

    /// How so many elements of a half type are cut into parts.
    pub(crate) fn half_parts(
        &self,
        partition: &Partition,
        own: Encoding,
        count: usize,
    ) -> impl Iterator<Item = HalfPart> + use<> {
        let dtype = partition.dtype;
        let most = stretch_elements(own, Blocks::THROUGH, dtype, self.part_bytes);
        (0..count).step_by(most).map(move |start| {
            let end = count.min(start + most);
            let values = 2 * start..2 * end;
            let padding = own.bytes_max(dtype, end - start) - values.len();
            HalfPart { before: (start * dtype.size()) as u64, values, padding }
        })
    }
}

/// A part of elements of a half type.
pub(crate) struct HalfPart {
    /// How many bytes of the partition come before it, as the shard keeps them.
    pub(crate) before: u64,
    /// Its bytes among the elements as they travel.
    pub(crate) values: Range<usize>,
    pub(crate) padding: usize,
}

/// Ranges in their order, those that touch as one.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    ranges.retain(|range| !range.is_empty());
    ranges.dedup_by(|next, range| {
        let touches = range.end == next.start;
        if touches {
            range.end = next.end;
        }
        touches
    });
    ranges
}

/// How many elements travel in one part: neither they nor what they are encoded as may be longer than
/// a part. Even, so that each starts where the shard takes parts.
pub(crate) fn stretch_elements(
    encoding: Encoding,
    blocks: Blocks,
    dtype: DType,
    part_bytes: u64,
) -> usize {
    let mut elements = part_bytes.min(PART_BYTES_MAX) as usize / dtype.size();
    while encoding.rows_bytes_max(blocks, dtype, elements) as u64 > PART_BYTES_MAX {
        elements /= 2;
    }
    (elements / 2 * 2).max(2)
}

/// Cuts a range into parts of at most so many bytes.
fn cut(range: Range<u64>, bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(bytes as usize).map(move |start| start..end.min(start + bytes))
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
        let (offset, bytes) = (partition.offset, partition.bytes);
        if partition.own.is_some() {
            let span = Span::Halves(first + 2 * partition.elements.start as usize);
            push(Segment { start: offset, bytes, span, whole: false });
            push(padding_at(offset + bytes, padded - bytes));
            continue;
        }
        if catalogue.partitions_of(partition.variable).len() == 1 {
            // Its padding is in the buffer too.
            let (start, span) = (partition.offset, Span::Buffer(first));
            push(Segment { start, bytes: padded, span, whole: true });
            continue;
        }
        let start = first + partition.elements.start as usize * partition.dtype.size();
        push(Segment { start: offset, bytes, span: Span::Buffer(start), whole: false });
        push(padding_at(offset + bytes, padded - bytes));
    }
    segments
}

fn padding_at(start: u64, bytes: u64) -> Segment {
    Segment { start, bytes, span: Span::Padding, whole: false }
}

/// Whether two are one. Gradients of variables in one piece may lie in a memory of their own.
fn joins(last: &Segment, next: &Segment) -> bool {
    if last.start + last.bytes != next.start || last.whole != next.whole {
        return false;
    }
    match (last.span, next.span) {
        (Span::Buffer(a), Span::Buffer(b)) => a + last.bytes as usize == b,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::variable::VariableSpec;

    use super::*;

    fn plan(variables: Vec<VariableSpec>, tasks: u32, shards: u16) -> ShardingPlan {
        let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), shards).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn unpartitioned_variables_of_a_shard_are_one_stretch() {
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

    #[test]
    fn large_variables_travel_in_parts() {
        let plan = plan(vec![VariableSpec::f32("w", [700_001]).unwrap()], 1, 1);
        let buffer = Bytes::from(vec![0; plan.bytes()]);
        let parts = plan.parts([VariableId(0)].into_iter(), |range| buffer.slice(range));
        let sizes: Vec<u64> = parts[0].1.iter().map(Part::bytes).collect();
        assert_eq!(sizes, [1 << 20, 1 << 20, 2_800_008 - (2 << 20)]);
    }

    #[test]
    fn halves_take_half_the_room_and_travel_as_they_lie() {
        let halves = VariableSpec::bf16("h", [700_001]).unwrap();
        let plan = plan(vec![VariableSpec::f32("w", [1]).unwrap(), halves], 1, 1);
        assert_eq!(
            (plan.bytes(), plan.catalogue().layout(plan.shards()[0]).bytes()),
            (1_400_016, 2_800_016)
        );
        let buffer = Bytes::from(vec![0; plan.bytes()]);
        let parts = plan.parts([VariableId(1), VariableId(0)].into_iter(), |r| buffer.slice(r));
        let sizes: Vec<(u64, usize)> =
            parts[0].1.iter().map(|p| (p.bytes(), p.body.bytes() as usize)).collect();
        let last = 2_800_008 - (2 << 20);
        assert_eq!(sizes, [(8, 8), (1 << 20, 1 << 19), (1 << 20, 1 << 19), (last, 351_432)]);
        assert!(plan.has_halves(plan.shards()[0]));
    }

    proptest! {
        /// Sending a buffer in parts and receiving those ranges gives the buffer back.
        #[test]
        fn parts_and_spans_are_inverse(
            variables in prop::collection::vec((1u64..9, 1u64..5, 1u32..5, 0..3), 1..12),
            tasks in 1u32..4,
            shards in 1u16..3,
        ) {
            let variables: Vec<VariableSpec> = variables
                .into_iter()
                .enumerate()
                .map(|(i, (rows, width, parts, kind))| {
                    let (name, extents) = (format!("v{i}"), [rows, width]);
                    let spec = match kind {
                        0 => VariableSpec::f16(name, extents).unwrap(),
                        1 => VariableSpec::bf16(name, extents).unwrap(),
                        _ => VariableSpec::f32(name, extents).unwrap(),
                    };
                    spec.partitioner(Partitioner::Fixed { shards: parts })
                })
                .collect();
            let ids: Vec<VariableId> = (0..variables.len() as u32).map(VariableId).collect();
            let plan = plan(variables, tasks, shards);
            let sent = Bytes::from((0..plan.bytes()).map(|i| i as u8).collect::<Vec<u8>>());
            let mut received = vec![0; plan.bytes()];
            for (shard, parts) in plan.parts(ids.iter().copied(), |range| sent.slice(range)) {
                for part in parts {
                    let body = part.body.concat();
                    let range = part.offset..part.offset + part.bytes();
                    let mut rest = &body[..];
                    let mut spans = Vec::new();
                    plan.spans(shard, range, &mut spans).unwrap();
                    for (span, bytes) in spans {
                        let taken = match span {
                            Span::Halves(_) => bytes / 2,
                            // What pads halves where they are kept is not what pads them on the way.
                            Span::Padding if part.encoded.is_some() => rest.len(),
                            _ => bytes,
                        };
                        let (head, tail) = rest.split_at(taken);
                        if let Span::Buffer(start) | Span::Halves(start) = span {
                            received[start..start + taken].copy_from_slice(head);
                        }
                        rest = tail;
                    }
                    prop_assert!(rest.iter().all(|&byte| byte == 0) && rest.len() < 8);
                    prop_assert!(rest.is_empty() || part.encoded.is_some());
                }
            }
            for id in ids {
                prop_assert_eq!(&received[plan.range(id)], &sent[plan.range(id)]);
            }
        }
    }
}
