//! Parts that are made for one push, in reusable memory.

use std::sync::Arc;

use pushpull_common::ids::ShardId;

use super::part_buffer::PartBuffer;
use super::parts::{BodySource, FrameBody, OutgoingPart};
use super::rows::RowGradients;

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

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::ops::Range;

    use proptest::prelude::*;
    use pushpull_common::ids::VariableId;
    use pushpull_common::rows;
    use pushpull_common::tensor::{DType, Shape, bf16};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::rows::tests::{ALL, plan as rows_plan, rows_of};
    use crate::gradients::scatter::Scatter;
    use crate::testing::plans::plan_of;

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
            let whole = Scatter::new(&plan, [id].into_iter()).parts(body).into_iter();
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
        staged.rows.cut(&plan, VariableId(0), ALL);
        let staged = Arc::new(staged);
        let bodies: Vec<Vec<u8>> = staged.parts().map(|(_, part)| part.body.concat()).collect();
        let floats = |floats: &[f32]| bytemuck::cast_slice::<f32, u8>(floats).to_vec();
        assert_eq!(bodies[1..], [floats(&[5.0, 0.0]), floats(&[1.0, 2.0, 3.0, 0.0])]);
        let mut staged = Arc::into_inner(staged).unwrap();
        staged.empty();
        assert!(staged.is_empty() && staged.copies.bytes.is_empty());
    }

    proptest! {
        /// Every partition receives its own rows, each once.
        #[test]
        fn partitions_receive_their_rows(
            ids in prop::collection::vec(0u64..12, 0..30),
            parts in 1u32..5,
            width in 1u64..4,
        ) {
            let plan = rows_plan(12, width, parts);
            let values: Vec<f32> = (0..ids.len() * width as usize).map(|i| i as f32).collect();
            let mut set = rows_of(&plan, 1, &ids, &values);
            let mut received = std::collections::BTreeMap::new();
            set.cut(&plan, VariableId(1), ALL);
            let set = Arc::new(StagedParts { rows: set, ..StagedParts::default() });
            for partition in plan.catalogue().partitions_of(VariableId(1)) {
                let bytes = |start: u64, end: u64| -> Vec<u8> {
                    let parts = set.parts().filter(|(shard, part)| {
                        *shard == partition.shard && (start..end).contains(&part.offset)
                    });
                    parts.flat_map(|(_, part)| part.body.concat()).collect()
                };
                let index = partition.index.unwrap();
                let all = rows::index_bytes(partition, partition.row_count());
                let index = bytes(index, index + all);
                let count = rows::count(&index, partition).unwrap();
                prop_assert_eq!(index.len() as u64, rows::index_bytes(partition, count));
                let numbers = rows::numbers(&index, partition, count);
                prop_assert_eq!(rows::check(numbers.clone(), partition), Ok(()));
                let values = bytes(partition.offset, partition.end());
                prop_assert_eq!(values.len() as u64, rows::values_bytes(partition, count));
                let values = values.chunks(4).map(|v| f32::from_le_bytes(v.try_into().unwrap()));
                let values: Vec<f32> = values.collect();
                for (number, row) in numbers.zip(values.chunks(width as usize)) {
                    received.insert(partition.rows.start + number, row.to_vec());
                }
            }
            let mut sums = std::collections::BTreeMap::new();
            for (id, row) in ids.iter().zip(values.chunks(width as usize)) {
                let sum = sums.entry(*id).or_insert_with(|| vec![0.0; width as usize]);
                sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
            prop_assert_eq!(received, sums);
        }
    }
}
