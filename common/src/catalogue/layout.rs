//! Where each partition lies: the layouts of the shards.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{CatalogueError, Place, too_large};
use crate::codec::{Blocks, Encoding};
use crate::ids::{PartitionId, ShardId, VariableId};
use crate::rows;
use crate::tensor::DType;
use crate::variable::VariableSpec;

/// A row range of a variable, on the shard that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Partition {
    /// Its index in the catalogue.
    pub id: PartitionId,
    /// The variable it is a part of.
    pub variable: VariableId,
    /// Its rows within the variable.
    pub rows: Range<u64>,
    /// Its elements within the variable, in row-major order.
    pub elements: Range<u64>,
    /// The type that its elements are kept in: [`DType::master`] of the variable's.
    pub dtype: DType,
    /// If that is not the variable's own type, what its elements travel as.
    pub own: Option<Encoding>,
    /// Whether the optimizer updates it.
    pub trainable: bool,
    /// The shard that holds it.
    pub shard: ShardId,
    /// Where it starts in the shard's layout, in bytes; a multiple of 8. That of a table lies behind
    /// the layout, where what is pushed has its rows.
    pub offset: u64,
    /// Its length in bytes, without padding; of a table, the length of the rows of one push.
    pub bytes: u64,
    /// If it is of a table that grows, the most rows of one push.
    pub rows_at_once: Option<u32>,
    /// If it is sparse, where the numbers of its rows are in what is pushed to the shard: behind all
    /// values. See [`crate::rows`].
    pub index: Option<u64>,
}

impl Partition {
    /// Where the next partition of the shard's layout starts.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.next_multiple_of(ALIGN)
    }

    /// Whether it is pulled and pushed by rows.
    pub fn is_sparse(&self) -> bool {
        self.index.is_some()
    }

    /// Whether it is of a table that grows.
    pub fn is_table(&self) -> bool {
        self.rows_at_once.is_some()
    }

    /// How many rows it has; of a table, how many a push may have of it.
    pub fn row_count(&self) -> u64 {
        self.rows_at_once.map_or(self.rows.end - self.rows.start, u64::from)
    }

    /// The bytes of one of its rows; 0 if it has none.
    pub fn row_bytes(&self) -> u64 {
        self.bytes.checked_div(self.row_count()).unwrap_or(0)
    }

    /// How the elements from this byte of its values on are encoded: those of rows by rows.
    ///
    /// # Panics
    /// If the byte lies before the partition.
    pub fn blocks_from(&self, offset: u64) -> Blocks {
        if !self.is_sparse() {
            return Blocks::THROUGH;
        }
        let size = self.dtype.size() as u64;
        let (width, before) = (self.row_bytes() / size, (offset - self.offset) / size);
        Blocks::of_rows(width as usize, before as usize)
    }
}

/// The partitions of one shard, one behind the other in order of their ids; those of tables behind
/// the others, where only pushes have something.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardLayout {
    partitions: Vec<Partition>,
    /// How many of them are not of tables: they come first.
    stored: usize,
    /// Which of them are sparse.
    sparse: Vec<usize>,
    /// See [`ShardLayout::dense`].
    dense: Vec<Range<u64>>,
}

impl ShardLayout {
    /// The partitions that have a place in the layout: all but those of tables.
    pub fn partitions(&self) -> &[Partition] {
        &self.partitions[..self.stored]
    }

    /// The partitions of tables that grow.
    pub fn tables(&self) -> &[Partition] {
        &self.partitions[self.stored..]
    }

    /// The partitions, those of tables last.
    pub fn all(&self) -> &[Partition] {
        &self.partitions
    }

    /// The length of the layout in bytes, with padding.
    pub fn bytes(&self) -> u64 {
        self.partitions().last().map_or(0, Partition::end)
    }

    /// Where what can be pushed of values ends: behind the rows of tables.
    pub fn values_end(&self) -> u64 {
        self.partitions.last().map_or(0, Partition::end)
    }

    /// The length of what can be pushed to the shard: the layout, and behind it the rows of tables
    /// and the numbers of the rows of its sparse partitions.
    pub fn push_bytes(&self) -> u64 {
        self.sparse().next_back().map_or(self.bytes(), index_end)
    }

    /// The partitions that are pulled and pushed by rows, those of tables last.
    pub fn sparse(&self) -> impl DoubleEndedIterator<Item = &Partition> + ExactSizeIterator {
        self.sparse.iter().map(|&index| &self.partitions[index])
    }

    /// The ranges of the partitions that are not sparse and have elements, as far as they follow each
    /// other in one.
    pub fn dense(&self) -> &[Range<u64>] {
        &self.dense
    }

    /// Whether a partition starts at this byte.
    pub fn starts_at(&self, offset: u64) -> bool {
        let index = self.partitions.partition_point(|partition| partition.offset < offset);
        self.partitions.get(index).is_some_and(|partition| partition.offset == offset)
    }

    /// Whether the numbers of a sparse partition's rows start at this byte of what is pushed.
    pub fn index_starts_at(&self, offset: u64) -> bool {
        offset >= self.values_end()
            && self.sparse().any(|partition| partition.index == Some(offset))
    }

    /// The partition that lies on both sides of this byte.
    pub fn cut_at(&self, end: u64) -> Option<&Partition> {
        self.partitions.get(self.first_beyond(end)).filter(|partition| partition.offset < end)
    }

    /// The partition that holds this byte, or its padding does.
    ///
    /// # Panics
    /// If the byte lies beyond the layout.
    pub fn at(&self, offset: u64) -> &Partition {
        &self.partitions[self.first_beyond(offset)]
    }

    /// The partitions that a range touches, without those that have no elements.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = &Partition> {
        self.partitions[self.first_beyond(range.start)..]
            .iter()
            .take_while(move |partition| partition.offset < range.end)
            .filter(|partition| partition.bytes > 0)
    }

    /// The partitions that a range of what is pushed touches: by their values or by their index.
    pub fn touched(&self, range: Range<u64>) -> impl Iterator<Item = &Partition> {
        let values = range.start..range.end.min(self.values_end());
        self.within(values).chain(self.touched_by_index(range))
    }

    /// The sparse partitions whose index a range of what is pushed touches.
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

/// Checks that the partitions of each variable follow each other and cover it; returns where
/// those of each variable start.
pub(super) fn check_coverage(
    variables: &[VariableSpec],
    places: &[Place],
) -> Result<Vec<usize>, CatalogueError> {
    let mut starts = Vec::with_capacity(variables.len());
    let mut next = 0;
    for (index, variable) in variables.iter().enumerate() {
        starts.push(next);
        let rows = variable.shape().rows();
        let (mut part, mut row) = (0, 0);
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
            (part, next) = (part + 1, next + 1);
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

/// Gives each partition its place on its shard.
pub(super) fn lay_out(
    variables: &[VariableSpec],
    places: Vec<Place>,
) -> Result<(Vec<Partition>, BTreeMap<ShardId, ShardLayout>), CatalogueError> {
    let mut partitions = Vec::with_capacity(places.len());
    let mut layouts: BTreeMap<ShardId, ShardLayout> = BTreeMap::new();
    for (id, place) in places.into_iter().enumerate() {
        let variable = &variables[place.variable.0 as usize];
        let width = variable.shape().row_elements();
        // A shape bounds its elements to 2^48, so the byte counts of its rows cannot overflow.
        let elements = place.rows.start * width..place.rows.end * width;
        let layout = layouts.entry(place.shard).or_default();
        let partition = Partition {
            id: PartitionId(id as u32),
            variable: place.variable,
            rows: place.rows,
            dtype: variable.dtype().master(),
            own: Encoding::of_type(variable.dtype()),
            trainable: variable.is_trainable(),
            shard: place.shard,
            offset: 0,
            bytes: match variable.as_table() {
                Some(table) => u64::from(table.rows_at_once) * variable.master_row_bytes(),
                None => (elements.end - elements.start) * variable.dtype().master().size() as u64,
            },
            elements,
            rows_at_once: variable.as_table().map(|table| table.rows_at_once),
            // Known once the layout is: what matters until then is whether there will be one.
            index: variable.is_sparse().then_some(0),
        };
        layout.stored += usize::from(!partition.is_table());
        layout.partitions.push(partition.clone());
        partitions.push(partition);
    }
    for (shard, layout) in &mut layouts {
        // A stable sort: both kinds stay in the order of their ids.
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

/// Where the numbers of a sparse partition's rows end, if all of them are pushed.
fn index_end(partition: &Partition) -> u64 {
    // A sparse partition has fewer than 2^32 rows, and a layout at most 2^48 bytes.
    partition.index.unwrap_or(0) + rows::index_bytes(partition, partition.row_count())
}

/// Partitions start at multiples of this, so that every element is aligned.
const ALIGN: u64 = 8;
/// The bytes of one shard's layout: far below where a sum of a few such could overflow.
const LAYOUT_BYTES_MAX: u64 = 1 << 48;
