//! Snapshots: the values of one version that a pull reads, pinned.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::PartitionId;

use super::Store;
use super::geometry::logical_block_of;
use super::rows::{logical_block_of_row, prefetch_row, range_of};
use crate::arena::Pins;

/// The number of rows that are prefetched ahead of the one being read.
const PREFETCHED_ROWS: usize = 8;

impl Store {
    /// Pins the current values of these byte ranges of the layout.
    pub fn snapshot(&self, ranges: &[Range<u64>]) -> Snapshot {
        let mut logical = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let logical_blocks = self.logical_blocks_of(range);
            let next = logical.last().map_or(0, |&logical: &u32| logical + 1);
            logical.extend((logical_blocks.start as u32).max(next)..logical_blocks.end as u32);
        }
        let pins = self.values.pin(logical.iter().copied());
        Snapshot { pins, logical, block_bytes: self.geometry.block_bytes }
    }

    /// Yields the values of a range before the current change, in order. Must not be used for
    /// elements that the change has updated in place.
    pub fn before(&self, range: Range<u64>) -> impl Iterator<Item = &[u8]> {
        self.pieces_of(&range).map(|(logical, within)| {
            &self.values.blocks.read(self.values.committed_block(logical))[within]
        })
    }

    /// Appends rows of a partition as they were before the current change.
    pub fn gather(
        &self,
        partition: &Partition,
        rows: impl ExactSizeIterator<Item = u32> + Clone,
        gathered: &mut Vec<u8>,
    ) {
        let row_bytes = partition.row_bytes() as usize;
        let block_bytes = self.geometry.block_bytes;
        gathered.reserve(rows.len() * row_bytes);
        let blocks = &self.values.blocks;
        // The block of a row and its offset in it, if it is in one block.
        let find = |row: u32| {
            let found = logical_block_of_row(partition, row, row_bytes, block_bytes);
            found.map(|(logical, within)| (self.values.committed_block(logical), within))
        };
        let mut later = rows.clone().skip(PREFETCHED_ROWS);
        for row in rows {
            // Rows that cross a block boundary are too rare to prefetch.
            if let Some((block, start)) = later.next().and_then(find) {
                prefetch_row(blocks, block, 0, start, row_bytes);
            }
            match find(row) {
                Some((block, start)) => {
                    gathered.extend_from_slice(&blocks.read(block)[start..start + row_bytes]);
                }
                None => {
                    let pieces = self.before(range_of(partition, row));
                    pieces.for_each(|piece| gathered.extend_from_slice(piece));
                }
            }
        }
    }

    /// Appends the ranges of the partitions that a selection names, in ascending order and merged.
    /// Fails with the first partition that is unknown or out of order.
    pub fn select(
        &self,
        ids: &[PartitionId],
        ranges: &mut Vec<Range<u64>>,
    ) -> Result<(), PartitionId> {
        for &id in ids {
            let partition = self.partition(id).ok_or(id)?;
            match ranges.last_mut() {
                Some(last) if last.end == partition.offset => last.end = partition.end(),
                Some(last) if last.end > partition.offset => return Err(id),
                _ => ranges.push(partition.offset..partition.end()),
            }
        }
        Ok(())
    }

    /// Returns a partition of the shard.
    pub(crate) fn partition(&self, id: PartitionId) -> Option<&Partition> {
        let partitions = self.layout.partitions();
        let index = partitions.binary_search_by_key(&id, |partition| partition.id).ok()?;
        Some(&partitions[index])
    }
}

/// The values of one version, pinned while this value lives.
#[derive(Debug)]
pub struct Snapshot {
    pins: Pins,
    /// The logical block that each pinned block holds, in ascending order.
    pub(super) logical: Vec<u32>,
    block_bytes: usize,
}

impl Snapshot {
    /// Yields the bytes of a range of the snapshot, in order.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = &[u8]> {
        let block_bytes = self.block_bytes;
        let mut start = range.start as usize;
        let end = range.end as usize;
        let (first, _) = logical_block_of(start, block_bytes);
        let mut index = self.logical.partition_point(|&block| (block as usize) < first);
        std::iter::from_fn(move || {
            if start >= end {
                return None;
            }
            let base = self.logical[index] as usize * block_bytes;
            let stop = end.min(base + block_bytes);
            let piece = &self.pins.read(index)[start - base..stop - base];
            start = stop;
            index += 1;
            Some(piece)
        })
    }
}
