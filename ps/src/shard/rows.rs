//! Rows of sparse variables: what a push or a step does to them.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::DType;
use smallvec::SmallVec;

use super::mean::{self, Mean};
use super::staleness::TILE_BYTES;
use super::work::{budget_of, change_of};
use crate::aggregate::SparseReduction;
use crate::commit::Journal;
use crate::inbox::{Inbox, Rows};
use crate::optimizer::{ApplyAt, VariableRules};
use crate::store::{NoSpareBlock, Store};
use crate::table::Table;

/// The rows that a push or a step changes, and how far it has come with them.
#[derive(Debug, Default)]
pub(super) struct RowWork {
    touched: Vec<Touched>,
    /// What the change makes.
    version: u64,
    /// The partition under way, and how many of its rows are done.
    at: usize,
    done: usize,
}

/// The rows of a partition that change.
#[derive(Debug)]
struct Touched {
    partition: Partition,
    rows: Which,
}

#[derive(Debug)]
enum Which {
    /// Those that some push has, rising.
    Pushed(Vec<u32>),
    /// All, as the rule changes those too that no push has.
    All,
    /// Those of a table, by its place among those of the shard: ids that some push has, rising.
    Ids(usize, Vec<u64>),
}

impl Which {
    /// What pushes have of some of these rows, added up; see [`add_up`].
    fn add_up<'a>(
        &self,
        partition: &Partition,
        pushes: &[Rows<'_>],
        these: Range<usize>,
        reduction: SparseReduction,
        tile: &'a mut Vec<u64>,
    ) -> &'a [u8] {
        match self {
            Which::Pushed(rows) => add_up(partition, pushes, &rows[these], reduction, tile),
            Which::Ids(_, ids) => add_up(partition, pushes, &ids[these], reduction, tile),
            Which::All => {
                let rows: Vec<u32> = (these.start as u32..these.end as u32).collect();
                add_up(partition, pushes, &rows, reduction, tile)
            }
        }
    }
}

/// What is done with them.
#[derive(Clone, Copy)]
pub(super) struct RowChange<'a> {
    pub(super) rules: &'a VariableRules,
    pub(super) operation: Operation,
    pub(super) at: ApplyAt,
    pub(super) reduction: SparseReduction,
    /// What each push's rows are multiplied by; nothing if by 1.
    pub(super) factors: &'a [f64],
}

impl RowWork {
    /// What the pushes in these rooms change together.
    pub(super) fn new(
        inbox: &Inbox,
        rooms: &[u32],
        store: &Store,
        operation: Operation,
        rules: &VariableRules,
    ) -> RowWork {
        let mut work = RowWork::default();
        for partition in store.layout().sparse().filter(|partition| !partition.is_table()) {
            let pushes: Vec<Rows<'_>> = pushes_of(inbox, rooms, &[], partition).collect();
            if pushes.is_empty() {
                continue;
            }
            let rule = rules.optimizer(partition.variable);
            let all = operation == Operation::Gradient {} && rule.moves_absent_rows();
            let rows = match all {
                true => Which::All,
                // What is no table numbers its rows by 32 bits.
                false => Which::Pushed(union(&pushes).into_iter().map(|row| row as u32).collect()),
            };
            work.touched.push(Touched { partition: partition.clone(), rows });
        }
        // Tables come last: once their rows are changed where they lie, nothing comes between.
        for (table, partition) in store.layout().tables().iter().enumerate() {
            let pushes: Vec<Rows<'_>> = pushes_of(inbox, rooms, &[], partition).collect();
            if !pushes.is_empty() {
                let rows = Which::Ids(table, union(&pushes));
                work.touched.push(Touched { partition: partition.clone(), rows });
            }
        }
        work
    }

    /// Prepares the change of these ranges of what is dense, of the rows and of the tables, by the push
    /// that makes `version` at a global step.
    pub(super) fn begin(
        &mut self,
        store: &mut Store,
        journal: &mut Journal,
        dense: &[Range<u64>],
        (step, version): (u64, u64),
        operation: Operation,
    ) -> Result<(), NoSpareBlock> {
        self.version = version;
        // Of those, too, that this change does not touch.
        store.tables_mut().iter_mut().for_each(Table::discard);
        let assigned = operation != Operation::Gradient {};
        for Touched { rows, .. } in &self.touched {
            if let Which::Ids(table, ids) = rows {
                store.tables_mut()[*table].begin(journal, ids, (step, version), assigned)?;
            }
        }
        store.make_room_for_tables(journal)?;
        let all = self.touched.iter().filter(|touched| matches!(touched.rows, Which::All));
        let all = all
            .map(|Touched { partition, .. }| partition.offset..partition.offset + partition.bytes);
        let whole: SmallVec<[Range<u64>; 8]> = dense.iter().cloned().chain(all).collect();
        let rows = self.touched.iter().filter_map(|Touched { partition, rows }| match rows {
            Which::Pushed(rows) => Some((partition, &rows[..])),
            _ => None,
        });
        store.begin(&whole, rows, version)
    }

    /// Changes rows as far as the budget goes, in bytes of gradients; whether all are done.
    pub(super) fn slice(
        &mut self,
        store: &mut Store,
        inbox: &Inbox,
        rooms: &[u32],
        change: RowChange<'_>,
        budget: &mut u64,
        tile: &mut Vec<u64>,
    ) -> Result<bool, NoSpareBlock> {
        while let Some(Touched { partition, rows }) = self.touched.get(self.at) {
            let row_bytes = partition.row_bytes();
            let pushes: Vec<Rows<'_>> =
                pushes_of(inbox, rooms, change.factors, partition).collect();
            let count = match rows {
                Which::Pushed(rows) => rows.len(),
                Which::All => partition.row_count() as usize,
                Which::Ids(_, ids) => ids.len(),
            };
            let RowChange { rules, operation, at, reduction, .. } = change;
            let change = change_of(rules, operation, at, partition);
            if matches!(rows, Which::Ids(..)) {
                store.settle_tables(self.version);
                if store.is_in_place() {
                    *budget = budget_of(store);
                }
            }
            while self.done < count {
                if *budget == 0 {
                    return Ok(false);
                }
                // One push need not be added up.
                let alone = match &pushes[..] {
                    [push] if push.factor == 1.0 && !matches!(rows, Which::All) => Some(push),
                    _ => None,
                };
                let bytes = if alone.is_some() { *budget } else { TILE_BYTES };
                let each = (bytes / row_bytes).max(1) as usize;
                let these = self.done..count.min(self.done.saturating_add(each));
                let (start, end) = (self.done * row_bytes as usize, these.end * row_bytes as usize);
                let sums = |tile| rows.add_up(partition, &pushes, these.clone(), reduction, tile);
                let values =
                    alone.map_or_else(|| sums(&mut *tile), |push| &push.values[start..end]);
                let end = these.end;
                match rows {
                    Which::Pushed(rows) => {
                        store.change_rows(change, partition, &rows[these], values)?;
                    }
                    Which::Ids(table, _) => {
                        store.change_table(*table, change, these, values);
                    }
                    Which::All => {
                        let start = partition.offset + start as u64;
                        store.change(change, start..start + values.len() as u64, values)?;
                    }
                }
                let read = (end - self.done) as u64 * row_bytes * pushes.len() as u64;
                *budget = budget.saturating_sub(read.max(8));
                self.done = end;
            }
            (self.at, self.done) = (self.at + 1, 0);
        }
        Ok(true)
    }
}

/// What the pushes in these rooms have of a partition, in their order, with their factors.
fn pushes_of<'a>(
    inbox: &'a Inbox,
    rooms: &'a [u32],
    factors: &'a [f64],
    partition: &'a Partition,
) -> impl Iterator<Item = Rows<'a>> {
    let factors = factors.iter().copied().chain(std::iter::repeat(1.0));
    rooms
        .iter()
        .zip(factors)
        .filter_map(move |(&room, factor)| Some(inbox.rows(room, partition)?.times(factor)))
}

/// The rows that some push has, rising.
fn union(pushes: &[Rows<'_>]) -> Vec<u64> {
    let mut rows: Vec<u64> = pushes.iter().flat_map(Rows::numbers).collect();
    if pushes.len() > 1 {
        rows.sort_unstable();
        rows.dedup();
    }
    rows
}

/// What pushes have of these rows, added up in their order and divided as the reduction says; zeros
/// for a row that none has.
fn add_up<'a, R: Copy + Into<u64>>(
    partition: &Partition,
    pushes: &[Rows<'_>],
    rows: &[R],
    reduction: SparseReduction,
    tile: &'a mut Vec<u64>,
) -> &'a [u8] {
    let bytes = rows.len() * partition.row_bytes() as usize;
    tile.clear();
    tile.resize(bytes.div_ceil(8), 0);
    let sums = &mut bytemuck::cast_slice_mut(tile)[..bytes];
    let width = partition.row_bytes() as usize / partition.dtype.size();
    match partition.dtype {
        DType::F32 => add_up_as::<f32, R>(width, pushes, rows, reduction, sums),
        DType::F64 => add_up_as::<f64, R>(width, pushes, rows, reduction, sums),
        _ => unreachable!("only floating-point variables are trainable"),
    }
    sums
}

fn add_up_as<T: Mean, R: Copy + Into<u64>>(
    width: usize,
    pushes: &[Rows<'_>],
    rows: &[R],
    reduction: SparseReduction,
    sums: &mut [u8],
) {
    let sums: &mut [T] = bytemuck::cast_slice_mut(sums);
    let mut having = vec![0_u32; rows.len()];
    for push in pushes {
        let values: &[T] = bytemuck::cast_slice(push.values);
        let mut next = rows.first().map_or(0, |&first| push.first_from(first.into()));
        for ((&row, sum), having) in rows.iter().zip(sums.chunks_exact_mut(width)).zip(&mut having)
        {
            let row: u64 = row.into();
            while next < push.len() && push.number(next) < row {
                next += 1;
            }
            if next == push.len() {
                break;
            }
            if push.number(next) != row {
                continue;
            }
            let values = &values[next * width..(next + 1) * width];
            // The first is what a dense gradient's sum begins with, too.
            mean::add(sum, values, push.factor, *having == 0);
            *having += 1;
        }
    }
    let divide = |sum: &mut [T], by: u32| {
        if by > 1 {
            sum.iter_mut().for_each(|sum| *sum /= T::of(by));
        }
    };
    match reduction {
        SparseReduction::Sum => {}
        SparseReduction::RowMean => {
            sums.chunks_exact_mut(width).zip(having).for_each(|(sum, having)| divide(sum, having));
        }
        SparseReduction::ReplicaMean => divide(sums, pushes.len() as u32),
    }
}
