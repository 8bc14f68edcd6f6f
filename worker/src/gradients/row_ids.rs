//! Ids of the rows of a sparse variable: whether they are valid, and which partition holds each.

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::VariableId;
use pushpull_common::table;
use pushpull_common::tensor::Element;

use super::sharding_plan::ShardingPlan;
use crate::error::ViewError;

/// Checks that a variable has these rows, and that they have this many elements of a type.
pub(crate) fn check<T: Element>(
    plan: &ShardingPlan,
    name: &str,
    ids: &[u64],
    elements: usize,
) -> Result<VariableId, ViewError> {
    let id = plan.find(name)?;
    let name = || name.to_owned();
    let variable = plan.catalogue().variable(id);
    let dtype = variable.dtype();
    let asked = T::DTYPE;
    if dtype != asked {
        return Err(ViewError::Type { name: name(), asked, dtype });
    }
    if !variable.is_sparse() {
        return Err(ViewError::Dense { name: name() });
    }
    let width = variable.shape().row_elements();
    if ids.len() as u64 * width != elements as u64 {
        return Err(ViewError::Width { name: name(), rows: ids.len(), elements, width });
    }
    if variable.as_table().is_some() {
        return Ok(id);
    }
    let rows = variable.shape().rows();
    match ids.iter().position(|&id| id >= rows) {
        Some(place) => Err(ViewError::Row { name: name(), row: ids[place], place, rows }),
        None => Ok(id),
    }
}

/// Returns the lowest repeated id, if there is one, and the index of its second occurrence.
pub(crate) fn first_duplicate(ids: &[u64]) -> Option<(u64, usize)> {
    let mut sorted: Vec<(u64, usize)> = ids.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| pair[1])
}

/// Returns the index of the partition that holds a row of a variable.
pub(crate) fn part_of(partitions: &[Partition], id: u64) -> usize {
    let row = if partitions[0].is_table() { table::bucket(id) } else { id };
    partitions.partition_point(|partition| partition.rows.end <= row)
}

/// Returns the number of a row in a partition: its index there, or its id in a table.
pub(crate) fn number_of(partition: &Partition, id: u64) -> u64 {
    if partition.is_table() { id } else { id - partition.rows.start }
}

#[cfg(test)]
mod tests {
    use pushpull_common::tensor::DType;

    use super::*;
    use crate::gradients::rows::tests::plan;

    #[test]
    fn invalid_rows_are_reported_with_their_index() {
        let plan = plan(5, 2, 2);
        let name = || "rows".to_owned();
        let check = |name: &str, ids: &[u64], elements| check::<f32>(&plan, name, ids, elements);
        assert_eq!(check("rows", &[4, 0, 4], 6), Ok(VariableId(1)));
        let row = ViewError::Row { name: name(), row: 5, place: 1, rows: 5 };
        assert_eq!(check("rows", &[0, 5], 4), Err(row));
        let width = ViewError::Width { name: name(), rows: 2, elements: 5, width: 2 };
        assert_eq!(check("rows", &[0, 1], 5), Err(width));
        assert_eq!(check("dense", &[0], 1), Err(ViewError::Dense { name: "dense".to_owned() }));
        let asked = super::check::<f64>(&plan, "rows", &[0], 2);
        let asked = asked.unwrap_err();
        let dtype = DType::F32;
        assert_eq!(asked, ViewError::Type { name: name(), asked: DType::F64, dtype });
    }

    #[test]
    fn the_second_occurrence_of_the_lowest_repeated_id_is_found() {
        assert_eq!((first_duplicate(&[3, 1, 3]), first_duplicate(&[3, 1])), (Some((3, 2)), None));
    }
}
