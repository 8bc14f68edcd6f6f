//! [`FileRows`]: the first rows of a sparse variable or a table, in the file that has them.

use std::ops::Range;

use pushpull_common::ids::{ShardId, VariableId};
use safetensors::Dtype;

use crate::error::LoadError;
use crate::gradients::row_ids::part_of;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::tensor_files::FileTensor;

/// The first rows of a sparse variable or a table. They stay in their file until they are sent,
/// piece by piece, because they may need more memory than there is.
#[derive(Clone, Debug)]
pub(crate) struct FileRows {
    tensor: FileTensor,
    /// The ids of a table's rows. The rows of a sparse variable are numbered.
    ids: Option<FileTensor>,
}

/// Rows that are read at once, with their ids.
#[derive(Debug, PartialEq)]
pub(crate) struct RowPiece {
    pub(crate) ids: Vec<u64>,
    /// The rows back to back, in the type of the variable.
    pub(crate) values: Vec<u8>,
}

/// The most bytes of a piece. A row that has more is a piece.
const PIECE_BYTES: u64 = 4 << 20;

/// The ids that are read at once.
const IDS_AT_ONCE: u64 = 1 << 16;

impl FileRows {
    /// The rows of a sparse variable, in the order of their numbers.
    pub(super) fn numbered(tensor: FileTensor) -> FileRows {
        FileRows { tensor, ids: None }
    }

    /// The rows of a table, in the order of the ids. Reads and checks all ids, because repeated ones
    /// could be far from each other.
    pub(super) fn of_table(
        tensor: FileTensor,
        ids: Option<FileTensor>,
        ids_name: &str,
        table: &str,
    ) -> Result<FileRows, LoadError> {
        let path = ids.as_ref().unwrap_or(&tensor).path();
        let fault = |fault: String| LoadError::Ids {
            path: path.clone(),
            tensor: ids_name.to_owned(),
            variable: table.to_owned(),
            fault,
        };
        let ids = ids.ok_or_else(|| fault("is missing".to_owned()))?;
        let info = ids.info();
        if !matches!(info.dtype, Dtype::I64 | Dtype::U64) {
            return Err(fault(format!("has elements of {}, expected I64 or U64", info.dtype)));
        }
        let expected = &tensor.info().shape[..1];
        if info.shape != expected {
            return Err(fault(format!("has the shape {:?}, expected {expected:?}", info.shape)));
        }
        let rows = expected[0] as u64;
        let mut sorted = Vec::with_capacity(expected[0]);
        for piece in pieces(0..rows, IDS_AT_ONCE) {
            sorted.extend(ids.read_ids(piece)?);
        }
        sorted.sort_unstable();
        if let Some([id, ..]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(fault(format!("repeats the id {id}")));
        }
        Ok(FileRows { tensor, ids: Some(ids) })
    }

    /// Returns the ranges of rows of which some may be on these shards, one for each piece.
    ///
    /// A shard keeps the rows of a partition once it has the last one. The last rows of all
    /// partitions come at the end, so that a chief that dies before leaves the whole variable to its
    /// initializer, and not some partitions.
    pub(crate) fn pieces(
        &self,
        plan: &ShardingPlan,
        id: VariableId,
        shards: &[ShardId],
    ) -> impl Iterator<Item = Range<u64>> {
        let variable = plan.catalogue().variable(id);
        let rows = PIECE_BYTES / variable.row_bytes().max(1);
        let most = variable.as_table().map_or(u64::MAX, |table| table.rows_at_once.into());
        let partitions = plan.catalogue().partitions_of(id).iter();
        let partitions = partitions.filter(|partition| shards.contains(&partition.shard));
        let partitions = partitions.map(|partition| partition.rows.clone());
        let ranges: Vec<Range<u64>> = match &self.ids {
            // Ids are spread over the partitions by a hash.
            Some(ids) => std::iter::once(0..ids.info().shape[0] as u64).collect(),
            None => {
                let last = |rows: &Range<u64>| rows.end.saturating_sub(1).max(rows.start);
                let first_rows = partitions.clone().map(|rows| rows.start..last(&rows));
                first_rows.chain(partitions.map(|rows| last(&rows)..rows.end)).collect()
            }
        };
        ranges.into_iter().flat_map(move |range| pieces(range, rows.min(most).max(1)))
    }

    /// Reads those rows of a piece that are on these shards.
    pub(crate) fn read(
        &self,
        plan: &ShardingPlan,
        id: VariableId,
        piece: Range<u64>,
        shards: &[ShardId],
    ) -> Result<RowPiece, LoadError> {
        let variable = plan.catalogue().variable(id);
        let width = variable.shape().row_elements();
        let elements = piece.start * width..piece.end * width;
        let values = self.tensor.read(elements, variable.dtype())?;
        let Some(ids) = &self.ids else {
            return Ok(RowPiece { ids: piece.collect(), values });
        };
        let mut ids = ids.read_ids(piece)?;
        let partitions = plan.catalogue().partitions_of(id);
        let is_there = |id: u64| shards.contains(&partitions[part_of(partitions, id)].shard);
        if ids.iter().all(|&id| is_there(id)) {
            return Ok(RowPiece { ids, values });
        }
        let rows = ids.iter().zip(values.chunks_exact(variable.row_bytes() as usize));
        let rows = rows.filter(|&(&id, _)| is_there(id)).map(|(_, row)| row);
        let values = rows.collect::<Vec<_>>().concat();
        ids.retain(|&id| is_there(id));
        Ok(RowPiece { ids, values })
    }
}

/// Cuts a range into pieces of `rows`, and one of the rest.
fn pieces(range: Range<u64>, rows: u64) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range.step_by(rows as usize).map(move |start| start..end.min(start.saturating_add(rows)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
    use pushpull_common::table::TableSpec;
    use pushpull_common::tensor::{DType, f16};
    use pushpull_common::variable::VariableSpec;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::error::Error;
    use crate::initial_values::{InitialTensors, InitialValues, LoadOptions};

    /// Nine rows of two `f32`, and a table of such rows, each in three partitions on two shards.
    fn plan() -> ShardingPlan {
        let cut = |variable: VariableSpec| variable.partitioner(Partitioner::Fixed { shards: 3 });
        let table = TableSpec::new(1 << 20).rows_at_once(4);
        let variables = vec![
            cut(VariableSpec::f32("rows", [9, 2]).unwrap().sparse()),
            cut(VariableSpec::table("table", DType::F32, [2], table).unwrap()),
        ];
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    type Tensor<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

    fn write(path: &Path, tensors: &[Tensor<'_>]) {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
        });
        std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    fn singles(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    const IDS: [u64; 6] = [7, u64::MAX, 0, 1 << 40, 5, 3];

    /// Rows of halves, and a table of six rows with the ids [`IDS`].
    fn tensors() -> Vec<Tensor<'static>> {
        let halves = (0..18).flat_map(|value| f16::from_f32(value as f32).to_le_bytes());
        let values: Vec<f32> = (0..12).map(|value| value as f32).collect();
        vec![
            ("rows", Dtype::F16, &[9, 2], halves.collect()),
            ("table", Dtype::F32, &[6, 2], singles(&values)),
            ("table:ids", Dtype::I64, &[6], IDS.iter().flat_map(|id| id.to_le_bytes()).collect()),
        ]
    }

    fn load(plan: &ShardingPlan, tensors: &[Tensor<'_>]) -> Result<InitialTensors, LoadError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        write(file.path(), tensors);
        let mut initial_values = InitialValues::new(plan);
        initial_values.load_with(file.path(), &LoadOptions::new().cast(true));
        initial_values.finish().map_err(|error| match error {
            Error::Load(error) => error,
            other => panic!("{other}"),
        })
    }

    /// All rows that are read for these shards, each with its id.
    fn read(
        plan: &ShardingPlan,
        tensors: &InitialTensors,
        variable: u32,
        shards: &[ShardId],
    ) -> Vec<(u64, Vec<u8>)> {
        let id = VariableId(variable);
        let rows = &tensors.rows[&id];
        let pieces = rows.pieces(plan, id, shards);
        let pieces = pieces.map(|piece| rows.read(plan, id, piece, shards).unwrap());
        let rows = pieces.flat_map(|RowPiece { ids, values }| {
            assert_eq!(values.len(), 8 * ids.len());
            let rows: Vec<_> = values.chunks(8).map(<[u8]>::to_vec).collect();
            ids.into_iter().zip(rows).collect::<Vec<_>>()
        });
        rows.collect()
    }

    #[test]
    fn each_shard_is_sent_its_rows() {
        let plan = plan();
        // The file is open, so that it may be removed.
        let tensors = load(&plan, &tensors()).unwrap();
        assert!(tensors.dense.is_empty());
        let row = |first: usize| singles(&[2.0 * first as f32, 2.0 * first as f32 + 1.0]);
        let all = [
            (0..9).map(|index| (index as u64, row(index))).collect::<Vec<_>>(),
            IDS.iter().enumerate().map(|(index, &id)| (id, row(index))).collect(),
        ];
        for (variable, all) in all.into_iter().enumerate() {
            let read = |shards: &[ShardId]| read(&plan, &tensors, variable as u32, shards);
            let of = plan.shards().iter().map(|&shard| read(&[shard])).collect::<Vec<_>>();
            assert!(of.iter().all(|rows| !rows.is_empty() && rows.len() < all.len()), "{of:?}");
            let mut united = of.concat();
            united.sort();
            let mut whole = read(plan.shards());
            whole.sort();
            assert_eq!(united, whole);
            let mut all = all;
            all.sort();
            assert_eq!(whole, all);
        }
    }

    #[test]
    fn pieces_have_no_more_rows_than_a_push_of_the_table() {
        let plan = plan();
        let tensors = load(&plan, &tensors()).unwrap();
        let pieces = |variable: u32| {
            let id = VariableId(variable);
            tensors.rows[&id].pieces(&plan, id, plan.shards()).collect::<Vec<_>>()
        };
        assert_eq!(
            (pieces(0), pieces(1)),
            (vec![0..2, 3..5, 6..8, 2..3, 5..6, 8..9], vec![0..4, 4..6])
        );
        assert_eq!(super::pieces(0..5, 2).collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
        assert_eq!(super::pieces(5..5, 2).count(), 0);
    }

    #[test]
    fn ids_that_are_none_are_refused() {
        let ids = |ids: &[u64]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
        let of = |name, dtype, shape, bytes| Some((name, dtype, shape, bytes));
        for (tensor, expected) in [
            (None, "the tensor \"table:ids\", the ids of the table \"table\", is missing"),
            (
                of("table:ids", Dtype::F64, &[6][..], ids(&IDS)),
                "has elements of F64, expected I64 or U64",
            ),
            (of("table:ids", Dtype::I64, &[5], ids(&IDS[..5])), "has the shape [5], expected [6]"),
            (of("table:ids", Dtype::I64, &[6, 1], ids(&IDS)), "has the shape [6, 1], expected [6]"),
            (
                of("table:ids", Dtype::U64, &[6], ids(&[1, u64::MAX, 2, 3, u64::MAX, 4])),
                "repeats the id 18446744073709551615",
            ),
        ] {
            let mut tensors = tensors();
            tensors.truncate(2);
            tensors.extend(tensor);
            let error = load(&plan(), &tensors).unwrap_err();
            assert!(matches!(error, LoadError::Ids { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{expected}: {error}");
        }
        let mut tensors = tensors();
        tensors[1] = ("table", Dtype::F32, &[4, 3], singles(&[0.0; 12]));
        let error = load(&plan(), &tensors).unwrap_err().to_string();
        let expected = "is [4, 3], and that of \"table\" is [4, 2] with any number of rows";
        assert!(error.contains(expected), "{error}");
        tensors[1] = ("table", Dtype::F32, &[], singles(&[0.0]));
        let error = load(&plan(), &tensors).unwrap_err();
        assert!(matches!(error, LoadError::Shape { .. }), "{error}");
    }

    /// An element of rows is named by its index in the tensor.
    #[test]
    fn a_number_beyond_the_range_is_named() {
        let table = VariableSpec::new(
            "rows",
            DType::F16,
            pushpull_common::tensor::Shape::new([4, 2]).unwrap(),
        );
        let variables = vec![table.unwrap().sparse().partitioner(Partitioner::Fixed { shards: 2 })];
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
        let plan = ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()));
        let values = singles(&[0.0, 1.0, 2.0, 3.0, 4.0, 1e6, 6.0, f32::INFINITY]);
        let tensors = load(&plan, &[("rows", Dtype::F32, &[4, 2], values)]).unwrap();
        let id = VariableId(0);
        let rows = &tensors.rows[&id];
        let results: Vec<_> = rows
            .pieces(&plan, id, plan.shards())
            .map(|piece| rows.read(&plan, id, piece, plan.shards()))
            .collect();
        let halves: Vec<u8> =
            [0.0, 1.0].iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        assert_eq!(results[0], Ok(RowPiece { ids: vec![0], values: halves }));
        let error = results[1].as_ref().unwrap_err().to_string();
        let expected = "element 5 of the tensor \"rows\" is 1000000, beyond the range of f16";
        assert!(error.contains(expected), "{error}");
    }
}
