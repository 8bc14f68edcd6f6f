//! The layout of each shard: the byte offset of every partition on it.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{CatalogueError, PartitionPlacement, too_large};
use crate::codec::{Encoding, ScaleBlocks};
use crate::ids::{PartitionId, ShardId, VariableId};
use crate::rows;
use crate::tensor::DType;
use crate::variable::VariableSpec;

/// A row range of a variable, held by one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Partition {
    /// The partition's index in the catalogue.
    pub id: PartitionId,
    /// The variable that the partition belongs to.
    pub variable: VariableId,
    /// The rows of the variable that the partition holds.
    pub rows: Range<u64>,
    /// The elements of the variable that the partition holds, in row-major order.
    pub elements: Range<u64>,
    /// The type in which the shard stores the elements: [`DType::master`] of the variable's type.
    pub dtype: DType,
    /// The wire encoding of the elements if the variable's own type is not the stored type.
    pub own_encoding: Option<Encoding>,
    /// Whether the optimizer updates the partition.
    pub trainable: bool,
    /// The shard that holds the partition.
    pub shard: ShardId,
    /// The byte offset in the shard's layout, a multiple of 8. The offset of a table is beyond the
    /// layout's end: its rows occupy space only in pushes.
    pub offset: u64,
    /// The length in bytes, without padding; for a table, the length of the rows of one push.
    pub bytes: u64,
    /// The row limit of one push, if the partition belongs to a growing table.
    pub rows_at_once: Option<u32>,
    /// The byte offset of the row index in a push, if the partition is sparse. All row indexes
    /// follow all values. See [`crate::rows`].
    pub index: Option<u64>,
}

impl Partition {
    /// Returns the offset at which the next partition of the shard starts.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.next_multiple_of(ALIGN)
    }

    /// Returns whether the partition is pulled and pushed by rows.
    pub fn is_sparse(&self) -> bool {
        self.index.is_some()
    }

    /// Returns whether the partition belongs to a growing table.
    pub fn is_table(&self) -> bool {
        self.rows_at_once.is_some()
    }

    /// Returns the number of rows; for a table, the most rows that one push may have.
    pub fn row_count(&self) -> u64 {
        self.rows_at_once.map_or(self.rows.end - self.rows.start, u64::from)
    }

    /// Returns the bytes of one row; 0 if the partition has no rows.
    pub fn row_bytes(&self) -> u64 {
        self.bytes.checked_div(self.row_count()).unwrap_or(0)
    }

    /// Returns how elements are grouped into codec blocks from byte `offset` on: within each row if
    /// the partition is sparse.
    ///
    /// # Panics
    /// If `offset` is before the start of a sparse partition.
    pub fn blocks_from(&self, offset: u64) -> ScaleBlocks {
        if !self.is_sparse() {
            return ScaleBlocks::THROUGH;
        }
        let size = self.dtype.size() as u64;
        let width = self.row_bytes() / size;
        let before = (offset - self.offset) / size;
        ScaleBlocks::of_rows(width as usize, before as usize)
    }
}

/// The partitions of one shard, back to back in order of their ids.
///
/// The layout proper covers dense and sparse partitions, which the shard stores. A push addresses
/// more than that: the rows of tables follow the layout, and the row indexes of sparse partitions
/// follow those.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardLayout {
    partitions: Vec<Partition>,
    /// The number of partitions that are not of tables; they come first.
    stored: usize,
    /// The indices of the sparse partitions.
    sparse: Vec<usize>,
    /// See [`ShardLayout::dense`].
    dense: Vec<Range<u64>>,
}

impl ShardLayout {
    /// Returns the partitions in the layout proper: all but those of tables.
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions[..self.stored]
    }

    /// Returns the partitions of growing tables.
    pub fn tables(&self) -> &[Partition] {
        &self.partitions[self.stored..]
    }

    /// Returns all partitions, those of tables last.
    pub fn all(&self) -> &[Partition] {
        &self.partitions
    }

    /// Returns the length of the layout in bytes, with padding.
    pub fn bytes(&self) -> u64 {
        self.partitions().last().map_or(0, Partition::end)
    }

    /// Returns the end offset of the values in a push: behind the rows of tables.
    pub fn values_end(&self) -> u64 {
        self.partitions.last().map_or(0, Partition::end)
    }

    /// Returns the length of a whole push: the layout, then the rows of tables, then the row
    /// indexes of sparse partitions.
    pub fn push_bytes(&self) -> u64 {
        self.sparse().next_back().map_or(self.bytes(), index_end)
    }

    /// Returns the partitions that are pulled and pushed by rows, those of tables last.
    pub fn sparse(&self) -> impl DoubleEndedIterator<Item = &Partition> + ExactSizeIterator {
        self.sparse.iter().map(|&index| &self.partitions[index])
    }

    /// Returns the byte ranges of the partitions that are dense and not empty; adjacent ones are
    /// merged.
    pub fn dense(&self) -> &[Range<u64>] {
        &self.dense
    }

    /// Returns whether a partition starts at this byte.
    pub fn starts_at(&self, offset: u64) -> bool {
        let index = self.partitions.partition_point(|partition| partition.offset < offset);
        self.partitions.get(index).is_some_and(|partition| partition.offset == offset)
    }

    /// Returns whether the row index of a sparse partition starts at this byte of a push.
    pub fn index_starts_at(&self, offset: u64) -> bool {
        offset >= self.values_end()
            && self.sparse().any(|partition| partition.index == Some(offset))
    }

    /// Returns the partition that a cut at byte `end` would split; `None` between two partitions.
    pub fn cut_at(&self, end: u64) -> Option<&Partition> {
        self.partitions.get(self.first_beyond(end)).filter(|partition| partition.offset < end)
    }

    /// Returns the partition that contains this byte, padding included.
    ///
    /// # Panics
    /// If `offset` is not below [`ShardLayout::values_end`].
    pub fn at(&self, offset: u64) -> &Partition {
        &self.partitions[self.first_beyond(offset)]
    }

    /// Returns the partitions that a range of values touches, without empty ones.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = &Partition> {
        self.partitions[self.first_beyond(range.start)..]
            .iter()
            .take_while(move |partition| partition.offset < range.end)
            .filter(|partition| partition.bytes > 0)
    }

    /// Returns the partitions that a range of a push touches, by their values or by their row
    /// index.
    pub fn touched(&self, range: Range<u64>) -> impl Iterator<Item = &Partition> {
        let values = range.start..range.end.min(self.values_end());
        self.within(values).chain(self.touched_by_index(range))
    }

    /// Returns the sparse partitions whose row index a range of a push touches.
    pub fn touched_by_index(&self, range: Range<u64>) -> impl Iterator<Item = &Partition> {
        self.sparse().filter(move |partition| {
            let start = partition.index.unwrap_or(0);
            start < range.end && range.start < index_end(partition)
        })
    }

    fn first_beyond(&self, offset: u64) -> usize {
        self.partitions.partition_point(|partition| partition.end() <= offset)
    }
}

/// Checks that the partitions of each variable cover its rows in order. Returns the index of each
/// variable's first partition.
pub(super) fn check_coverage(
    variables: &[VariableSpec],
    places: &[PartitionPlacement],
) -> Result<Vec<usize>, CatalogueError> {
    let mut starts = Vec::with_capacity(variables.len());
    let mut next = 0;
    for (index, variable) in variables.iter().enumerate() {
        starts.push(next);
        let rows = variable.shape().rows();
        let mut part = 0;
        let mut row = 0;
        let fault = |part, start| CatalogueError::Partitions {
            name: variable.name().to_owned(),
            rows,
            part,
            start,
        };
        while let Some(place) = places.get(next).filter(|p| p.variable.0 as usize == index) {
            let in_place = place.rows.start == row && place.rows.end <= rows;
            let moves_on = place.rows.end > row || (rows == 0 && part == 0);
            if !in_place || !moves_on {
                return Err(fault(part, place.rows.start));
            }
            row = place.rows.end;
            part += 1;
            next += 1;
        }
        if row != rows || part == 0 {
            return Err(fault(part, row));
        }
    }
    match places.get(next) {
        None => Ok(starts),
        Some(place) => Err(CatalogueError::Partitions {
            name: format!("variable {}", place.variable),
            rows: 0,
            part: 0,
            start: place.rows.start,
        }),
    }
}

/// Assigns each partition its offset on its shard, and builds the layouts.
pub(super) fn lay_out(
    variables: &[VariableSpec],
    places: Vec<PartitionPlacement>,
) -> Result<(Vec<Partition>, BTreeMap<ShardId, ShardLayout>), CatalogueError> {
    let mut partitions = Vec::with_capacity(places.len());
    let mut layouts: BTreeMap<ShardId, ShardLayout> = BTreeMap::new();
    for (id, place) in places.into_iter().enumerate() {
        let variable = &variables[place.variable.0 as usize];
        let width = variable.shape().row_elements();
        // A shape has at most 2^48 elements, so byte counts cannot overflow.
        let elements = place.rows.start * width..place.rows.end * width;
        let layout = layouts.entry(place.shard).or_default();
        let partition = Partition {
            id: PartitionId(id as u32),
            variable: place.variable,
            rows: place.rows,
            dtype: variable.dtype().master(),
            own_encoding: Encoding::of_type(variable.dtype()),
            trainable: variable.is_trainable(),
            shard: place.shard,
            offset: 0,
            bytes: match variable.as_table() {
                Some(table) => u64::from(table.rows_at_once) * variable.master_row_bytes(),
                None => (elements.end - elements.start) * variable.dtype().master().size() as u64,
            },
            elements,
            rows_at_once: variable.as_table().map(|table| table.rows_at_once),
            // A placeholder until all values are laid out; only `Some` or `None` matters before
            // that.
            index: variable.is_sparse().then_some(0),
        };
        layout.stored += usize::from(!partition.is_table());
        layout.partitions.push(partition.clone());
        partitions.push(partition);
    }
    for (shard, layout) in &mut layouts {
        // The sort is stable, so both kinds stay in order of their ids.
        layout.partitions.sort_by_key(Partition::is_table);
        let mut next = 0;
        for partition in &mut layout.partitions {
            partition.offset = next;
            next = partition.end();
            too_large(&shard.to_string(), next, LAYOUT_BYTES_MAX)?;
        }
        for (index, partition) in layout.partitions.iter_mut().enumerate() {
            if partition.is_sparse() {
                partition.index = Some(next);
                next = index_end(partition);
                layout.sparse.push(index);
            }
            partitions[partition.id.0 as usize].clone_from(partition);
        }
        layout.dense = dense_ranges(layout.partitions());
    }
    Ok((partitions, layouts))
}

/// See [`ShardLayout::dense`].
fn dense_ranges(partitions: &[Partition]) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let dense = |p: &&Partition| !p.is_sparse() && p.bytes > 0;
    for partition in partitions.iter().filter(dense) {
        match ranges.last_mut() {
            Some(last) if last.end == partition.offset => last.end = partition.end(),
            _ => ranges.push(partition.offset..partition.end()),
        }
    }
    ranges
}

/// The end offset of a partition's row index in a push of all its rows.
fn index_end(partition: &Partition) -> u64 {
    // Cannot overflow: a sparse partition has fewer than 2^32 rows, a layout at most 2^48 bytes.
    partition.index.unwrap_or(0) + rows::index_bytes(partition, partition.row_count())
}

/// The alignment of partitions in bytes, so that every element is aligned.
const ALIGN: u64 = 8;
/// The limit of one shard's layout in bytes; sums of a few such lengths cannot overflow.
const LAYOUT_BYTES_MAX: u64 = 1 << 48;
