//! Gradients of sparse variables: rows with unique ascending ids, cut by partition into the parts
//! that are sent.

use std::borrow::Cow;
use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::{DType, Element, bf16, elements_of, f16};

use super::duplicate_sums::DuplicateSums;
use super::part_buffer::PartBuffer;
use super::row_ids::{number_of, part_of};
use super::sharding_plan::ShardingPlan;
use crate::error::{Error, ViewError};

/// The rows of sparse variables in one push, in reusable memory.
///
/// First the rows are set. Then they are cut into parts, in the same memory. Then they are shared
/// with the session until it has sent them.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowGradients {
    /// In the order of the variables.
    sets: Vec<RowSet>,
    ids: Vec<u64>,
    /// The rows, the indices, and the parts made of them.
    pub(crate) buffer: PartBuffer,
    /// The rows of each partition of the variable that was cut last.
    by_partition: Vec<PartitionRows>,
    sums: DuplicateSums,
    /// Partition indices, each with the index of a row.
    order: Vec<(u32, u32)>,
    counts: Vec<usize>,
}

/// The rows of a variable with unique ascending ids: the ranges of their ids and values.
#[derive(Clone, Debug)]
struct RowSet {
    variable: VariableId,
    ids: Range<usize>,
    values: Range<usize>,
}

/// The rows of one partition.
#[derive(Clone, Debug)]
struct PartitionRows {
    /// The index of the partition in the catalogue.
    partition: usize,
    ids: Range<usize>,
    values: Range<usize>,
}

/// The rows of one variable, or of one of its partitions, with unique ascending ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VariableRows<'a> {
    pub(crate) variable: VariableId,
    pub(crate) ids: &'a [u64],
    pub(crate) values: &'a [u8],
}

impl VariableRows<'_> {
    /// Returns the elements, which must be of this type. Costs a copy if they are not aligned.
    pub(crate) fn elements<T: Element>(&self) -> Cow<'_, [T]> {
        bytemuck::try_cast_slice(self.values)
            .map_or_else(|_| elements_of(self.values).into(), Cow::Borrowed)
    }

    /// Returns the error for a NaN or an infinity at this index of the elements.
    pub(crate) fn non_finite(&self, plan: &ShardingPlan, element: usize, value: f64) -> Error {
        let spec = plan.catalogue().variable(self.variable);
        let variable = spec.name().to_owned();
        let width = spec.shape().row_elements() as usize;
        let row = self.ids[element / width];
        match spec.as_table() {
            Some(_) => {
                let element = element % width;
                Error::NonFiniteRow { variable, row, element, value }
            }
            None => {
                let element = row as usize * width + element % width;
                Error::NonFinite { variable, element, value }
            }
        }
    }
}

/// Which parts are made of the rows of a variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPartOptions {
    /// Include an empty index for partitions without rows.
    pub(crate) include_empty: bool,
    /// Include the values, and not the indices alone.
    pub(crate) include_values: bool,
    /// The factor by which the servers multiply values of half types.
    pub(crate) factor: f64,
}

impl RowGradients {
    /// Replaces the rows of a variable, whose ids must be valid. Rows of one id are summed in their
    /// order; halves are summed in `f32` and rounded once. Fails if there are more rows than the
    /// table accepts in one push; nothing is changed then.
    pub(crate) fn set<T: Element>(
        &mut self,
        plan: &ShardingPlan,
        variable: VariableId,
        ids: &[u64],
        values: &[T],
    ) -> Result<(), ViewError> {
        let first_id = self.ids.len();
        let first_byte = self.buffer.bytes.len();
        self.sums.add_up(ids, values, &mut self.ids, &mut self.buffer.bytes);
        if let Err(error) = self.check_count(plan, variable, first_id) {
            self.ids.truncate(first_id);
            self.buffer.bytes.truncate(first_byte);
            return Err(error);
        }
        let ids = first_id..self.ids.len();
        let values = first_byte..self.buffer.bytes.len();
        let end = self.buffer.align();
        self.remove(variable);
        // The removed rows were before these.
        let by_ids = ids.end - self.ids.len();
        let by_bytes = end - self.buffer.bytes.len();
        let set = RowSet { variable, ids, values }.moved(by_ids, by_bytes);
        let place = self.sets.partition_point(|set| set.variable < variable);
        self.sets.insert(place, set);
        Ok(())
    }

    /// Replaces the rows of a variable, given as the bytes of its type.
    pub(crate) fn set_bytes(
        &mut self,
        plan: &ShardingPlan,
        variable: VariableId,
        ids: &[u64],
        values: &[u8],
    ) -> Result<(), ViewError> {
        match plan.catalogue().variable(variable).dtype() {
            DType::F32 => self.set::<f32>(plan, variable, ids, &elements_of(values)),
            DType::F64 => self.set::<f64>(plan, variable, ids, &elements_of(values)),
            DType::I64 => self.set::<i64>(plan, variable, ids, &elements_of(values)),
            DType::F16 => self.set::<f16>(plan, variable, ids, &elements_of(values)),
            DType::Bf16 => self.set::<bf16>(plan, variable, ids, &elements_of(values)),
            _ => unreachable!("a catalogue has known types only"),
        }
    }

    /// Checks that the ids from `first` on are no more than the table accepts in one push, if the
    /// variable is a table.
    fn check_count(
        &mut self,
        plan: &ShardingPlan,
        variable: VariableId,
        first: usize,
    ) -> Result<(), ViewError> {
        let catalogue = plan.catalogue();
        let Some(table) = catalogue.variable(variable).as_table() else { return Ok(()) };
        let limit = table.rows_at_once;
        let partitions = catalogue.partitions_of(variable);
        let counts = &mut self.counts;
        counts.clear();
        counts.resize(partitions.len(), 0);
        self.ids[first..].iter().for_each(|&id| counts[part_of(partitions, id)] += 1);
        match counts.iter().find(|&&rows| rows > limit as usize) {
            None => Ok(()),
            Some(&rows) => {
                let name = catalogue.variable(variable).name().to_owned();
                Err(ViewError::RowsAtOnce { name, rows, limit })
            }
        }
    }

    /// Removes the rows of a variable.
    pub(crate) fn remove(&mut self, variable: VariableId) {
        let Some(place) = self.place_of(variable) else { return };
        let RowSet { ids, values, .. } = self.sets.remove(place);
        let values = values.start..values.end.next_multiple_of(8);
        self.ids.drain(ids.clone());
        self.buffer.bytes.drain(values.clone());
        for set in self.sets.iter_mut().filter(|set| set.ids.start >= ids.end) {
            *set = set.clone().moved(ids.len(), values.len());
        }
    }

    /// Removes everything.
    pub(crate) fn empty(&mut self) {
        self.sets.clear();
        self.ids.clear();
        self.buffer.empty();
        self.by_partition.clear();
    }

    /// Whether no variable has rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    fn place_of(&self, variable: VariableId) -> Option<usize> {
        self.sets.binary_search_by_key(&variable, |set| set.variable).ok()
    }

    /// Returns the variables that have rows, in order.
    pub(crate) fn variables(&self) -> impl Iterator<Item = VariableId> + '_ {
        self.sets.iter().map(|set| set.variable)
    }

    /// Returns the rows of each variable.
    pub(crate) fn iter(&self) -> impl Iterator<Item = VariableRows<'_>> {
        self.sets.iter().map(|RowSet { variable, ids, values }| VariableRows {
            variable: *variable,
            ids: &self.ids[ids.clone()],
            values: &self.buffer.bytes[values.clone()],
        })
    }

    /// Returns the rows of a variable, if it has any.
    pub(crate) fn of_variable(&self, variable: VariableId) -> Option<VariableRows<'_>> {
        self.iter().find(|rows| rows.variable == variable)
    }

    /// Changes every element of a variable's rows, which must be of this type. Returns false if the
    /// variable has no rows.
    pub(crate) fn change<T: Element>(
        &mut self,
        variable: VariableId,
        change: impl Fn(T) -> T,
    ) -> bool {
        let Some(place) = self.place_of(variable) else { return false };
        let values = &mut self.buffer.bytes[self.sets[place].values.clone()];
        for element in values.chunks_exact_mut(size_of::<T>()) {
            let changed = change(bytemuck::pod_read_unaligned(element));
            element.copy_from_slice(bytemuck::bytes_of(&changed));
        }
        true
    }

    /// Makes the parts for the rows of a variable.
    pub(crate) fn cut(
        &mut self,
        plan: &ShardingPlan,
        variable: VariableId,
        options: RowPartOptions,
    ) {
        let Some(place) = self.place_of(variable) else { return };
        self.split(plan, place);
        for index in 0..self.by_partition.len() {
            let rows = self.by_partition[index].clone();
            if options.include_empty || !rows.ids.is_empty() {
                let partition = &plan.catalogue().partitions()[rows.partition];
                // The index comes first, so a shard that rejects a value can name its row.
                let numbers = self.ids[rows.ids].iter().map(|&id| number_of(partition, id));
                self.buffer.add_index(plan, partition, numbers);
                if options.include_values {
                    self.buffer.add_values(plan, partition, rows.values, options.factor);
                }
            }
        }
    }

    /// Returns the rows of each partition of the variable that was cut last.
    pub(crate) fn by_partition<'a>(
        &'a self,
        plan: &'a ShardingPlan,
    ) -> impl Iterator<Item = (&'a Partition, VariableRows<'a>)> {
        self.by_partition.iter().map(|PartitionRows { partition, ids, values }| {
            let partition = &plan.catalogue().partitions()[*partition];
            let ids = &self.ids[ids.clone()];
            let values = &self.buffer.bytes[values.clone()];
            (partition, VariableRows { variable: partition.variable, ids, values })
        })
    }

    /// Finds the rows of each partition of a variable.
    fn split(&mut self, plan: &ShardingPlan, place: usize) {
        let RowSet { variable, ids, values } = self.sets[place].clone();
        let partitions = plan.catalogue().partitions_of(variable);
        let row_bytes = plan.catalogue().variable(variable).row_bytes() as usize;
        self.by_partition.clear();
        if partitions[0].is_table() && partitions.len() > 1 {
            return self.split_by_bucket(partitions, row_bytes, ids, values);
        }
        let mut end = ids.start;
        for partition in partitions {
            let start = end;
            end = match partition.is_table() {
                true => ids.end,
                false => {
                    let below = |id: &u64| *id < partition.rows.end;
                    start + self.ids[start..ids.end].partition_point(below)
                }
            };
            let first = values.start + (start - ids.start) * row_bytes;
            let values = first..first + (end - start) * row_bytes;
            self.by_partition.push(PartitionRows {
                partition: partition.id.0 as usize,
                ids: start..end,
                values,
            });
        }
    }

    /// Finds the rows of each partition of a table, whose ids are spread over the partitions by a
    /// hash. Appends a copy of the rows, partition by partition.
    fn split_by_bucket(
        &mut self,
        partitions: &[Partition],
        row_bytes: usize,
        ids: Range<usize>,
        values: Range<usize>,
    ) {
        self.order.clear();
        let places = self.ids[ids.clone()].iter().enumerate();
        let parts = places.map(|(place, &id)| (part_of(partitions, id) as u32, place as u32));
        self.order.extend(parts);
        self.order.sort_unstable();
        let mut next = 0;
        for (index, partition) in partitions.iter().enumerate() {
            let first_id = self.ids.len();
            let first_byte = self.buffer.bytes.len();
            while let Some(&(_, place)) = self.order.get(next).filter(|of| of.0 == index as u32) {
                let id = self.ids[ids.start + place as usize];
                self.ids.push(id);
                let start = values.start + place as usize * row_bytes;
                self.buffer.bytes.extend_from_within(start..start + row_bytes);
                next += 1;
            }
            let ids = first_id..self.ids.len();
            let values = first_byte..self.buffer.bytes.len();
            self.buffer.align();
            self.by_partition.push(PartitionRows {
                partition: partition.id.0 as usize,
                ids,
                values,
            });
        }
    }
}

impl RowSet {
    /// Returns the set moved towards the front by this many ids and bytes of values.
    fn moved(self, ids: usize, values: usize) -> RowSet {
        let back = |range: Range<usize>, by: usize| range.start - by..range.end - by;
        RowSet { ids: back(self.ids, ids), values: back(self.values, values), ..self }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, PlacementStrategy as Placing, ShardMap};
    use pushpull_common::table::{self, TableSpec};
    use pushpull_common::tensor::DType;
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::gradients::row_ids::check;

    /// The rows of one variable.
    pub(in super::super) fn rows_of(
        plan: &ShardingPlan,
        variable: u32,
        ids: &[u64],
        values: &[f32],
    ) -> RowGradients {
        let mut rows = RowGradients::default();
        rows.set(plan, VariableId(variable), ids, values).unwrap();
        rows
    }

    pub(in super::super) const ALL: RowPartOptions =
        RowPartOptions { include_empty: true, include_values: true, factor: 1.0 };

    pub(in super::super) fn plan(rows: u64, width: u64, parts: u32) -> ShardingPlan {
        let cut = Partitioner::Fixed { shards: parts };
        let variables = vec![
            VariableSpec::f32("dense", [3]).unwrap(),
            VariableSpec::f32("rows", [rows, width]).unwrap().sparse().partitioner(cut),
        ];
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn rows_of_tables_are_cut_by_bucket() {
        let cut = Partitioner::Fixed { shards: 3 };
        let spec = TableSpec::new(1 << 20).rows_at_once(40);
        let table = VariableSpec::table("t", DType::F32, [2], spec).unwrap().partitioner(cut);
        let map = ShardMap::new([0, 1], 1).unwrap();
        let variables = vec![table];
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        let plan = ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()));
        assert_eq!(plan.bytes(), 0, "buffers do not include tables");
        let ids = [u64::MAX, 5, 1 << 40, 5, 7, 0];
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        assert_eq!(check::<f32>(&plan, "t", &ids, 12), Ok(VariableId(0)));
        let mut set = rows_of(&plan, 0, &ids, &values);
        let summed = [0, 5, 7, 1 << 40, u64::MAX];
        assert_eq!(set.of_variable(VariableId(0)).unwrap().ids, summed);
        let mut received = Vec::new();
        set.cut(&plan, VariableId(0), ALL);
        assert_eq!(set.by_partition(&plan).count(), 3);
        for (partition, of_it) in set.by_partition(&plan) {
            assert!(of_it.ids.iter().all(|&id| partition.rows.contains(&table::bucket(id))));
            let sums = of_it.elements::<f32>();
            received.extend(of_it.ids.iter().copied().zip(sums.chunks(2).map(<[f32]>::to_vec)));
        }
        received.sort_by_key(|(id, _)| *id);
        let row = |a, b| vec![a, b];
        let sums = [row(10.0, 11.0), row(8.0, 10.0), row(8.0, 9.0), row(4.0, 5.0), row(0.0, 1.0)];
        assert_eq!(received, summed.into_iter().zip(sums).collect::<Vec<_>>());
        let many: Vec<u64> = (0..200).collect();
        let refused = set.set(&plan, VariableId(0), &many, &[0.0_f32; 400]).unwrap_err();
        assert!(matches!(refused, ViewError::RowsAtOnce { limit: 40, .. }), "{refused}");
        assert_eq!(
            set.of_variable(VariableId(0)).unwrap().ids,
            summed,
            "a refused set changes nothing"
        );
    }

    #[test]
    fn rows_of_one_id_are_summed_in_order() {
        let values = [1.0_f32, 2.0, 1e8, 0.0, 1.0, 1.0, -1e8, 5.0];
        let rows = rows_of(&plan(5, 2, 1), 1, &[3, 1, 3, 1], &values);
        let set = rows.of_variable(VariableId(1)).unwrap();
        assert_eq!((set.ids, &*set.elements()), (&[1, 3][..], &[1e8_f32 - 1e8, 5.0, 2.0, 3.0][..]));
        let of = |element| match set.non_finite(&plan(5, 2, 1), element, 7.0) {
            Error::NonFinite { element, .. } => element,
            other => panic!("{other}"),
        };
        assert_eq!((of(1), of(2)), (3, 6));
    }

    /// Several variables share the memory; each can be replaced and removed.
    #[test]
    fn variables_share_memory_and_are_replaced_independently() {
        let of = |name: &str, width| VariableSpec::f32(name, [9, width]).unwrap().sparse();
        let variables = vec![of("a", 1), of("b", 3), of("c", 2)];
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        let plan = ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()));
        let widths = [1, 3, 2];
        let mut rows = RowGradients::default();
        let mut expected: [Option<BTreeMap<u64, f32>>; 3] = Default::default();
        let sets: [(usize, &[u64]); 9] = [
            (1, &[2, 7]),
            (0, &[1, 2, 3]),
            (2, &[0]),
            (1, &[8, 3, 4]),
            (2, &[]),
            (0, &[5]),
            (1, &[6]),
            (2, &[4, 1, 4]),
            (0, &[0, 8]),
        ];
        for (nth, (id, ids)) in sets.into_iter().enumerate() {
            let values = vec![nth as f32; ids.len() * widths[id]];
            rows.set(&plan, VariableId(id as u32), ids, &values).unwrap();
            let mut sums = BTreeMap::new();
            ids.iter().for_each(|&id| *sums.entry(id).or_default() += nth as f32);
            expected[id] = Some(sums);
            if nth == 4 {
                rows.remove(VariableId(0));
                expected[0] = None;
            }
            for (index, expected) in expected.iter().enumerate() {
                let found = rows.of_variable(VariableId(index as u32)).map(|rows| {
                    let values = rows.elements::<f32>();
                    let each = values.chunks_exact(widths[index]).map(|row| {
                        assert!(row.iter().all(|value| *value == row[0]));
                        row[0]
                    });
                    rows.ids.iter().copied().zip(each).collect()
                });
                assert_eq!(found.as_ref(), expected.as_ref(), "{nth}, {index}");
            }
        }
        assert!(rows.change::<f32>(VariableId(1), |value| value + 0.5));
        assert_eq!(rows.of_variable(VariableId(1)).unwrap().elements::<f32>(), &[6.5; 3][..]);
        assert_eq!(rows.of_variable(VariableId(0)).unwrap().elements::<f32>(), &[8.0; 2][..]);
        rows.empty();
        assert!(
            rows.is_empty() && rows.variables().next().is_none() && rows.buffer.bytes.is_empty()
        );
    }
}
