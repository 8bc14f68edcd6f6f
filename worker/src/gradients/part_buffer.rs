//! Bytes that are made for one push, and the parts that they are sent in.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::rows;

use super::parts::EncodedRange;
use super::sharding_plan::ShardingPlan;

/// Bytes, and parts of a push that consist of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PartBuffer {
    pub(crate) bytes: Vec<u8>,
    pub(super) parts: Vec<StagedPart>,
}

/// A part, with its range of the bytes.
#[derive(Clone, Debug)]
pub(super) struct StagedPart {
    pub(super) shard: ShardId,
    pub(super) offset: u64,
    body: Range<usize>,
    /// The number of zeros that follow the range.
    padding: usize,
    pub(super) encoded: Option<EncodedRange>,
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

    pub(super) fn body(&self, which: usize) -> (&[u8], usize) {
        let part = &self.parts[which];
        (&self.bytes[part.body.clone()], part.padding)
    }

    /// Appends a dense variable, and its unencoded parts.
    pub(crate) fn add_variable(&mut self, plan: &ShardingPlan, id: VariableId, elements: &[u8]) {
        let size = plan.catalogue().variable(id).dtype().size();
        for &shard in plan.shards() {
            // Adjacent partitions share parts.
            let mut first = self.bytes.len();
            let mut run = 0..0;
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
                    first = start;
                    run.start = partition.offset;
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
        for range in plan.cut(0..(bytes.len() + padding) as u64) {
            let start = range.start as usize;
            let end = range.end as usize;
            let filled = start.min(bytes.len())..end.min(bytes.len());
            let padding = end - start - filled.len();
            let offset = offset + range.start;
            let body = bytes.start + filled.start..bytes.start + filled.end;
            self.parts.push(StagedPart { shard, offset, body, padding, encoded: None });
        }
    }
}
