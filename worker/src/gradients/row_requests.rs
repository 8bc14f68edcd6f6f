//! Requests for rows of sparse variables, and the order of the answers.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::{PartitionId, ShardId, VariableId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::rows;

use super::gradient_buffer::AlignedBuffer;
use super::parts::{BodySource, FrameBody};
use super::row_ids::{number_of, part_of};
use super::sharding_plan::ShardingPlan;

/// A request for rows of one partition.
#[derive(Clone, Debug)]
pub(crate) struct RowRequest {
    pub(crate) shard: ShardId,
    pub(crate) partition: PartitionId,
    /// The range of their row numbers in the memory, as [`pushpull_common::rows`] encodes them.
    numbers: Range<usize>,
    /// The range of the buffer that receives the rows.
    pub(crate) to: Range<usize>,
}

/// The requests of one pull of rows, in reusable memory.
#[derive(Debug, Default)]
pub(crate) struct RowRequests {
    requests: Vec<RowRequest>,
    numbers: Vec<u8>,
    /// The index of each row in the buffer; empty if the rows arrive in the order of their ids.
    places: Vec<u32>,
    row_bytes: usize,
    /// The partition of each row, and the number of rows in the partitions before each.
    parts: Vec<u32>,
    starts: Vec<usize>,
}

impl RowRequests {
    /// Replaces the requests by those for these rows, whose ids must be valid.
    pub(crate) fn build(&mut self, plan: &ShardingPlan, variable: VariableId, ids: &[u64]) {
        let partitions = plan.catalogue().partitions_of(variable);
        self.empty();
        self.row_bytes = plan.catalogue().variable(variable).row_bytes() as usize;
        if let [partition] = partitions {
            let numbers = ids.iter().map(|&id| number_of(partition, id));
            rows::encode_numbers(partition, numbers, &mut self.numbers);
            return self.add_partition(partition, 0..ids.len());
        }
        self.starts.resize(partitions.len() + 1, 0);
        for &id in ids {
            let part = part_of(partitions, id);
            self.parts.push(part as u32);
            self.starts[part + 1] += 1;
        }
        (1..self.starts.len()).for_each(|part| self.starts[part] += self.starts[part - 1]);
        let each = rows::number_bytes(&partitions[0]) as usize;
        self.numbers.resize(ids.len() * each, 0);
        // This turns the start of each partition's rows into their end.
        for (&id, &part) in ids.iter().zip(&*self.parts) {
            let place = self.starts[part as usize];
            self.starts[part as usize] += 1;
            self.places.push(place as u32);
            let number = number_of(&partitions[part as usize], id).to_le_bytes();
            self.numbers[place * each..(place + 1) * each].copy_from_slice(&number[..each]);
        }
        let mut start = 0;
        for (index, partition) in partitions.iter().enumerate() {
            let end = self.starts[index];
            self.add_partition(partition, start..end);
            start = end;
        }
    }

    /// Adds the requests for the rows of a partition; `rows` are their indices in the buffer.
    fn add_partition(&mut self, partition: &Partition, rows: Range<usize>) {
        // A body has at most `PART_BYTES_MAX` bytes: of row numbers in the request, and of rows as
        // the shard stores them in the answer.
        let each = rows::number_bytes(partition) as usize;
        let most = (PART_BYTES_MAX as usize / each.max(partition.row_bytes() as usize)).max(1);
        for start in rows.clone().step_by(most) {
            let end = rows.end.min(start + most);
            self.requests.push(RowRequest {
                shard: partition.shard,
                partition: partition.id,
                numbers: start * each..end * each,
                to: start * self.row_bytes..end * self.row_bytes,
            });
        }
    }

    fn empty(&mut self) {
        self.requests.clear();
        self.numbers.clear();
        self.places.clear();
        self.parts.clear();
        self.starts.clear();
    }

    /// Returns the requests.
    pub(crate) fn requests(&self) -> &[RowRequest] {
        &self.requests
    }

    /// Returns the body of a request.
    pub(crate) fn body_of(self: &Arc<Self>, which: usize) -> FrameBody {
        FrameBody::Stored { source: self.clone(), index: which }
    }

    /// Copies the received rows into the order of their ids.
    fn put(&self, received: &[u8], rows: &mut [u8]) {
        if self.places.is_empty() {
            return rows.copy_from_slice(&received[..rows.len()]);
        }
        for (row, &place) in rows.chunks_exact_mut(self.row_bytes).zip(&*self.places) {
            let start = place as usize * self.row_bytes;
            row.copy_from_slice(&received[start..start + self.row_bytes]);
        }
    }
}

impl BodySource for RowRequests {
    fn body(&self, which: usize) -> (&[u8], usize) {
        (&self.numbers[self.requests[which].numbers.clone()], 0)
    }
}

/// The most entries of each kind in the pool: the number of pulls that are usually under way at
/// once.
const POOLED_MAX: usize = 4;

/// A pool of the memory of pulls of rows.
#[derive(Debug, Default)]
pub(crate) struct RowPulls(Mutex<RowPullPool>);

#[derive(Debug, Default)]
struct RowPullPool {
    row_requests: Vec<Arc<RowRequests>>,
    buffers: Vec<AlignedBuffer>,
}

impl RowPulls {
    /// Returns the requests for these rows, whose ids must be valid, and a buffer of `bytes` bytes
    /// for the answers.
    pub(crate) fn prepare(
        &self,
        plan: &ShardingPlan,
        variable: VariableId,
        ids: &[u64],
        bytes: usize,
    ) -> (Arc<RowRequests>, AlignedBuffer) {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A frame may be dropped a little after it was sent.
        let free =
            pool.row_requests.iter().position(|row_requests| Arc::strong_count(row_requests) == 1);
        let row_requests = free.map(|free| pool.row_requests.swap_remove(free));
        let buffer = pool.buffers.pop();
        drop(pool);
        let mut row_requests = row_requests.unwrap_or_default();
        let mut buffer = buffer.unwrap_or_else(|| AlignedBuffer::of_bytes(0));
        buffer.resize(bytes);
        match Arc::get_mut(&mut row_requests) {
            Some(row_requests) => row_requests.build(plan, variable, ids),
            None => {
                let mut fresh = RowRequests::default();
                fresh.build(plan, variable, ids);
                row_requests = Arc::new(fresh);
            }
        }
        (row_requests, buffer)
    }

    /// Copies the received rows into the order of their ids, and returns the memory to the pool.
    pub(crate) fn put(
        &self,
        row_requests: Arc<RowRequests>,
        buffer: AlignedBuffer,
        rows: &mut [u8],
    ) {
        row_requests.put(buffer.bytes(), rows);
        self.keep(row_requests, buffer);
    }

    /// Returns the memory of a pull to the pool.
    pub(crate) fn keep(&self, row_requests: Arc<RowRequests>, buffer: AlignedBuffer) {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.row_requests.len() < POOLED_MAX {
            pool.row_requests.push(row_requests);
        }
        if pool.buffers.len() < POOLED_MAX {
            pool.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy as Placing, ShardMap};
    use pushpull_common::table::TableSpec;
    use pushpull_common::tensor::DType;
    use pushpull_common::variable::VariableSpec;

    use super::*;

    fn plan_of(variable: VariableSpec) -> ShardingPlan {
        let map = ShardMap::new([0, 1], 1).unwrap();
        let variables = vec![variable];
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    fn plan(rows: u64, width: u64, parts: u32) -> ShardingPlan {
        let cut = Partitioner::Fixed { shards: parts };
        plan_of(VariableSpec::f32("rows", [rows, width]).unwrap().sparse().partitioner(cut))
    }

    #[test]
    fn rows_of_tables_are_requested_by_their_ids() {
        let cut = Partitioner::Fixed { shards: 3 };
        let spec = TableSpec::new(1 << 20);
        let table = VariableSpec::table("t", DType::F32, [2], spec).unwrap().partitioner(cut);
        let ids = [u64::MAX, 5, 1 << 40, 5, 7, 0];
        let mut row_requests = RowRequests::default();
        row_requests.build(&plan_of(table), VariableId(0), &ids);
        assert_eq!(
            row_requests.requests().iter().map(|ask| ask.numbers.len()).sum::<usize>(),
            6 * 8
        );
        let mut asked: Vec<u64> = (row_requests.numbers.chunks(8))
            .map(|id| u64::from_le_bytes(id.try_into().unwrap()))
            .collect();
        asked.sort_unstable();
        assert_eq!(asked, [0, 5, 5, 7, 1 << 40, u64::MAX]);
    }

    /// Memory is reused once no frame is sent from it, and the pool has a limit.
    #[test]
    fn memory_of_pulls_is_reused() {
        let plan = plan(9, 2, 2);
        let pulls = RowPulls::default();
        let ask = |ids: &[u64]| pulls.prepare(&plan, VariableId(0), ids, ids.len() * 8);
        let (row_requests, mut buffer) = ask(&[7, 0]);
        let at = Arc::as_ptr(&row_requests);
        let sent = row_requests.body_of(0);
        buffer.bytes_mut().copy_from_slice(bytemuck::cast_slice(&[0.0_f32, 1.0, 14.0, 15.0]));
        let mut rows = [0.0_f32; 4];
        pulls.put(row_requests, buffer, bytemuck::cast_slice_mut(&mut rows));
        assert_eq!(rows, [14.0, 15.0, 0.0, 1.0]);
        let (other, buffer) = ask(&[3]);
        assert!(Arc::as_ptr(&other) != at, "a frame is being sent from it");
        assert_eq!(sent.concat(), 0_u32.to_le_bytes());
        drop(sent);
        let (again, _) = ask(&[3, 4, 5]);
        assert_eq!(Arc::as_ptr(&again), at);
        assert_eq!(again.requests().iter().map(|asked| asked.to.len()).sum::<usize>(), 24);
        pulls.keep(other, buffer);
        (0..3 * POOLED_MAX).for_each(|_| pulls.keep(Arc::default(), AlignedBuffer::of_bytes(8)));
        let pool = pulls.0.lock().unwrap();
        assert_eq!((pool.row_requests.len(), pool.buffers.len()), (POOLED_MAX, POOLED_MAX));
    }

    proptest! {
        /// Rows arrive at the index of their id.
        #[test]
        fn rows_arrive_in_the_order_of_their_ids(
            ids in prop::collection::vec(0u64..12, 0..30),
            parts in 1u32..5,
        ) {
            let plan = plan(12, 2, parts);
            let mut row_requests = RowRequests::default();
            row_requests.build(&plan, VariableId(0), &[3, 1, 4]);
            row_requests.build(&plan, VariableId(0), &ids);
            let mut received = vec![0_u8; ids.len() * 8];
            for (which, ask) in row_requests.requests().iter().enumerate() {
                let partition = &plan.catalogue().partitions()[ask.partition.0 as usize];
                prop_assert_eq!(partition.shard, ask.shard);
                let numbers = row_requests.body(which).0.chunks(4).map(|n| u32::from_le_bytes(n.try_into().unwrap()));
                let rows = numbers.flat_map(|number| {
                    let row = (partition.rows.start + u64::from(number)) as f32;
                    [row, row + 0.5]
                });
                let rows: Vec<f32> = rows.collect();
                received[ask.to.clone()].copy_from_slice(bytemuck::cast_slice(&rows));
            }
            let mut found = vec![0.0_f32; ids.len() * 2];
            row_requests.put(&received, bytemuck::cast_slice_mut(&mut found));
            let expected: Vec<f32> = ids.iter().flat_map(|&id| [id as f32, id as f32 + 0.5]).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
