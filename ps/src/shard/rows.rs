//! Rows of sparse variables: what a push or a step does to them.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::DType;

use super::mean::{self, Mean};
use super::staleness::TILE_BYTES;
use super::work::{budget_of, change_of};
use crate::aggregate::SparseReduction;
use crate::aggregate::step_coordinator::PerPush;
use crate::commit::Journal;
use crate::inbox::{Inbox, Rows};
use crate::optimizer::{ApplyAt, VariableRules};
use crate::store::{NoFreeBlock, Stalled, Store};
use crate::table::Table;

/// The rows that the push or the step under way changes, and how far it has come with them. It is the
/// shard's, as one is under way at a time: its memory serves the next.
#[derive(Debug, Default)]
pub(super) struct RowWork {
    touched: Vec<Touched>,
    /// The numbers of rows, and ids of those of tables: of one partition behind those of another.
    numbers: Vec<u32>,
    ids: Vec<u64>,
    /// How many of the pushes have each of the rows that are added up.
    having: Vec<u32>,
    /// Where all changes: memory for that.
    whole: Vec<Range<u64>>,
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
    /// Those that some push has, rising: here among the numbers.
    Pushed(Range<usize>),
    /// All, as the rule changes those too that no push has.
    All,
    /// Those of a table, by its place among those of the shard: ids that some push has, rising, here
    /// among the ids.
    Ids(usize, Range<usize>),
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
    /// Finds what the pushes in these rooms change together.
    pub(super) fn find(
        &mut self,
        (inbox, push_slots): (&Inbox, &[u32]),
        store: &Store,
        operation: Operation,
        rules: &VariableRules,
    ) {
        self.leave();
        for partition in store.layout().sparse().filter(|partition| !partition.is_table()) {
            let pushes = pushes_of(inbox, push_slots, &[], partition);
            if pushes.is_empty() {
                continue;
            }
            let rule = rules.optimizer(partition.variable);
            let all = operation == Operation::Gradient {} && rule.moves_absent_rows();
            let rows = match all {
                true => Which::All,
                false => {
                    // What is no table numbers its rows by 32 bits.
                    let numbers = pushes.iter().flat_map(Rows::numbers).map(|row| row as u32);
                    Which::Pushed(union(&mut self.numbers, numbers, pushes.len()))
                }
            };
            self.touched.push(Touched { partition: partition.clone(), rows });
        }
        // Tables come last: once their rows are changed where they lie, nothing comes between.
        for (table, partition) in store.layout().tables().iter().enumerate() {
            let pushes = pushes_of(inbox, push_slots, &[], partition);
            if !pushes.is_empty() {
                let ids = pushes.iter().flat_map(Rows::numbers);
                let rows = Which::Ids(table, union(&mut self.ids, ids, pushes.len()));
                self.touched.push(Touched { partition: partition.clone(), rows });
            }
        }
    }

    /// Ends it.
    pub(super) fn leave(&mut self) {
        self.touched.clear();
        self.numbers.clear();
        self.ids.clear();
        (self.version, self.at, self.done) = (0, 0, 0);
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
    ) -> Result<(), Stalled> {
        self.version = version;
        // Of those, too, that this change does not touch.
        store.tables_mut().iter_mut().for_each(Table::discard);
        let assigned = operation != Operation::Gradient {};
        for Touched { rows, .. } in &*self.touched {
            if let Which::Ids(table, ids) = rows {
                let (table, ids) = (&mut store.tables_mut()[*table], &self.ids[ids.clone()]);
                table.begin(journal, ids, (step, version), assigned)?;
            }
        }
        store.make_room_for_tables(journal)?;
        let all = self.touched.iter().filter(|touched| matches!(touched.rows, Which::All));
        let all = all
            .map(|Touched { partition, .. }| partition.offset..partition.offset + partition.bytes);
        let mut whole = std::mem::take(&mut self.whole);
        whole.extend(dense.iter().cloned().chain(all));
        let rows = self.touched.iter().filter_map(|Touched { partition, rows }| match rows {
            Which::Pushed(rows) => Some((partition, &self.numbers[rows.clone()])),
            _ => None,
        });
        let begun = store.begin(&whole, rows, version);
        whole.clear();
        self.whole = whole;
        Ok(begun?)
    }

    /// Changes rows as far as the budget goes, in bytes of gradients; whether all are done.
    pub(super) fn slice(
        &mut self,
        store: &mut Store,
        inbox: &Inbox,
        push_slots: &[u32],
        change: RowChange<'_>,
        budget: &mut u64,
        tile: &mut Vec<u64>,
    ) -> Result<bool, NoFreeBlock> {
        while let Some(Touched { partition, rows }) = self.touched.get(self.at) {
            let row_bytes = partition.row_bytes();
            let pushes = pushes_of(inbox, push_slots, change.factors, partition);
            let count = match rows {
                Which::Pushed(rows) => rows.len(),
                Which::All => partition.row_count() as usize,
                Which::Ids(_, ids) => ids.len(),
            };
            let RowChange { rules, operation, at, reduction, .. } = change;
            let change = change_of(rules, operation, at, partition);
            let sums = Sums { partition, pushes: &pushes, reduction };
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
                let values = match (alone, rows) {
                    (Some(push), _) => &push.values[start..end],
                    (None, Which::Pushed(rows)) => {
                        let rows = &self.numbers[rows.clone()][these.clone()];
                        sums.add_up(rows.iter().map(|&row| row.into()), tile, &mut self.having)
                    }
                    (None, Which::Ids(_, ids)) => {
                        let ids = &self.ids[ids.clone()][these.clone()];
                        sums.add_up(ids.iter().copied(), tile, &mut self.having)
                    }
                    (None, Which::All) => {
                        let all = these.clone().map(|row| row as u64);
                        sums.add_up(all, tile, &mut self.having)
                    }
                };
                let end = these.end;
                match rows {
                    Which::Pushed(rows) => {
                        let rows = &self.numbers[rows.clone()][these];
                        store.change_rows(change, partition, rows, values)?;
                    }
                    Which::Ids(table, _) => {
                        store.change_table(*table, change, these, values);
                    }
                    Which::All => {
                        let start = partition.offset + start as u64;
                        store.change(change, start..start + values.len() as u64, values.into())?;
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
    push_slots: &[u32],
    factors: &[f64],
    partition: &Partition,
) -> PerPush<Rows<'a>> {
    let factors = factors.iter().copied().chain(std::iter::repeat(1.0));
    let having = |(&push_slot, factor)| Some(inbox.rows(push_slot, partition)?.times(factor));
    push_slots.iter().zip(factors).filter_map(having).collect()
}

/// Appends the rows that some of so many pushes have, rising; where they are.
fn union<R: Copy + Ord>(
    rows: &mut Vec<R>,
    pushed: impl Iterator<Item = R>,
    pushes: usize,
) -> Range<usize> {
    let start = rows.len();
    rows.extend(pushed);
    if pushes > 1 {
        rows[start..].sort_unstable();
        let mut end = start;
        for next in start..rows.len() {
            if end == start || rows[end - 1] != rows[next] {
                rows[end] = rows[next];
                end += 1;
            }
        }
        rows.truncate(end);
    }
    start..rows.len()
}

/// What pushes have of rows of a partition, added up in their order and divided as the reduction says.
struct Sums<'a> {
    partition: &'a Partition,
    pushes: &'a [Rows<'a>],
    reduction: SparseReduction,
}

impl Sums<'_> {
    /// The sums of these rows; zeros for a row that none has. `having` is memory for a count of each.
    fn add_up<'a>(
        &self,
        rows: impl ExactSizeIterator<Item = u64> + Clone,
        tile: &'a mut Vec<u64>,
        having: &mut Vec<u32>,
    ) -> &'a [u8] {
        let bytes = rows.len() * self.partition.row_bytes() as usize;
        tile.clear();
        tile.resize(bytes.div_ceil(8), 0);
        let sums = &mut bytemuck::cast_slice_mut(tile)[..bytes];
        having.clear();
        having.resize(rows.len(), 0);
        match self.partition.dtype {
            DType::F32 => self.add_up_as::<f32>(rows, sums, having),
            DType::F64 => self.add_up_as::<f64>(rows, sums, having),
            _ => unreachable!("only floating-point variables are trainable"),
        }
        sums
    }

    fn add_up_as<T: Mean>(
        &self,
        rows: impl Iterator<Item = u64> + Clone,
        sums: &mut [u8],
        having: &mut [u32],
    ) {
        let width = self.partition.row_bytes() as usize / size_of::<T>();
        let sums: &mut [T] = bytemuck::cast_slice_mut(sums);
        for push in self.pushes {
            let values: &[T] = bytemuck::cast_slice(push.values);
            let mut next = rows.clone().next().map_or(0, |first| push.first_from(first));
            let each = sums.chunks_exact_mut(width).zip(&mut *having);
            for (row, (sum, having)) in rows.clone().zip(each) {
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
        match self.reduction {
            SparseReduction::Sum => {}
            SparseReduction::RowMean => {
                let each = sums.chunks_exact_mut(width).zip(having);
                each.for_each(|(sum, having)| divide(sum, *having));
            }
            SparseReduction::ReplicaMean => divide(sums, self.pushes.len() as u32),
        }
    }
}
