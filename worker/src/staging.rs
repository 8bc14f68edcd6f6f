//! Parts that are made for one push, in reusable memory.

use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::rows;

use crate::parts::{BodySource, EncodedRange, FrameBody, OutgoingPart};
use crate::rows::RowGradients;
use crate::sharding_plan::ShardingPlan;

/// The parts that are made for one push. First they are made; then the push shares them with the
/// session until it has sent them.
#[derive(Clone, Debug, Default)]
pub(crate) struct StagedParts {
    /// The gradients of sparse variables.
    pub(crate) rows: RowGradients,
    /// Encoded gradients, and variables of streamed pushes. Their parts follow those of the rows.
    pub(crate) copies: PartBuffer,
}

impl StagedParts {
    /// Removes everything.
    pub(crate) fn empty(&mut self) {
        self.rows.empty();
        self.copies.empty();
    }

    /// Whether there is no part to send.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.buffer.parts.is_empty() && self.copies.parts.is_empty()
    }

    /// Returns all parts with their shards.
    pub(crate) fn parts(self: &Arc<Self>) -> impl Iterator<Item = (ShardId, OutgoingPart)> {
        let all = self.rows.buffer.parts.iter().chain(&*self.copies.parts);
        all.enumerate().map(|(which, part)| {
            let body = FrameBody::Stored { source: self.clone(), index: which };
            (part.shard, OutgoingPart { offset: part.offset, body, encoded: part.encoded })
        })
    }
}

impl BodySource for StagedParts {
    fn body(&self, which: usize) -> (&[u8], usize) {
        let rows = &self.rows.buffer;
        match which.checked_sub(rows.parts.len()) {
            None => rows.body(which),
            Some(which) => self.copies.body(which),
        }
    }
}

/// Bytes, and parts of a push that consist of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PartBuffer {
    pub(crate) bytes: Vec<u8>,
    parts: Vec<StagedPart>,
}

/// A part, with its range of the bytes.
#[derive(Clone, Debug)]
struct StagedPart {
    shard: ShardId,
    offset: u64,
    body: Range<usize>,
    /// The number of zeros that follow the range.
    padding: usize,
    encoded: Option<EncodedRange>,
}

impl PartBuffer {
    pub(crate) fn empty(&mut self) {
        self.bytes.clear();
        self.parts.clear();
    }

    /// Appends zeros up to the alignment of every element type. Returns the new length.
    pub(crate) fn align(&mut self) -> usize {
        let aligned = self.bytes.len().next_multiple_of(8);
        self.bytes.resize(aligned, 0);
        aligned
    }

    fn body(&self, which: usize) -> (&[u8], usize) {
        let part = &self.parts[which];
        (&self.bytes[part.body.clone()], part.padding)
    }

    /// Appends a dense variable, and its unencoded parts.
    pub(crate) fn add_variable(&mut self, plan: &ShardingPlan, id: VariableId, elements: &[u8]) {
        let size = plan.catalogue().variable(id).dtype().size();
        for &shard in plan.shards() {
            // Adjacent partitions share parts.
            let (mut first, mut run) = (self.bytes.len(), 0..0);
            let partitions = plan.catalogue().partitions_of(id).iter();
            for partition in partitions.filter(|partition| partition.shard == shard) {
                let start = self.bytes.len();
                let [from, to] = [partition.elements.start, partition.elements.end]
                    .map(|element| element as usize * size);
                self.bytes.extend_from_slice(&elements[from..to]);
                if partition.own_encoding.is_some() {
                    self.add_values(plan, partition, start..self.bytes.len(), 1.0);
                    continue;
                }
                let padded = (partition.end() - partition.offset) as usize;
                self.bytes.resize(start + padded, 0);
                if run.end != partition.offset {
                    self.add_plain(plan, shard, run.start, first..start, 0);
                    (first, run.start) = (start, partition.offset);
                }
                run.end = partition.end();
            }
            if !run.is_empty() {
                self.add_plain(plan, shard, run.start, first..self.bytes.len(), 0);
            }
        }
    }

    /// Appends encoded elements of a partition as one part. `before` is the number of bytes of the
    /// partition before them.
    pub(crate) fn add_encoded<E>(
        &mut self,
        partition: &Partition,
        before: u64,
        elements: usize,
        encoding: Encoding,
        encode: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = self.bytes.len();
        encode(&mut self.bytes)?;
        self.parts.push(StagedPart {
            shard: partition.shard,
            offset: partition.offset + before,
            body: start..self.bytes.len(),
            padding: 0,
            encoded: Some(EncodedRange::of(partition, elements, encoding)),
        });
        Ok(())
    }

    /// Adds the parts for elements of a partition that are in the memory already. The shard
    /// multiplies elements of a half type by `factor`.
    pub(crate) fn add_values(
        &mut self,
        plan: &ShardingPlan,
        partition: &Partition,
        values: Range<usize>,
        factor: f64,
    ) {
        let Some(encoding) = partition.own_encoding else {
            let padding = values.len().next_multiple_of(8) - values.len();
            return self.add_plain(plan, partition.shard, partition.offset, values, padding);
        };
        for half in plan.half_parts(partition, encoding, values.len() / 2) {
            let range = EncodedRange::of(partition, half.values.len() / 2, encoding);
            self.parts.push(StagedPart {
                shard: partition.shard,
                offset: partition.offset + half.before,
                body: values.start + half.values.start..values.start + half.values.end,
                padding: half.padding,
                encoded: Some(EncodedRange { factor, ..range }),
            });
        }
    }

    /// Appends the index of rows of a partition, whose numbers ascend, and its parts.
    pub(crate) fn add_index(
        &mut self,
        plan: &ShardingPlan,
        partition: &Partition,
        numbers: impl ExactSizeIterator<Item = u64> + Clone,
    ) {
        let start = self.bytes.len();
        rows::encode_index(partition, numbers, &mut self.bytes);
        let offset = partition.index.unwrap_or(0);
        let index = start..self.bytes.len();
        self.add_plain(plan, partition.shard, offset, index, 0);
    }

    /// Adds the parts for bytes that go to an offset of the shard's layout, with padding behind
    /// them.
    fn add_plain(
        &mut self,
        plan: &ShardingPlan,
        shard: ShardId,
        offset: u64,
        bytes: Range<usize>,
        padding: usize,
    ) {
        for range in plan.cut((bytes.len() + padding) as u64) {
            let (start, end) = (range.start as usize, range.end as usize);
            let filled = start.min(bytes.len())..end.min(bytes.len());
            let (padding, offset) = (end - start - filled.len(), offset + range.start);
            let body = bytes.start + filled.start..bytes.start + filled.end;
            self.parts.push(StagedPart { shard, offset, body, padding, encoded: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;
    use pushpull_common::tensor::{DType, Shape, bf16};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::params::tests::plan_of;
    use crate::rows::RowPartOptions;

    /// What each shard is sent: offset, length and body of each part, in order.
    fn sent(
        parts: impl Iterator<Item = (ShardId, OutgoingPart)>,
    ) -> Vec<(ShardId, u64, u64, Vec<u8>)> {
        parts.map(|(shard, part)| (shard, part.offset, part.bytes(), part.body.concat())).collect()
    }

    proptest! {
        /// A streamed variable is sent like one in a whole push.
        #[test]
        fn a_streamed_variable_is_sent_as_in_a_whole_push(
            rows in 0_u64..9,
            width in 1_u64..5,
            cut in 1_u32..5,
            tasks in 1_u32..4,
            part_bytes in prop_oneof![Just(8_u64), Just(24), Just(1 << 20)],
            dtype in prop_oneof![Just(DType::F32), Just(DType::F64), Just(DType::Bf16)],
        ) {
            let cut = pushpull_common::partition::Partitioner::Fixed { shards: cut };
            let of = |name: &str| {
                let shape = Shape::new([rows, width]).unwrap();
                VariableSpec::new(name, dtype, shape).unwrap().partitioner(cut.clone())
            };
            let plan = plan_of(vec![of("before"), of("variable"), of("behind")], tasks);
            let plan = Arc::into_inner(plan).unwrap().with_parts_of(part_bytes);
            let id = VariableId(1);
            let buffer: Vec<u8> = (0..plan.bytes()).map(|place| place as u8 | 1).collect();
            let mut padded = buffer.clone();
            padded[plan.range(id).end..].fill(0);

            let body = |range: Range<usize>| padded[range].to_vec().into();
            let whole = plan.parts([id].into_iter(), body).into_iter();
            let whole = whole.flat_map(|(shard, parts)| parts.into_iter().map(move |p| (shard, p)));
            let mut staged = StagedParts::default();
            staged.copies.add_variable(&plan, id, &buffer[plan.range(id)]);
            prop_assert_eq!(sent(Arc::new(staged).parts()), sent(whole));
        }
    }

    /// Rows of every type can be borrowed as slices, after rows of any other type.
    #[test]
    fn rows_are_aligned_after_rows_of_other_types() {
        let variables = vec![
            VariableSpec::bf16("halves", [9, 1]).unwrap().sparse(),
            VariableSpec::f32("singles", [9, 1]).unwrap().sparse(),
            VariableSpec::new("doubles", DType::F64, Shape::new([9, 1]).unwrap()).unwrap().sparse(),
        ];
        let plan = plan_of(variables, 1);
        let mut staged = StagedParts::default();
        for ids in [&[1, 2, 5][..], &[7], &[3, 4, 6]] {
            staged.rows.set(&plan, VariableId(0), ids, &vec![bf16::ONE; ids.len()]).unwrap();
            staged.rows.set(&plan, VariableId(1), ids, &vec![2.0_f32; ids.len()]).unwrap();
            staged.rows.set(&plan, VariableId(2), ids, &vec![3.0_f64; ids.len()]).unwrap();
            let singles = staged.rows.of_variable(VariableId(1)).unwrap();
            let doubles = staged.rows.of_variable(VariableId(2)).unwrap();
            assert!(
                matches!(singles.elements::<f32>(), Cow::Borrowed(all) if all == vec![2.0; ids.len()])
            );
            assert!(
                matches!(doubles.elements::<f64>(), Cow::Borrowed(all) if all == vec![3.0; ids.len()])
            );
        }
        staged.rows.remove(VariableId(0));
        let doubles = staged.rows.of_variable(VariableId(2)).unwrap();
        assert!(matches!(doubles.elements::<f64>(), Cow::Borrowed([3.0, 3.0, 3.0])));
    }

    /// Encoded gradients follow the rows.
    #[test]
    fn parts_of_rows_come_before_copies() {
        let rows = VariableSpec::f32("rows", [9, 1]).unwrap().sparse();
        let plan = plan_of(vec![rows, VariableSpec::f32("dense", [3]).unwrap()], 1);
        let mut staged = StagedParts::default();
        assert!(staged.is_empty());
        staged.copies.add_variable(&plan, VariableId(1), bytemuck::bytes_of(&[1.0_f32, 2.0, 3.0]));
        assert!(!staged.is_empty());
        staged.rows.set(&plan, VariableId(0), &[4], &[5.0_f32]).unwrap();
        staged.rows.cut(
            &plan,
            VariableId(0),
            RowPartOptions { include_empty: true, include_values: true, factor: 1.0 },
        );
        let staged = Arc::new(staged);
        let bodies: Vec<Vec<u8>> = staged.parts().map(|(_, part)| part.body.concat()).collect();
        let floats = |floats: &[f32]| bytemuck::cast_slice::<f32, u8>(floats).to_vec();
        assert_eq!(bodies[1..], [floats(&[5.0, 0.0]), floats(&[1.0, 2.0, 3.0, 0.0])]);
        let mut staged = Arc::into_inner(staged).unwrap();
        staged.empty();
        assert!(staged.is_empty() && staged.copies.bytes.is_empty());
    }
}
