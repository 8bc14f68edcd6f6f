//! Rows of sparse variables on this side: what is asked for, and what is pushed, cut by partition.

use std::ops::AddAssign;

use bytes::Bytes;
use pushpull_common::catalogue::Partition;
use pushpull_common::ids::{ShardId, VariableId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::rows;
use pushpull_common::table;
use pushpull_common::tensor::{DType, Element, bf16, elements_of, f16};

use crate::compression::singles;
use crate::error::{Error, ViewError};
use crate::fanout::Plan;
use crate::params::find;
use crate::parts::Part;
use crate::session;

/// Checks that a variable has these rows, and that so many elements of a type are as many rows of it.
pub(crate) fn check<T: Element>(
    plan: &Plan,
    name: &str,
    ids: &[u64],
    elements: usize,
) -> Result<VariableId, ViewError> {
    let name = || name.to_owned();
    let id = find(plan, &name())?;
    let variable = plan.catalogue().variable(id);
    let (dtype, asked) = (variable.dtype(), T::DTYPE);
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

/// Rows of one variable, each once, in rising order.
#[derive(Clone, Debug)]
pub(crate) struct RowSet {
    variable: VariableId,
    ids: Vec<u64>,
    values: Bytes,
}

impl RowSet {
    /// These rows, which have been checked; those of one number are added up in their order, halves in
    /// `f32`, to be rounded once. An error says that they are more than a table takes at once.
    pub(crate) fn sum<T: Element>(
        plan: &Plan,
        variable: VariableId,
        ids: &[u64],
        values: &[T],
    ) -> Result<RowSet, ViewError> {
        let set = RowSet::sum_any(variable, ids, values);
        let catalogue = plan.catalogue();
        if let Some(table) = catalogue.variable(variable).as_table() {
            let limit = table.rows_at_once;
            let partitions = catalogue.partitions_of(variable);
            let mut counts = vec![0; partitions.len()];
            set.ids.iter().for_each(|&id| counts[part_of(partitions, id)] += 1);
            if let Some(&rows) = counts.iter().find(|&&rows| rows > limit as usize) {
                let name = catalogue.variable(variable).name().to_owned();
                return Err(ViewError::RowsAtOnce { name, rows, limit });
            }
        }
        Ok(set)
    }

    fn sum_any<T: Element>(variable: VariableId, ids: &[u64], values: &[T]) -> RowSet {
        let width = values.len().checked_div(ids.len()).unwrap_or(0);
        let values: &[u8] = bytemuck::cast_slice(values);
        if ids.is_sorted_by(|a, b| a < b) {
            let values = Bytes::copy_from_slice(values);
            return RowSet { variable, ids: ids.to_vec(), values };
        }
        // Sorted by number, then by place.
        let keys = ids.iter().enumerate().map(|(place, &id)| (id, place as u32));
        let mut order: Vec<(u64, u32)> = keys.collect();
        order.sort_unstable();
        let summed = rising(&order);
        let narrow = || add_up::<f32>(&order, width, &singles(T::DTYPE, values, 1.0)).into_iter();
        let values = match T::DTYPE {
            DType::F32 => bytes_of(add_up::<f32>(&order, width, bytemuck::cast_slice(values))),
            DType::F64 => bytes_of(add_up::<f64>(&order, width, bytemuck::cast_slice(values))),
            DType::I64 => bytes_of(add_up::<i64>(&order, width, bytemuck::cast_slice(values))),
            DType::F16 => bytes_of(narrow().map(f16::from_f32).collect()),
            DType::Bf16 => bytes_of(narrow().map(bf16::from_f32).collect()),
            _ => unreachable!("an element is of a known type"),
        };
        RowSet { variable, ids: summed, values }
    }

    /// The first number that is there twice, if one is.
    pub(crate) fn twice(ids: &[u64]) -> Option<u64> {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    }

    pub(crate) fn variable(&self) -> VariableId {
        self.variable
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The numbers of the rows in the variable, rising.
    pub(crate) fn ids(&self) -> &[u64] {
        &self.ids
    }

    pub(crate) fn values(&self) -> &[u8] {
        &self.values
    }

    /// The elements, which are of this type. Costs a copy: rows need not lie aligned.
    pub(crate) fn elements<T: Element>(&self) -> Vec<T> {
        elements_of(&self.values)
    }

    /// Changes every element, which is of this type. Costs a copy of the rows.
    pub(crate) fn change<T: Element>(&mut self, change: impl Fn(T) -> T) {
        let values: Vec<T> = self.elements::<T>().into_iter().map(change).collect();
        self.values = Bytes::copy_from_slice(bytemuck::cast_slice(&values));
    }

    /// The error that says which element is NaN or infinite: this one of the values.
    pub(crate) fn non_finite(&self, plan: &Plan, element: usize, value: f64) -> Error {
        let spec = plan.catalogue().variable(self.variable);
        let (variable, width) = (spec.name().to_owned(), spec.shape().row_elements() as usize);
        let row = self.ids[element / width];
        match spec.as_table() {
            Some(_) => Error::NonFiniteRow { variable, row, value },
            None => {
                let element = row as usize * width + element % width;
                Error::NonFinite { variable, element, value }
            }
        }
    }

    /// The parts in which they travel, by shard: each partition has its rows, or is told that it has
    /// none if `all` says so. Those of a half type are multiplied with `factor` there.
    pub(crate) fn parts(&self, plan: &Plan, all: bool, factor: f64) -> Vec<(ShardId, Vec<Part>)> {
        let mut by_shard: Vec<(ShardId, Vec<Part>)> = Vec::new();
        for (partition, set) in self.by_partition(plan) {
            if all || set.len() > 0 {
                // The numbers first: whoever finds fault with a value can say of which row.
                let mut parts = set.index(plan, partition);
                parts.extend(set.value_parts(plan, partition, factor));
                add_parts(&mut by_shard, partition.shard, parts);
            }
        }
        by_shard
    }

    /// The parts in which the values travel, which are all of this partition.
    fn value_parts(self, plan: &Plan, partition: &Partition, factor: f64) -> Vec<Part> {
        let values = self.values;
        match partition.own {
            Some(own) => {
                let elements = values.len() / 2;
                plan.halves(partition, own, factor, elements, |range| values.slice(range)).collect()
            }
            None => {
                let bytes = rows::values_bytes(partition, self.ids.len() as u64) as usize;
                let padding = bytes - values.len();
                plan.cut(partition.offset, values, padding)
            }
        }
    }

    /// The rows that each partition of the variable has.
    pub(crate) fn by_partition<'a>(&self, plan: &'a Plan) -> Vec<(&'a Partition, RowSet)> {
        let partitions = plan.catalogue().partitions_of(self.variable);
        let row_bytes = plan.catalogue().variable(self.variable).row_bytes() as usize;
        if partitions[0].is_table() {
            return partitions.iter().zip(self.by_bucket(partitions, row_bytes)).collect();
        }
        let below = |row: u64| self.ids.partition_point(|&id| id < row);
        let of = |partition: &'a Partition| {
            let held = below(partition.rows.start)..below(partition.rows.end);
            let values = self.values.slice(held.start * row_bytes..held.end * row_bytes);
            let (variable, ids) = (self.variable, self.ids[held].to_vec());
            (partition, RowSet { variable, ids, values })
        };
        partitions.iter().map(of).collect()
    }

    /// The rows that each partition of a table has: those of its buckets.
    fn by_bucket(&self, partitions: &[Partition], row_bytes: usize) -> Vec<RowSet> {
        if partitions.len() == 1 {
            return vec![self.clone()];
        }
        let mut cut: Vec<(Vec<u64>, Vec<u8>)> = vec![Default::default(); partitions.len()];
        for (&id, row) in self.ids.iter().zip(self.values.chunks_exact(row_bytes)) {
            let (ids, values) = &mut cut[part_of(partitions, id)];
            ids.push(id);
            values.extend_from_slice(row);
        }
        let variable = self.variable;
        cut.into_iter()
            .map(|(ids, values)| RowSet { variable, ids, values: values.into() })
            .collect()
    }

    /// The parts in which the numbers of the rows travel, which are all of this partition.
    pub(crate) fn index(&self, plan: &Plan, partition: &Partition) -> Vec<Part> {
        let numbers: Vec<u64> = self.ids.iter().map(|&id| number_of(partition, id)).collect();
        let index = Bytes::from(rows::encode_index(partition, &numbers));
        plan.cut(partition.index.unwrap_or(0), index, 0)
    }
}

pub(crate) fn add_parts(
    by_shard: &mut Vec<(ShardId, Vec<Part>)>,
    shard: ShardId,
    parts: Vec<Part>,
) {
    match by_shard.iter_mut().find(|(other, _)| *other == shard) {
        Some((_, before)) => before.extend(parts),
        None => by_shard.push((shard, parts)),
    }
}

/// The place of the partition that holds a row of a variable.
fn part_of(partitions: &[Partition], id: u64) -> usize {
    let row = if partitions[0].is_table() { table::bucket(id) } else { id };
    partitions.partition_point(|partition| partition.rows.end <= row)
}

/// What a row of a variable is called in a partition: its number there, or its id.
fn number_of(partition: &Partition, id: u64) -> u64 {
    if partition.is_table() { id } else { id - partition.rows.start }
}

/// The numbers of rows, each once; beside each stands a place.
fn rising(order: &[(u64, u32)]) -> Vec<u64> {
    let mut ids: Vec<u64> = order.iter().map(|(id, _)| *id).collect();
    ids.dedup();
    ids
}

/// The rows whose numbers and places these are, summed by number.
fn add_up<T: Element + AddAssign>(order: &[(u64, u32)], width: usize, values: &[T]) -> Vec<T> {
    let mut before = None;
    let mut sums: Vec<T> = Vec::with_capacity(values.len());
    for &(id, place) in order {
        let place = place as usize;
        let row = &values[place * width..(place + 1) * width];
        if before == Some(id) {
            let last = sums.len() - width;
            sums[last..].iter_mut().zip(row).for_each(|(sum, &value)| *sum += value);
        } else {
            sums.extend_from_slice(row);
        }
        before = Some(id);
    }
    sums
}

fn bytes_of<T: Element>(elements: Vec<T>) -> Bytes {
    Bytes::copy_from_slice(bytemuck::cast_slice(&elements))
}

/// What is asked of the servers for rows of a variable, and where the answers lie.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) asks: Vec<session::Rows>,
    /// Where each row is in the buffer, counted in rows; `None` if they are in their order.
    places: Option<Vec<u32>>,
    row_bytes: usize,
}

impl Wanted {
    /// These rows of a variable, which have been checked.
    pub(crate) fn new(plan: &Plan, variable: VariableId, ids: &[u64]) -> Wanted {
        let partitions = plan.catalogue().partitions_of(variable);
        let row_bytes = plan.catalogue().variable(variable).row_bytes() as usize;
        let mut wanted = Wanted { asks: Vec::new(), places: None, row_bytes };
        if let [partition] = partitions {
            wanted.ask(partition, ids, 0);
            return wanted;
        }
        let mut numbers: Vec<Vec<u64>> = vec![Vec::new(); partitions.len()];
        let among = ids.iter().map(|&id| {
            let part = part_of(partitions, id);
            numbers[part].push(number_of(&partitions[part], id));
            (part, numbers[part].len() - 1)
        });
        let among: Vec<(usize, usize)> = among.collect();
        let mut starts = Vec::with_capacity(partitions.len());
        let mut next = 0;
        for (partition, numbers) in partitions.iter().zip(&numbers) {
            starts.push(next);
            wanted.ask(partition, numbers, next);
            next += numbers.len();
        }
        let places = among.into_iter().map(|(part, place)| (starts[part] + place) as u32);
        wanted.places = Some(places.collect());
        wanted
    }

    fn ask(&mut self, partition: &Partition, numbers: &[u64], first: usize) {
        // Neither the numbers nor the rows, as the shard keeps them, are more than a body may be.
        let each = partition.row_bytes().max(rows::number_bytes(partition)) as usize;
        let most = (PART_BYTES_MAX as usize / each).max(1);
        for (index, numbers) in numbers.chunks(most).enumerate() {
            let start = (first + index * most) * self.row_bytes;
            let to = start..start + numbers.len() * self.row_bytes;
            let mut encoded = Vec::new();
            rows::encode_numbers(partition, numbers, &mut encoded);
            let (shard, partition, numbers) = (partition.shard, partition.id, encoded.into());
            self.asks.push(session::Rows { shard, partition, numbers, to });
        }
    }

    /// Puts what was received into the order of the rows that were asked for.
    pub(crate) fn put(&self, received: &[u8], rows: &mut [u8]) {
        let Some(places) = &self.places else {
            return rows.copy_from_slice(&received[..rows.len()]);
        };
        for (row, &place) in rows.chunks_exact_mut(self.row_bytes).zip(places) {
            let start = place as usize * self.row_bytes;
            row.copy_from_slice(&received[start..start + self.row_bytes]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use pushpull_common::catalogue::Catalogue;
    use pushpull_common::partition::Partitioner;
    use pushpull_common::placement::{Placement, ShardMap, Strategy as Placing};
    use pushpull_common::table::TableSpec;
    use pushpull_common::variable::VariableSpec;

    use super::*;

    fn plan(rows: u64, width: u64, parts: u32) -> Plan {
        let cut = Partitioner::Fixed { shards: parts };
        let variables = vec![
            VariableSpec::f32("dense", [3]).unwrap(),
            VariableSpec::f32("rows", [rows, width]).unwrap().sparse().partitioner(cut),
        ];
        let map = ShardMap::new([0, 1], 1).unwrap();
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        Plan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
    }

    #[test]
    fn what_is_no_row_is_told_with_its_place() {
        let (plan, name) = (plan(5, 2, 2), || "rows".to_owned());
        let check = |name: &str, ids: &[u64], elements| check::<f32>(&plan, name, ids, elements);
        assert_eq!(check("rows", &[4, 0, 4], 6), Ok(VariableId(1)));
        let row = ViewError::Row { name: name(), row: 5, place: 1, rows: 5 };
        assert_eq!(check("rows", &[0, 5], 4), Err(row));
        let width = ViewError::Width { name: name(), rows: 2, elements: 5, width: 2 };
        assert_eq!(check("rows", &[0, 1], 5), Err(width));
        assert_eq!(check("dense", &[0], 1), Err(ViewError::Dense { name: "dense".to_owned() }));
        let asked = super::check::<f64>(&plan, "rows", &[0], 2);
        let (asked, dtype) = (asked.unwrap_err(), DType::F32);
        assert_eq!(asked, ViewError::Type { name: name(), asked: DType::F64, dtype });
    }

    #[test]
    fn rows_of_tables_go_by_their_buckets() {
        let cut = Partitioner::Fixed { shards: 3 };
        let spec = TableSpec::new(1 << 20).rows_at_once(40);
        let table = VariableSpec::table("t", DType::F32, [2], spec).unwrap().partitioner(cut);
        let map = ShardMap::new([0, 1], 1).unwrap();
        let variables = vec![table];
        let placement = Placement::plan(&variables, &map, &Placing::RoundRobin).unwrap();
        let plan = Plan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()));
        assert_eq!(plan.bytes(), 0, "nobody has a copy");
        let ids = [u64::MAX, 5, 1 << 40, 5, 7, 0];
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        assert_eq!(check::<f32>(&plan, "t", &ids, 12), Ok(VariableId(0)));
        let set = RowSet::sum(&plan, VariableId(0), &ids, &values).unwrap();
        assert_eq!(set.ids, [0, 5, 7, 1 << 40, u64::MAX]);
        let mut told = Vec::new();
        let partitions = plan.catalogue().partitions();
        for (partition, of_it) in partitions.iter().zip(set.by_bucket(partitions, 8)) {
            assert!(of_it.ids.iter().all(|&id| partition.rows.contains(&table::bucket(id))));
            let sums: &[f32] = bytemuck::cast_slice(of_it.values());
            told.extend(of_it.ids.iter().copied().zip(sums.chunks(2).map(<[f32]>::to_vec)));
        }
        told.sort_by_key(|(id, _)| *id);
        let row = |a, b| vec![a, b];
        let sums = [row(10.0, 11.0), row(8.0, 10.0), row(8.0, 9.0), row(4.0, 5.0), row(0.0, 1.0)];
        assert_eq!(told, set.ids.iter().copied().zip(sums).collect::<Vec<_>>());
        let many: Vec<u64> = (0..200).collect();
        let refused = RowSet::sum(&plan, VariableId(0), &many, &[0.0_f32; 400]).unwrap_err();
        assert!(matches!(refused, ViewError::RowsAtOnce { limit: 40, .. }), "{refused}");
        let asks = Wanted::new(&plan, VariableId(0), &ids).asks;
        assert_eq!(asks.iter().map(|ask| ask.numbers.len()).sum::<usize>(), 6 * 8);
    }

    #[test]
    fn rows_of_one_number_are_added_in_their_order() {
        let values = [1.0_f32, 2.0, 1e8, 0.0, 1.0, 1.0, -1e8, 5.0];
        let set = RowSet::sum(&plan(5, 2, 1), VariableId(1), &[3, 1, 3, 1], &values).unwrap();
        assert_eq!(set.ids, [1, 3]);
        let sums: &[f32] = bytemuck::cast_slice(set.values());
        assert_eq!(sums, [1e8 - 1e8, 5.0, 2.0, 3.0]);
        let of = |element| match set.non_finite(&plan(5, 2, 1), element, 7.0) {
            Error::NonFinite { element, .. } => element,
            other => panic!("{other}"),
        };
        assert_eq!((of(1), of(2)), (3, 6));
        assert_eq!((RowSet::twice(&[3, 1, 3]), RowSet::twice(&[3, 1])), (Some(3), None));
    }

    proptest! {
        /// Every partition is told of its rows, each once, and of no others.
        #[test]
        fn partitions_get_their_rows(
            ids in prop::collection::vec(0u64..12, 0..30),
            parts in 1u32..5,
            width in 1u64..4,
        ) {
            let plan = plan(12, width, parts);
            let values: Vec<f32> = (0..ids.len() * width as usize).map(|i| i as f32).collect();
            let set = RowSet::sum(&plan, VariableId(1), &ids, &values).unwrap();
            let mut told = std::collections::BTreeMap::new();
            let parts = set.parts(&plan, true, 1.0);
            for partition in plan.catalogue().partitions_of(VariableId(1)) {
                let (_, parts) = parts.iter().find(|(shard, _)| *shard == partition.shard).unwrap();
                let bytes = |start: u64, end: u64| -> Vec<u8> {
                    let parts = parts.iter().filter(|p| (start..end).contains(&p.offset));
                    parts.flat_map(|part| part.body.concat()).collect()
                };
                let index = partition.index.unwrap();
                let all = rows::index_bytes(partition, partition.row_count());
                let index = bytes(index, index + all);
                let count = rows::count(&index, partition).unwrap();
                prop_assert_eq!(index.len() as u64, rows::index_bytes(partition, count));
                let numbers = rows::numbers(&index, partition, count);
                prop_assert_eq!(rows::check(numbers.clone(), partition), Ok(()));
                let values = bytes(partition.offset, partition.end());
                prop_assert_eq!(values.len() as u64, rows::values_bytes(partition, count));
                let values = values.chunks(4).map(|v| f32::from_le_bytes(v.try_into().unwrap()));
                let values: Vec<f32> = values.collect();
                for (number, row) in numbers.zip(values.chunks(width as usize)) {
                    told.insert(partition.rows.start + number, row.to_vec());
                }
            }
            let mut sums = std::collections::BTreeMap::new();
            for (id, row) in ids.iter().zip(values.chunks(width as usize)) {
                let sum = sums.entry(*id).or_insert_with(|| vec![0.0; width as usize]);
                sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
            prop_assert_eq!(told, sums);
        }

        /// What is asked for comes back in its order.
        #[test]
        fn rows_come_back_in_their_order(
            ids in prop::collection::vec(0u64..12, 0..30),
            parts in 1u32..5,
        ) {
            let plan = plan(12, 2, parts);
            let wanted = Wanted::new(&plan, VariableId(1), &ids);
            let mut received = vec![0_u8; ids.len() * 8];
            for ask in &wanted.asks {
                let partition = &plan.catalogue().partitions()[ask.partition.0 as usize];
                prop_assert_eq!(partition.shard, ask.shard);
                let numbers = ask.numbers.chunks(4).map(|n| u32::from_le_bytes(n.try_into().unwrap()));
                let rows = numbers.flat_map(|number| {
                    let row = (partition.rows.start + u64::from(number)) as f32;
                    [row, row + 0.5]
                });
                let rows: Vec<f32> = rows.collect();
                received[ask.to.clone()].copy_from_slice(bytemuck::cast_slice(&rows));
            }
            let mut found = vec![0.0_f32; ids.len() * 2];
            wanted.put(&received, bytemuck::cast_slice_mut(&mut found));
            let expected: Vec<f32> = ids.iter().flat_map(|&id| [id as f32, id as f32 + 0.5]).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
