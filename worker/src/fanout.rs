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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// Where it starts in the shard's layout.
    start: u64,
    bytes: u64,
    span: Span,
}

/// Where everything lies: made once at join.
///
/// Invariants: the segments of a shard follow each other and cover what is not sparse of its layout;
/// the stretches of the buffer do not overlap.
#[derive(Debug)]
pub(crate) struct Plan {
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

/// One part of a push for one shard.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Where it starts in the shard's layout.
    pub(crate) offset: u64,
    /// Its body, in order.
    pub(crate) bodies: Vec<Bytes>,
    /// What the body is, if it is encoded.
    pub(crate) encoded: Option<Stretch>,
}

/// Elements that are encoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    pub(crate) encoding: Encoding,
    pub(crate) elements: u32,
    /// The bytes they take in the shard's layout.
    pub(crate) bytes: u64,
    /// What the shard multiplies them with.
    pub(crate) factor: f64,
}

impl Part {
    /// A part whose body is as it is.
    fn plain(offset: u64, bodies: Vec<Bytes>) -> Part {
        Part { offset, bodies, encoded: None }
    }

    /// A part whose body is a stretch of a partition: so many elements, behind so many bytes of others.
    pub(crate) fn stretch(
        partition: &Partition,
        before: u64,
        elements: usize,
        encoding: Encoding,
        bodies: Vec<Bytes>,
    ) -> Part {
        let stretch = Stretch {
            encoding,
            elements: elements as u32,
            // The padding behind the last element counts.
            bytes: (elements * partition.dtype.size()).next_multiple_of(8) as u64,
            factor: 1.0,
        };
        Part { offset: partition.offset + before, bodies, encoded: Some(stretch) }
    }

    /// How much of the shard's layout it covers, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.encoded {
            Some(stretch) => stretch.bytes,
            None => self.bodies.iter().map(|body| body.len() as u64).sum(),
        }
    }
}

static PADDING: [u8; 8] = [0; 8];

impl Plan {
    pub(crate) fn new(catalogue: Arc<Catalogue>) -> Plan {
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
        Plan { catalogue, shards, segments, starts, bytes, part_bytes, with_halves }
    }

    /// The same with smaller parts, so that small variables travel in several.
    #[cfg(feature = "simulation")]
    pub(crate) fn with_parts_of(self, bytes: u64) -> Plan {
        Plan { part_bytes: bytes, ..self }
    }

    pub(crate) fn catalogue(&self) -> &Arc<Catalogue> {
        &self.catalogue
    }

    /// Whether buffers of the one plan are buffers of the other: a plan follows from its catalogue.
    pub(crate) fn is_same(&self, other: &Plan) -> bool {
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

    /// The stretches that a range of a shard's layout is made of; `None` if it reaches beyond what is
    /// not sparse.
    pub(crate) fn spans(&self, shard: ShardId, range: Range<u64>) -> Option<Vec<(Span, usize)>> {
        let segments = &self.segments[self.shards.binary_search(&shard).ok()?];
        let first =
            segments.partition_point(|segment| segment.start + segment.bytes <= range.start);
        let (mut at, mut spans) = (range.start, Vec::new());
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
        (at >= range.end).then_some(spans)
    }

    /// The parts in which these variables travel, by shard; `body` lends a stretch of the buffer.
    /// Variables of `f16` and `bf16` have parts of their own.
    pub(crate) fn parts(
        &self,
        variables: impl Iterator<Item = VariableId>,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Vec<(ShardId, Vec<Part>)> {
        self.scaled_parts(variables, |_| 1.0, body)
    }

    /// The same, with what the shards multiply variables of `f16` and `bf16` with.
    pub(crate) fn scaled_parts(
        &self,
        variables: impl Iterator<Item = VariableId>,
        factor: impl Fn(VariableId) -> f64,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Vec<(ShardId, Vec<Part>)> {
        let mut ranges: Vec<Vec<Range<u64>>> = vec![Vec::new(); self.shards.len()];
        let mut halves: Vec<Vec<Part>> = vec![Vec::new(); self.shards.len()];
        for partition in variables.flat_map(|id| self.catalogue.partitions_of(id)) {
            let shard = self.shards.binary_search(&partition.shard).expect("it holds a partition");
            match partition.own {
                None => ranges[shard].push(partition.offset..partition.end()),
                Some(own) => {
                    let (id, elements) = (partition.variable, &partition.elements);
                    let count = (elements.end - elements.start) as usize;
                    let start = self.starts[id.0 as usize] + 2 * elements.start as usize;
                    let body = |range: Range<usize>| body(start + range.start..start + range.end);
                    halves[shard].extend(self.halves(partition, own, factor(id), count, body));
                }
            }
        }
        let mut by_shard = Vec::new();
        for ((&shard, mut ranges), halves) in self.shards.iter().zip(ranges).zip(halves) {
            ranges.sort_by_key(|range| range.start);
            ranges.retain(|range| !range.is_empty());
            ranges.dedup_by(|next, range| {
                let touches = range.end == next.start;
                if touches {
                    range.end = next.end;
                }
                touches
            });
            let parts: Vec<Part> = ranges
                .into_iter()
                .flat_map(|range| cut(range, self.part_bytes))
                .map(|range| self.part(shard, range, &body))
                .chain(halves)
                .collect();
            if !parts.is_empty() {
                by_shard.push((shard, parts));
            }
        }
        by_shard
    }

    /// The parts in which bytes travel to a place in what is pushed, with padding behind them.
    pub(crate) fn cut(&self, offset: u64, bytes: Bytes, padding: usize) -> Vec<Part> {
        let length = (bytes.len() + padding) as u64;
        let part = |range: Range<u64>| {
            let (start, end) = (range.start as usize, range.end as usize);
            let held = start.min(bytes.len())..end.min(bytes.len());
            let padding = Bytes::from_static(&PADDING).slice(..end - start - held.len());
            let bodies = [bytes.slice(held), padding].into_iter();
            Part::plain(offset + range.start, bodies.filter(|b| !b.is_empty()).collect())
        };
        cut(0..length, self.part_bytes).map(part).collect()
    }

    /// The parts in which the first elements of a partition travel, so many, which lie here as they
    /// travel; `body` lends bytes of them. The shard multiplies them with `factor`.
    pub(crate) fn halves(
        &self,
        partition: &Partition,
        own: Encoding,
        factor: f64,
        count: usize,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> impl Iterator<Item = Part> {
        let most = stretch_elements(own, Blocks::THROUGH, partition.dtype, self.part_bytes);
        (0..count).step_by(most).map(move |start| {
            let end = count.min(start + most);
            let values = body(2 * start..2 * end);
            let padding = own.bytes_max(partition.dtype, end - start) - values.len();
            let padding = Bytes::from_static(&PADDING).slice(..padding);
            let (before, bodies) = (start * partition.dtype.size(), vec![values, padding]);
            let mut part = Part::stretch(partition, before as u64, end - start, own, bodies);
            part.encoded.iter_mut().for_each(|stretch| stretch.factor = factor);
            part
        })
    }

    fn part(
        &self,
        shard: ShardId,
        range: Range<u64>,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Part {
        let spans = self.spans(shard, range.clone()).unwrap_or_default();
        let bodies = spans.into_iter().map(|(span, bytes)| match span {
            Span::Buffer(start) => body(start..start + bytes),
            // Only what lies in the buffer as the shard keeps it travels by ranges.
            Span::Halves(_) => Bytes::new(),
            Span::Padding => Bytes::from_static(&PADDING).slice(..bytes),
        });
        Part::plain(range.start, bodies.collect())
    }
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
            push(Segment { start: offset, bytes, span });
            push(Segment { start: offset + bytes, bytes: padded - bytes, span: Span::Padding });
            continue;
        }
        if catalogue.partitions_of(partition.variable).len() == 1 {
            // Its padding is in the buffer too.
            push(Segment { start: partition.offset, bytes: padded, span: Span::Buffer(first) });
            continue;
        }
        let start = first + partition.elements.start as usize * partition.dtype.size();
        push(Segment { start: offset, bytes, span: Span::Buffer(start) });
        push(Segment { start: offset + bytes, bytes: padded - bytes, span: Span::Padding });
    }
    segments
}

fn joins(last: &Segment, next: &Segment) -> bool {
    if last.start + last.bytes != next.start {
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
    use pushpull_common::placement::{Placement, ShardMap, Strategy};
    use pushpull_common::variable::VariableSpec;

    use super::*;

    fn plan(variables: Vec<VariableSpec>, tasks: u32, shards: u16) -> Plan {
        let map = ShardMap::new((0..tasks).collect::<Vec<_>>(), shards).unwrap();
        let placement = Placement::plan(&variables, &map, &Strategy::RoundRobin).unwrap();
        Plan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn unpartitioned_variables_of_a_shard_are_one_stretch() {
        let names = ["w1", "b1", "w2", "b2"];
        let variables = names.map(|name| VariableSpec::f32(name, [3, 3]).unwrap());
        let plan = plan(variables.to_vec(), 2, 1);
        for &shard in plan.shards() {
            let bytes = plan.catalogue().layout(shard).bytes();
            assert_eq!(plan.spans(shard, 0..bytes).unwrap().len(), 1);
            assert_eq!(plan.spans(shard, 0..bytes + 8), None);
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
            parts[0].1.iter().map(|p| (p.bytes(), p.bodies.iter().map(Bytes::len).sum())).collect();
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
                    let body: Vec<u8> = part.bodies.concat();
                    let range = part.offset..part.offset + part.bytes();
                    let mut rest = &body[..];
                    for (span, bytes) in plan.spans(shard, range).unwrap() {
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
