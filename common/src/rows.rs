//! The wire form of rows of sparse variables in a push.
//!
//! A push has two ranges for a sparse partition:
//!
//! - The **index** is behind the shard's values, at [`Partition::index`]: the number of rows
//!   (`u64`), then the ascending row numbers, padded to whole words.
//! - The **values** start at the partition's own offset: the rows back to back, padded to whole
//!   words.
//!
//! A row number takes no more bytes than an element of a stored type, except in a table. A push of
//! every row is therefore at most about twice as long as the partition, and sparse pushes use the
//! same push slots as dense ones.
//!
//! The number of a row of a growing table is its id (`u64`). For any other partition it is the
//! row's index within the partition (`u32`).
//!
//! [`Partition::index`]: crate::catalogue::Partition::index

use crate::catalogue::Partition;
use crate::protocol::Refusal;
use crate::table;

/// Returns the bytes of one row number of this partition.
pub const fn number_bytes(partition: &Partition) -> u64 {
    if partition.rows_at_once.is_some() { 8 } else { 4 }
}

/// Returns the bytes of the index of `rows` rows of a partition.
pub const fn index_bytes(partition: &Partition, rows: u64) -> u64 {
    8 + (number_bytes(partition) * rows).next_multiple_of(8)
}

/// Returns the bytes of the values of `rows` rows of a partition.
pub fn values_bytes(partition: &Partition, rows: u64) -> u64 {
    (rows * partition.row_bytes()).next_multiple_of(8)
}

/// Appends the index of these rows of a partition, which must ascend.
pub fn encode_index(
    partition: &Partition,
    rows: impl ExactSizeIterator<Item = u64> + Clone,
    out: &mut Vec<u8>,
) {
    debug_assert!(rows.clone().is_sorted_by(|a, b| a < b), "rows ascend");
    let count = rows.len() as u64;
    let end = out.len() + index_bytes(partition, count) as usize;
    out.reserve(end - out.len());
    out.extend_from_slice(&count.to_le_bytes());
    encode_numbers(partition, rows, out);
    out.resize(end, 0);
}

/// Returns the number of rows in an index, from its first word; the bytes may be hostile.
pub fn count(index: &[u8], partition: &Partition) -> Result<u64, Refusal> {
    let word = index.first_chunk().copied().map_or(u64::MAX, u64::from_le_bytes);
    let variable = partition.variable;
    let limit = partition.row_count();
    if word > limit { Err(Refusal::Rows { variable, rows: word, limit }) } else { Ok(word) }
}

/// Returns the row numbers in an index of `rows` rows; they are not checked.
pub fn numbers<'a>(index: &'a [u8], partition: &Partition, rows: u64) -> Numbers<'a> {
    let bytes = number_bytes(partition) as usize * rows as usize;
    Numbers::of(partition, index.get(8..8 + bytes).unwrap_or_default())
}

/// Appends row numbers in their wire form, as used by an index and by a request for rows.
pub fn encode_numbers(partition: &Partition, rows: impl Iterator<Item = u64>, out: &mut Vec<u8>) {
    match number_bytes(partition) {
        8 => rows.for_each(|row| out.extend_from_slice(&row.to_le_bytes())),
        _ => rows.for_each(|row| out.extend_from_slice(&(row as u32).to_le_bytes())),
    }
}

/// Iterates over row numbers in their wire form; the bytes may be hostile.
#[derive(Clone, Debug)]
pub struct Numbers<'a> {
    bytes: &'a [u8],
    wide: bool,
}

impl<'a> Numbers<'a> {
    /// Reads numbers written by [`encode_numbers`]; an incomplete number at the end is ignored.
    pub fn of(partition: &Partition, bytes: &'a [u8]) -> Numbers<'a> {
        Numbers { bytes, wide: number_bytes(partition) == 8 }
    }

    /// Returns the number at a position.
    ///
    /// # Panics
    /// If there are fewer numbers.
    pub fn at(&self, place: usize) -> u64 {
        match self.wide {
            true => {
                let bytes = self.bytes[8 * place..8 * place + 8].try_into();
                u64::from_le_bytes(bytes.expect("a wide number has eight bytes"))
            }
            false => {
                let bytes = self.bytes[4 * place..4 * place + 4].try_into();
                u32::from_le_bytes(bytes.expect("a number has four bytes")).into()
            }
        }
    }
}

impl Iterator for Numbers<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        match self.wide {
            true => {
                let (number, rest) = self.bytes.split_first_chunk()?;
                self.bytes = rest;
                Some(u64::from_le_bytes(*number))
            }
            false => {
                let (number, rest) = self.bytes.split_first_chunk()?;
                self.bytes = rest;
                Some(u32::from_le_bytes(*number).into())
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let count = self.bytes.len() / if self.wide { 8 } else { 4 };
        (count, Some(count))
    }
}

impl ExactSizeIterator for Numbers<'_> {}

/// Checks that rows belong to the partition and ascend strictly.
pub fn check(rows: impl Iterator<Item = u64>, partition: &Partition) -> Result<(), Refusal> {
    // The smallest row that may come next; `None` after the largest number.
    let mut least = Some(0);
    for (place, row) in rows.enumerate() {
        check_place(row, place as u64, least, partition)?;
        least = row.checked_add(1);
    }
    Ok(())
}

/// Checks that rows belong to the partition, in any order.
pub fn check_any(rows: impl Iterator<Item = u64>, partition: &Partition) -> Result<(), Refusal> {
    rows.enumerate().try_for_each(|(place, row)| check_place(row, place as u64, Some(0), partition))
}

/// Checks that the row at position `place` of a request belongs to the partition and is at least
/// `least`.
fn check_place(
    row: u64,
    place: u64,
    least: Option<u64>,
    partition: &Partition,
) -> Result<(), Refusal> {
    let variable = partition.variable;
    // Row numbers of a partition that is not a table have 32 bits.
    let last = match partition.is_table() {
        true => u64::MAX,
        false => partition.row_count().min(u32::MAX.into()).saturating_sub(1),
    };
    if row > last || least.is_none_or(|least| row < least) {
        let from = least.unwrap_or(u64::MAX);
        return Err(Refusal::Row { variable, place, row, from, last });
    }
    let bucket = table::bucket(row);
    if partition.is_table() && !partition.rows.contains(&bucket) {
        let from = partition.rows.start;
        let to = partition.rows.end;
        return Err(Refusal::Bucket { variable, place, row, bucket, from, to });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;
    use crate::ids::{ShardId, VariableId};
    use crate::partition::Partitioner;
    use crate::placement::{Placement, PlacementStrategy, ShardMap};
    use crate::table::TableSpec;
    use crate::tensor::DType;
    use crate::variable::VariableSpec;

    fn layout() -> crate::catalogue::ShardLayout {
        let cut = Partitioner::Fixed { shards: 2 };
        let variables = vec![
            VariableSpec::f32("a", [3, 3]).unwrap().sparse().partitioner(cut),
            VariableSpec::f32("b", [5]).unwrap(),
            VariableSpec::f32("c", [4]).unwrap().sparse(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        Catalogue::new(variables, &placement).unwrap().layout(ShardId::default())
    }

    fn index_of(partition: &Partition, rows: &[u64]) -> Vec<u8> {
        let mut index = Vec::new();
        encode_index(partition, rows.iter().copied(), &mut index);
        index
    }

    #[test]
    fn row_indexes_follow_the_values() {
        let layout = layout();
        // a: 2 and 1 rows of 12 bytes; b: 20 bytes; c: 16. Then indexes of 2, 1 and 4 rows.
        let offsets: Vec<u64> = layout.partitions().iter().map(|p| p.offset).collect();
        assert_eq!((offsets, layout.bytes()), (vec![0, 24, 40, 64], 80));
        let indices: Vec<Option<u64>> = layout.partitions().iter().map(|p| p.index).collect();
        assert_eq!(indices, [Some(80), Some(96), None, Some(112)]);
        assert_eq!(layout.push_bytes(), 136);
        assert!(layout.index_starts_at(96) && !layout.index_starts_at(104));
        assert_eq!(layout.dense(), std::iter::once(40..64).collect::<Vec<_>>());
        let bytes: Vec<u64> = layout.sparse().map(|p| p.row_bytes()).collect();
        assert_eq!(bytes, [12, 12, 4]);
    }

    #[test]
    fn rows_of_tables_have_ids_and_follow_the_values() {
        let table = TableSpec::new(1 << 20).rows_at_once(5);
        let cut = Partitioner::Fixed { shards: 2 };
        let variables = vec![
            VariableSpec::table("t", DType::F32, [3], table).unwrap().partitioner(cut),
            VariableSpec::f32("b", [5]).unwrap(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let layout = Catalogue::new(variables, &placement).unwrap().layout(ShardId::default());
        assert_eq!((layout.partitions().len(), layout.bytes()), (1, 24));
        let tables = layout.tables();
        let places: Vec<_> = tables.iter().map(|t| (t.offset, t.bytes, t.index)).collect();
        assert_eq!(places, [(24, 60, Some(152)), (88, 60, Some(200))]);
        assert_eq!((layout.push_bytes(), tables[0].row_bytes()), (248, 12));
        assert!(layout.starts_at(88) && layout.index_starts_at(152));
        let touched: Vec<u64> = layout.touched(152..160).map(|p| p.offset).collect();
        assert_eq!(touched, [24]);

        let mut ids: Vec<u64> = (0..9).chain([u64::MAX]).collect();
        ids.retain(|&id| tables[0].rows.contains(&table::bucket(id)));
        ids.truncate(5);
        let index = index_of(&tables[0], &ids);
        assert_eq!(index.len(), 8 + 8 * ids.len());
        let read = || numbers(&index, &tables[0], ids.len() as u64);
        assert_eq!((read().collect::<Vec<_>>(), read().at(1)), (ids.clone(), ids[1]));
        assert_eq!(check(read(), &tables[0]), Ok(()));
        let elsewhere = check(read(), &tables[1]).unwrap_err();
        assert!(matches!(elsewhere, Refusal::Bucket { place: 0, .. }), "{elsewhere}");
        let again = check([ids[0], ids[0]].into_iter(), &tables[0]).unwrap_err();
        assert!(matches!(again, Refusal::Row { place: 1, last: u64::MAX, .. }), "{again}");
        assert_eq!(check_any([ids[1], ids[0]].into_iter(), &tables[0]), Ok(()));
        let many = count(&6_u64.to_le_bytes(), &tables[0]);
        assert!(matches!(many, Err(Refusal::Rows { rows: 6, limit: 5, .. })));
    }

    #[test]
    fn an_index_round_trips_and_is_checked() {
        let layout = layout();
        let partition = layout.sparse().next_back().unwrap();
        for rows in [&[][..], &[3], &[0, 1, 3], &[0, 1, 2, 3]] {
            let index = index_of(partition, rows);
            assert_eq!(index.len() as u64, index_bytes(partition, rows.len() as u64));
            let found = count(&index, partition).unwrap();
            assert_eq!(numbers(&index, partition, found).collect::<Vec<_>>(), rows);
            assert_eq!(check(numbers(&index, partition, found), partition), Ok(()));
        }
        let variable = VariableId(2);
        let many = count(&5_u64.to_le_bytes(), partition);
        assert_eq!(many, Err(Refusal::Rows { variable, rows: 5, limit: 4 }));
        assert!(count(&[0; 7], partition).is_err(), "an index has a first word");
        let refused = |place, row, from| Err(Refusal::Row { variable, place, row, from, last: 3 });
        assert_eq!(check([0, 4].into_iter(), partition), refused(1, 4, 1));
        assert_eq!(check([0, 2, 2].into_iter(), partition), refused(2, 2, 3));
        assert_eq!(check([1, 0].into_iter(), partition), refused(1, 0, 2));
        assert_eq!(numbers(&[0; 12], partition, 2).len(), 0, "a truncated index has no rows");
    }
}
