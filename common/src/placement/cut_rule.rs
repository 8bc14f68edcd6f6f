//! [`CutRule`]: which variables [`PlacementStrategy::Balanced`] cuts, and into how many parts.
//!
//! [`PlacementStrategy::Balanced`]: super::PlacementStrategy::Balanced

use super::{PlacementError, ShardMap};
use crate::partition::Partitioner;
use crate::variable::VariableSpec;

/// A kind of variable, balanced apart from the other kinds.
///
/// A step moves every byte of a dense variable, but only some rows of a sparse one, and a table
/// counts with a limit that it may never reach. If all bytes were alike, an embedding of 10 GB
/// beside dense variables of 100 MB would let all of these on one task: a small share of the bytes,
/// and nearly all traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum VariableKind {
    Dense,
    Sparse,
    Table,
}

/// The sizes by which variables of unspecified partitioning are cut.
///
/// A piece is a twentieth of a shard's fair share, and at least [`PIECE_BYTES_MIN`]. A variable of
/// at least two pieces is cut into as many, but at most one for each shard. A variable that is
/// placed whole is therefore below a tenth of a fair share, or below two smallest pieces. Placed by
/// falling size on the lightest shard, such variables leave the fullest task less than a tenth of a
/// share above the mean. The number of parts is below 20 for each shard, plus the number of
/// variables.
#[derive(Clone, Copy, Debug)]
pub(super) struct CutRule {
    piece_bytes: [u64; 3],
    map_shards: u64,
    task_shards: u64,
}

impl VariableKind {
    pub(super) fn of(variable: &VariableSpec) -> VariableKind {
        match (variable.as_table().is_some(), variable.is_sparse()) {
            (true, _) => VariableKind::Table,
            (false, true) => VariableKind::Sparse,
            (false, false) => VariableKind::Dense,
        }
    }
}

impl CutRule {
    pub(super) fn new(variables: &[VariableSpec], map: &ShardMap) -> CutRule {
        let mut totals = [0_u64; 3];
        for variable in variables {
            let total = &mut totals[VariableKind::of(variable) as usize];
            *total = total.saturating_add(variable.master_bytes());
        }
        let task_shards = u64::from(map.shards_per_task());
        let map_shards = map.tasks().len() as u64 * task_shards;
        let shares = totals.map(|total| total / map_shards / PIECES_PER_SHARE);
        let least = [PIECE_BYTES_MIN, PIECE_BYTES_MIN, TABLE_PIECE_BYTES_MIN];
        let piece_bytes = std::array::from_fn(|kind| shares[kind].max(least[kind]));
        CutRule { piece_bytes, map_shards, task_shards }
    }

    /// Returns the number of parts of a variable. One that is pinned to a task is cut for the
    /// shards of that task only.
    pub(super) fn parts(&self, variable: &VariableSpec) -> Result<u32, PlacementError> {
        if variable.partitioner != Partitioner::Automatic {
            return variable.parts().map_err(|source| PlacementError::Variable { source });
        }
        if variable.shape().rank() == 0 {
            return Ok(1);
        }
        let shards = match variable.device.task() {
            Some(_) => self.task_shards,
            None => self.map_shards,
        };
        let pieces =
            variable.master_bytes() / self.piece_bytes[VariableKind::of(variable) as usize];
        // Fits: a map has at most `ShardMap::SHARDS_MAX` shards.
        Ok(pieces.min(shards).min(variable.shape().rows()).max(1) as u32)
    }
}

/// See [`CutRule`]. Larger pieces balance less; smaller ones make more partitions, each with its
/// own entry in the catalogue, its own padding, and its own file in a checkpoint.
const PIECES_PER_SHARE: u64 = 20;

/// The smallest part that a cut makes: one block of a shard. A message of that size costs little
/// more than an empty one, so smaller parts would save no time.
const PIECE_BYTES_MIN: u64 = 64 << 10;

/// The smallest part of a table that a cut makes. The ids of a part fill its limit unevenly, the
/// more so the fewer rows it has: with 4,096 rows of 256 bytes the standard deviation is 1.6 %.
const TABLE_PIECE_BYTES_MIN: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::TableSpec;
    use crate::tensor::DType;

    fn rule(totals: &[u64], tasks: u32, shards: u16) -> CutRule {
        let variables: Vec<_> = totals.iter().map(|&bytes| matrix(bytes)).collect();
        CutRule::new(&variables, &ShardMap::new((0..tasks).collect::<Vec<_>>(), shards).unwrap())
    }

    /// A matrix of rows of 1 KiB.
    fn matrix(bytes: u64) -> VariableSpec {
        VariableSpec::f32("w", [bytes >> 10, 256]).unwrap()
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_variable_is_cut_if_it_makes_two_pieces() {
        // A share of 20 MiB, and pieces of 1 MiB.
        let even = rule(&[160 * MIB], 4, 2);
        let parts = |variable: VariableSpec| even.parts(&variable).unwrap();
        let cases = [(1, 1), (2, 2), (3, 3), (7, 7), (8, 8), (9, 8), (160, 8)];
        for (mib, expected) in cases {
            assert_eq!(parts(matrix(mib * MIB)), expected, "{mib} MiB");
        }
        assert_eq!(parts(matrix(2 * MIB - 1024)), 1);
        assert_eq!(parts(matrix(160 * MIB).device("/task:3".parse().unwrap())), 2);
        assert_eq!(parts(matrix(160 * MIB).partitioner(Partitioner::None)), 1);
        let three = Partitioner::Fixed { shards: 3 };
        assert_eq!(parts(matrix(MIB).partitioner(three)), 3);
        assert_eq!(parts(VariableSpec::f32("rows", [3, 10 << 20]).unwrap()), 3);
        assert_eq!(parts(VariableSpec::f32("scalar", &[][..]).unwrap()), 1);
    }

    #[test]
    fn small_variables_stay_whole() {
        let small = rule(&[100 << 10], 8, 1);
        for (kib, expected) in [(0, 1), (64, 1), (127, 1), (128, 2), (300, 4)] {
            assert_eq!(small.parts(&matrix(kib << 10)).unwrap(), expected, "{kib} KiB");
        }
        let table =
            |bytes| VariableSpec::table("t", DType::F32, [4], TableSpec::new(bytes)).unwrap();
        for (bytes, expected) in [(5000, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (64 * MIB, 8)] {
            assert_eq!(small.parts(&table(bytes)).unwrap(), expected, "{bytes} bytes");
        }
    }
}
