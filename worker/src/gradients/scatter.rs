//! The parts of a push of dense gradients: planned once, filled from a buffer at each push.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::Partition;
use pushpull_common::ids::{ShardId, VariableId};

use super::gradient_buffer::{GradientBuffer, PushBufferId};
use super::parts::{BodyPiece, EncodedRange, FrameBody, OutgoingPart, padding};
use super::sharding_plan::{LayoutSpan, ShardingPlan};

/// The plan of a push: the parts for each shard, and the pieces of the buffer that they consist of.
/// Computed once for pushes of the same variables.
#[derive(Debug)]
pub(crate) struct Scatter {
    shards: Vec<ShardParts>,
    pieces: Arc<[BodyPiece]>,
}

/// The parts for one shard.
#[derive(Debug)]
struct ShardParts {
    shard: ShardId,
    planned: Vec<PlannedPart>,
    /// The number of parts, from the first, that contain unpartitioned variables in the type that
    /// the shard keeps.
    unsplit_parts: usize,
    /// The ranges of the shard's layout that these parts cover.
    unsplit_ranges: Arc<[Range<u64>]>,
}

/// A part as it is in every push of the plan.
#[derive(Debug)]
struct PlannedPart {
    offset: u64,
    pieces: Range<usize>,
    /// The length of its body.
    bytes: u64,
    /// Its variable and its elements, if it is encoded.
    encoded: Option<(VariableId, EncodedRange)>,
}

impl Scatter {
    /// Plans the parts of a push of these variables. Variables of `f16` and `bf16` have separate
    /// parts.
    pub(crate) fn new(plan: &ShardingPlan, variables: impl Iterator<Item = VariableId>) -> Scatter {
        let all = plan.shards();
        let none: Vec<Vec<Range<u64>>> = vec![Vec::new(); all.len()];
        let mut unsplit = none.clone();
        let mut others = none;
        let mut halves: Vec<Vec<&Partition>> = vec![Vec::new(); all.len()];
        for partition in variables.flat_map(|id| plan.catalogue().partitions_of(id)) {
            let shard = all.binary_search(&partition.shard).expect("it holds a partition");
            match partition.own_encoding {
                None if plan.is_whole(partition) => {
                    unsplit[shard].push(partition.offset..partition.end());
                }
                None => others[shard].push(partition.offset..partition.end()),
                Some(_) => halves[shard].push(partition),
            }
        }
        let mut shards = Vec::new();
        let mut pieces = Vec::new();
        let ranges = unsplit.into_iter().zip(others);
        for ((&shard, (unsplit, others)), halves) in all.iter().zip(ranges).zip(halves) {
            let mut planned = Vec::new();
            let unsplit = merge(unsplit);
            plan_ranges(plan, shard, &unsplit, &mut pieces, &mut planned);
            let unsplit_parts = planned.len();
            plan_ranges(plan, shard, &merge(others), &mut pieces, &mut planned);
            for partition in halves {
                plan_halves(plan, partition, &mut pieces, &mut planned);
            }
            if !planned.is_empty() {
                let unsplit_ranges = unsplit.into();
                shards.push(ShardParts { shard, planned, unsplit_parts, unsplit_ranges });
            }
        }
        Scatter { shards, pieces: pieces.into() }
    }

    /// Returns the parts of a push, by shard. `body` returns the bytes of a range of the buffer.
    pub(crate) fn parts(
        &self,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Vec<(ShardId, Vec<OutgoingPart>)> {
        let bytes = |piece: &BodyPiece| match piece {
            BodyPiece::Buffer(range) => body(range.clone()),
            BodyPiece::Padding(bytes) => padding(*bytes),
        };
        let part = |part: &PlannedPart| {
            let body = self.pieces[part.pieces.clone()].iter().map(bytes).collect();
            part.part(body, &BTreeMap::new())
        };
        let parts = |of: &ShardParts| (of.shard, of.planned.iter().map(part).collect());
        self.shards.iter().map(parts).collect()
    }
}

/// Dense gradients in a buffer, with their plan.
#[derive(Clone, Debug)]
pub(crate) struct ScatteredGradients {
    pub(crate) scatter: Arc<Scatter>,
    pub(crate) buffer: Arc<GradientBuffer>,
    /// The factors by which the servers multiply gradients of half types, where that is not 1.
    pub(crate) factors: BTreeMap<VariableId, f64>,
}

impl ScatteredGradients {
    /// Returns the shards that have a part.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.scatter.shards.iter().map(|of| of.shard)
    }

    /// Returns the parts for a shard, by its index in [`ScatteredGradients::shards`].
    pub(crate) fn parts(&self, shard: usize) -> impl Iterator<Item = OutgoingPart> + '_ {
        self.scatter.shards[shard].planned.iter().map(|part| {
            let pieces = self.scatter.pieces.clone();
            let buffer = self.buffer.clone();
            let range = part.pieces.clone();
            let bytes = part.bytes;
            part.part(FrameBody::Pieces { buffer, pieces, range, bytes }, &self.factors)
        })
    }

    /// Returns what of the parts for a shard is in a slot of its push buffer. `behind` is the
    /// number of other parts that precede these parts.
    pub(crate) fn in_push_buffer(&self, shard: usize, behind: usize) -> Option<PushBufferParts> {
        let ShardParts { shard, unsplit_parts, unsplit_ranges, .. } = &self.scatter.shards[shard];
        let slot = self.buffer.slot_of(*shard)?;
        (*unsplit_parts > 0).then(|| PushBufferParts {
            push_buffer: slot.push_buffer,
            push_slot: slot.number,
            ranges: unsplit_ranges.clone(),
            parts: behind..behind + unsplit_parts,
            buffer: self.buffer.clone(),
        })
    }
}

/// The parts of a push that are in a slot of the shard's push buffer, so the session names them
/// instead of sending them.
#[derive(Clone, Debug)]
pub(crate) struct PushBufferParts {
    pub(crate) push_buffer: PushBufferId,
    pub(crate) push_slot: u32,
    /// Their ranges of the shard's layout.
    pub(crate) ranges: Arc<[Range<u64>]>,
    /// Their indices among the parts of the push; these are sent instead if the slot cannot be
    /// named.
    pub(crate) parts: Range<usize>,
    /// Owns the slot.
    pub(crate) buffer: Arc<GradientBuffer>,
}

impl PlannedPart {
    fn part(&self, body: FrameBody, factors: &BTreeMap<VariableId, f64>) -> OutgoingPart {
        let encoded = self.encoded.map(|(variable, range)| EncodedRange {
            factor: factors.get(&variable).copied().unwrap_or(1.0),
            ..range
        });
        OutgoingPart { offset: self.offset, body, encoded }
    }
}

/// Adds the parts of ranges of a shard's layout that are sent unencoded.
fn plan_ranges(
    plan: &ShardingPlan,
    shard: ShardId,
    ranges: &[Range<u64>],
    pieces: &mut Vec<BodyPiece>,
    planned: &mut Vec<PlannedPart>,
) {
    let mut spans = Vec::new();
    for range in ranges.iter().flat_map(|range| plan.cut(range.clone())) {
        let first = pieces.len();
        // Dense variables are within the plan's spans.
        let _ = plan.spans(shard, range.clone(), &mut spans);
        pieces.extend(spans.iter().filter_map(|&(span, bytes)| match span {
            LayoutSpan::Buffer(start) => Some(BodyPiece::Buffer(start..start + bytes)),
            // Only values in the type of the shard are sent by ranges.
            LayoutSpan::Halves(_) => None,
            LayoutSpan::Padding => Some(BodyPiece::Padding(bytes)),
        }));
        let offset = range.start;
        let bytes = range.end - range.start;
        planned.push(PlannedPart { offset, pieces: first..pieces.len(), bytes, encoded: None });
    }
}

/// Adds the parts of a partition of `f16` or `bf16`.
fn plan_halves(
    plan: &ShardingPlan,
    partition: &Partition,
    pieces: &mut Vec<BodyPiece>,
    planned: &mut Vec<PlannedPart>,
) {
    let Some(encoding) = partition.own_encoding else { return };
    let id = partition.variable;
    let elements = &partition.elements;
    let count = (elements.end - elements.start) as usize;
    let first = plan.range(id).start + 2 * elements.start as usize;
    for half in plan.half_parts(partition, encoding, count) {
        let place = pieces.len();
        let values = first + half.values.start..first + half.values.end;
        pieces.push(BodyPiece::Buffer(values));
        pieces.extend(Some(BodyPiece::Padding(half.padding)).filter(|_| half.padding > 0));
        let encoded = Some((id, EncodedRange::of(partition, half.values.len() / 2, encoding)));
        let bytes = (half.values.len() + half.padding) as u64;
        let offset = partition.offset + half.before;
        planned.push(PlannedPart { offset, pieces: place..pieces.len(), bytes, encoded });
    }
}

/// Sorts ranges, and merges those that touch.
fn merge(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::sharding_plan::tests::plan;

    fn parts_of(
        plan: &ShardingPlan,
        variables: impl Iterator<Item = VariableId>,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Vec<(ShardId, Vec<OutgoingPart>)> {
        Scatter::new(plan, variables).parts(body)
    }

    #[test]
    fn large_variables_are_sent_in_parts() {
        let plan = plan(vec![VariableSpec::f32("w", [700_001]).unwrap()], 1, 1);
        let buffer = Bytes::from(vec![0; plan.bytes()]);
        let parts = parts_of(&plan, [VariableId(0)].into_iter(), |range| buffer.slice(range));
        let sizes: Vec<u64> = parts[0].1.iter().map(OutgoingPart::bytes).collect();
        assert_eq!(sizes, [1 << 20, 1 << 20, 2_800_008 - (2 << 20)]);
    }

    #[test]
    fn halves_take_half_the_bytes_and_are_sent_unchanged() {
        let halves = VariableSpec::bf16("h", [700_001]).unwrap();
        let plan = plan(vec![VariableSpec::f32("w", [1]).unwrap(), halves], 1, 1);
        assert_eq!(
            (plan.bytes(), plan.catalogue().layout(plan.shards()[0]).bytes()),
            (1_400_016, 2_800_016)
        );
        let buffer = Bytes::from(vec![0; plan.bytes()]);
        let parts =
            parts_of(&plan, [VariableId(1), VariableId(0)].into_iter(), |r| buffer.slice(r));
        let sizes: Vec<(u64, usize)> =
            parts[0].1.iter().map(|p| (p.bytes(), p.body.bytes() as usize)).collect();
        let last = 2_800_008 - (2 << 20);
        assert_eq!(sizes, [(8, 8), (1 << 20, 1 << 19), (1 << 20, 1 << 19), (last, 351_432)]);
        assert!(plan.has_halves(plan.shards()[0]));
    }

    proptest! {
        /// A buffer that is sent in parts and received by ranges is unchanged.
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
                    let name = format!("v{i}");
                    let extents = [rows, width];
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
            for (shard, parts) in parts_of(&plan, ids.iter().copied(), |range| sent.slice(range)) {
                for part in parts {
                    let body = part.body.concat();
                    let range = part.offset..part.offset + part.bytes();
                    let mut rest = &body[..];
                    let mut spans = Vec::new();
                    plan.spans(shard, range, &mut spans).unwrap();
                    for (span, bytes) in spans {
                        let taken = match span {
                            LayoutSpan::Halves(_) => bytes / 2,
                            // The padding of halves differs between the shard's layout and the
                            // frame.
                            LayoutSpan::Padding if part.encoded.is_some() => rest.len(),
                            _ => bytes,
                        };
                        let (head, tail) = rest.split_at(taken);
                        if let LayoutSpan::Buffer(start) | LayoutSpan::Halves(start) = span {
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
