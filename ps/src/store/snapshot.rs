//! What a pull reads: values of one version, pinned.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::PartitionId;

use super::Store;
use super::geometry::logical_block_of;
use super::rows::{fetch, logical_block_of_row, range_of};
use crate::arena::Pins;

/// Rows that are fetched ahead of the one that is read.
const AHEAD: usize = 8;

impl Store {
    /// Pins the values of these ranges, in bytes of the shard's variables, as they are now.
    pub(crate) fn snapshot(&self, ranges: &[Range<u64>]) -> Snapshot {
        let mut logical = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let logical_blocks = self.logical_blocks_of(range);
            let next = logical.last().map_or(0, |&logical: &u32| logical + 1);
            logical.extend((logical_blocks.start as u32).max(next)..logical_blocks.end as u32);
        }
        let pins = self.values.pin(logical.iter().copied());
        Snapshot { pins, logical, block_bytes: self.geometry.block_bytes }
    }

    /// The values of a range as they were before the change under way, in pieces in order. An element
    /// that is changed where it lies is not to be asked for after that.
    pub(crate) fn before(&self, range: Range<u64>) -> impl Iterator<Item = &[u8]> {
        self.pieces_of(&range).map(|(logical, within)| {
            &self.values.blocks.read(self.values.committed_block(logical))[within]
        })
    }

    /// Appends rows of a partition, one behind the other, as they were before the change under way.
    pub(crate) fn gather(
        &self,
        partition: &Partition,
        rows: impl ExactSizeIterator<Item = u32> + Clone,
        gathered: &mut Vec<u8>,
    ) {
        let (row_bytes, block_bytes) = (partition.row_bytes() as usize, self.geometry.block_bytes);
        gathered.reserve(rows.len() * row_bytes);
        let blocks = &self.values.blocks;
        // The block that a row lies in and where, if it is one.
        let find = |row: u32| {
            let found = logical_block_of_row(partition, row, row_bytes, block_bytes);
            found.map(|(logical, within)| (self.values.committed_block(logical), within))
        };
        let mut later = rows.clone().skip(AHEAD);
        for row in rows {
            // Those in two blocks are not worth the trouble.
            if let Some((block, start)) = later.next().and_then(find) {
                fetch(blocks, (block, 0), start, row_bytes);
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

    /// Lists the partitions that a selection names, as ranges in rising order; the culprit otherwise.
    pub(crate) fn select(
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

    /// A partition of the shard.
    pub(crate) fn partition(&self, id: PartitionId) -> Option<&Partition> {
        let partitions = self.layout.partitions();
        let index = partitions.binary_search_by_key(&id, |partition| partition.id).ok()?;
        Some(&partitions[index])
    }
}

/// Values as they were at one version, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pins: Pins,
    /// Which stretch of the values each pinned block holds, in rising order.
    pub(super) logical: Vec<u32>,
    block_bytes: usize,
}

impl Snapshot {
    /// The bytes of a range that was asked for, in pieces in order.
    pub(crate) fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = &[u8]> {
        let block_bytes = self.block_bytes;
        let (mut start, end) = (range.start as usize, range.end as usize);
        let (first, _) = logical_block_of(start, block_bytes);
        let mut index = self.logical.partition_point(|&block| (block as usize) < first);
        std::iter::from_fn(move || {
            if start >= end {
                return None;
            }
            let base = self.logical[index] as usize * block_bytes;
            let stop = end.min(base + block_bytes);
            let piece = &self.pins.read(index)[start - base..stop - base];
            (start, index) = (stop, index + 1);
            Some(piece)
        })
    }
}
