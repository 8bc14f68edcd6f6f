//! Rows of sparse variables, as they are pushed.
//!
//! A push has two stretches for a sparse partition. The **index** lies behind the shard's variables,
//! where [`Partition::index`] says: how many rows there are (`u64`), then their numbers within the
//! partition (`u32` each, rising), padded to whole words. The **values** lie where the partition does,
//! one row behind the other without gaps, padded to whole words. So a push of every row is no longer
//! than twice the partition, and what is received needs no other place than a dense push has.
//!
//! [`Partition::index`]: crate::catalogue::Partition::index

use crate::catalogue::Partition;
use crate::protocol::Refusal;

/// The bytes of the index of so many rows.
pub const fn index_bytes(rows: u64) -> u64 {
    8 + (4 * rows).next_multiple_of(8)
}

/// The bytes of the values of so many rows of a partition.
pub fn values_bytes(partition: &Partition, rows: u64) -> u64 {
    (rows * partition.row_bytes()).next_multiple_of(8)
}

/// The index of these rows, which must rise.
pub fn encode_index(rows: &[u32]) -> Vec<u8> {
    debug_assert!(rows.is_sorted_by(|a, b| a < b), "rows rise");
    let mut index = Vec::with_capacity(index_bytes(rows.len() as u64) as usize);
    index.extend_from_slice(&(rows.len() as u64).to_le_bytes());
    index.extend(encode_numbers(rows));
    index.resize(index_bytes(rows.len() as u64) as usize, 0);
    index
}

/// How many rows an index is of, by its first word; the bytes may be anybody's.
pub fn count(index: &[u8], partition: &Partition) -> Result<u64, Refusal> {
    let word = index.first_chunk().copied().map_or(u64::MAX, u64::from_le_bytes);
    let (variable, limit) = (partition.variable, partition.row_count());
    if word > limit { Err(Refusal::Rows { variable, rows: word, limit }) } else { Ok(word) }
}

/// The numbers in the index of so many rows, which need not rise or exist.
pub fn numbers(index: &[u8], rows: u64) -> impl ExactSizeIterator<Item = u32> + Clone + '_ {
    decode_numbers(index.get(8..8 + 4 * rows as usize).unwrap_or_default())
}

/// The numbers of rows as they travel: in an index, and in what asks for rows.
pub fn encode_numbers(rows: &[u32]) -> impl Iterator<Item = u8> + '_ {
    rows.iter().flat_map(|row| row.to_le_bytes())
}

/// The reverse of [`encode_numbers`]; what is no whole number at the end is passed over.
pub fn decode_numbers(bytes: &[u8]) -> impl ExactSizeIterator<Item = u32> + Clone + '_ {
    bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// Checks that rows are the partition's, and rise.
pub fn check(rows: impl Iterator<Item = u32>, partition: &Partition) -> Result<(), Refusal> {
    // Whoever pushes rows has numbered them by 32 bits.
    let to = u32::try_from(partition.row_count()).unwrap_or(u32::MAX);
    let mut from = 0;
    for (place, row) in rows.enumerate() {
        if row < from || row >= to {
            let (variable, place) = (partition.variable, place as u64);
            return Err(Refusal::Row { variable, place, row, from, to });
        }
        from = row + 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Catalogue;
    use crate::ids::{ShardId, VariableId};
    use crate::partition::Partitioner;
    use crate::placement::{Placement, ShardMap, Strategy};
    use crate::variable::VariableSpec;

    fn layout() -> crate::catalogue::ShardLayout {
        let cut = Partitioner::Fixed { shards: 2 };
        let variables = vec![
            VariableSpec::f32("a", [3, 3]).unwrap().sparse().partitioner(cut),
            VariableSpec::f32("b", [5]).unwrap(),
            VariableSpec::f32("c", [4]).unwrap().sparse(),
        ];
        let map = ShardMap::new([0], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &Strategy::RoundRobin).unwrap();
        Catalogue::new(variables, &placement).unwrap().layout(ShardId::default())
    }

    #[test]
    fn indices_lie_behind_the_values() {
        let layout = layout();
        // a: 2 and 1 rows of 12 bytes; b: 20 bytes; c: 16. Then indices of 2, 1 and 4 rows.
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
    fn an_index_is_read_as_it_was_written_and_checked() {
        let layout = layout();
        let partition = layout.sparse().next_back().unwrap();
        for rows in [&[][..], &[3], &[0, 1, 3], &[0, 1, 2, 3]] {
            let index = encode_index(rows);
            assert_eq!(index.len() as u64, index_bytes(rows.len() as u64));
            let found = count(&index, partition).unwrap();
            assert_eq!(numbers(&index, found).collect::<Vec<_>>(), rows);
            assert_eq!(check(numbers(&index, found), partition), Ok(()));
        }
        let variable = VariableId(2);
        let many = count(&5_u64.to_le_bytes(), partition);
        assert_eq!(many, Err(Refusal::Rows { variable, rows: 5, limit: 4 }));
        assert!(count(&[0; 7], partition).is_err(), "an index has a first word");
        let refused = |place, row, from| Err(Refusal::Row { variable, place, row, from, to: 4 });
        assert_eq!(check([0, 4].into_iter(), partition), refused(1, 4, 1));
        assert_eq!(check([0, 2, 2].into_iter(), partition), refused(2, 2, 3));
        assert_eq!(check([1, 0].into_iter(), partition), refused(1, 0, 2));
        assert_eq!(numbers(&[0; 12], 2).len(), 0, "an index that is cut off has no rows");
    }
}
