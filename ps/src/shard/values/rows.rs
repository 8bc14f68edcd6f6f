//! Updates rows of sparse variables, by a push or by a step.

use std::ops::Range;

use pushpull_common::catalogue::Partition;
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::DType;
use pushpull_optim::SparseReduction;
use pushpull_optim::optimizer::VariableRules;
use pushpull_store::change::{NoFreeBlock, Stalled};
use pushpull_store::commit::Journal;
use pushpull_store::store::Store;
use pushpull_store::table::Table;

use super::mean::{self, MeanElement};
use super::update_target::{UpdateNumbers, UpdatePushes, UpdateTarget};
use super::{TILE_BYTES, budget_of};
use crate::aggregate::current_step::PerPush;
use crate::inbox::PushedRows;

/// The rows that the current push or step changes, and the progress with them. A shard has one,
/// because one update is under way at a time. Its memory is reused.
#[derive(Debug, Default)]
pub(in crate::shard) struct RowWork {
    touched: Vec<TouchedRows>,
    /// Row numbers, and row ids of tables. Those of one partition follow those of another.
    numbers: Vec<u32>,
    ids: Vec<u64>,
    /// Scratch memory for the number of pushes that have each row of a sum.
    push_counts: Vec<u32>,
    /// Scratch memory for ranges that change entirely.
    whole_ranges: Vec<Range<u64>>,
    /// The version that the update makes.
    version: u64,
    /// The index of the current partition, and how many of its rows are done.
    at: usize,
    done: usize,
}

/// The rows of a partition that change.
#[derive(Debug)]
struct TouchedRows {
    partition: Partition,
    rows: RowSelection,
}

#[derive(Debug)]
enum RowSelection {
    /// The rows that a push has, ascending: this range of `numbers`.
    Pushed(Range<usize>),
    /// All rows, because the rule also moves rows without a gradient.
    All,
    /// Rows of a table, by its index on the shard. The ids that a push has, ascending: this range
    /// of `ids`.
    Ids(usize, Range<usize>),
}

impl RowWork {
    /// Finds the rows that these pushes change together.
    pub(in crate::shard) fn find(
        &mut self,
        update: UpdatePushes<'_>,
        store: &Store,
        rules: &VariableRules,
    ) {
        self.clear();
        for partition in store.layout().sparse().filter(|partition| !partition.is_table()) {
            let pushes = update.rows_of(partition);
            if pushes.is_empty() {
                continue;
            }
            let rule = rules.optimizer(partition.variable);
            let all = update.operation == Operation::Gradient {} && rule.moves_absent_rows();
            let rows = match all {
                true => RowSelection::All,
                false => {
                    // Rows of a partition that is not a table have 32-bit numbers.
                    let numbers = pushes.iter().flat_map(PushedRows::numbers).map(|row| row as u32);
                    RowSelection::Pushed(union(&mut self.numbers, numbers, pushes.len()))
                }
            };
            self.touched.push(TouchedRows { partition: partition.clone(), rows });
        }
        // Tables come last: once the update changes their rows in place, it must not be
        // interrupted.
        for (table, partition) in store.layout().tables().iter().enumerate() {
            let pushes = update.rows_of(partition);
            if !pushes.is_empty() {
                let ids = pushes.iter().flat_map(PushedRows::numbers);
                let rows = RowSelection::Ids(table, union(&mut self.ids, ids, pushes.len()));
                self.touched.push(TouchedRows { partition: partition.clone(), rows });
            }
        }
    }

    /// Ends the update.
    pub(in crate::shard) fn clear(&mut self) {
        self.touched.clear();
        self.numbers.clear();
        self.ids.clear();
        self.version = 0;
        self.at = 0;
        self.done = 0;
    }

    /// Prepares to change these dense ranges, the rows and the tables, for an update.
    pub(in crate::shard) fn begin(
        &mut self,
        store: &mut Store,
        journal: &mut Journal,
        dense: &[Range<u64>],
        UpdateNumbers { step, version, count }: UpdateNumbers,
        operation: Operation,
    ) -> Result<(), Stalled> {
        self.version = version;
        // Tables that this update does not touch are discarded as well.
        store.tables_mut().iter_mut().for_each(Table::discard);
        let assigned = operation != Operation::Gradient {};
        for TouchedRows { rows, .. } in &*self.touched {
            if let RowSelection::Ids(table, ids) = rows {
                let table = &mut store.tables_mut()[*table];
                let ids = &self.ids[ids.clone()];
                table.begin(journal, ids, step, count, assigned)?;
            }
        }
        store.reserve_intent_for_tables(journal)?;
        let all = self.touched.iter().filter(|touched| matches!(touched.rows, RowSelection::All));
        let all = all.map(|TouchedRows { partition, .. }| {
            partition.offset..partition.offset + partition.bytes
        });
        let mut whole_ranges = std::mem::take(&mut self.whole_ranges);
        whole_ranges.extend(dense.iter().cloned().chain(all));
        let rows = self.touched.iter().filter_map(|TouchedRows { partition, rows }| match rows {
            RowSelection::Pushed(rows) => Some((partition, &self.numbers[rows.clone()])),
            _ => None,
        });
        let begun = store.begin(&whole_ranges, rows, version);
        whole_ranges.clear();
        self.whole_ranges = whole_ranges;
        Ok(begun?)
    }

    /// Changes rows until the budget is used up, in bytes of gradients. Returns whether all rows
    /// are done.
    pub(in crate::shard) fn slice(
        &mut self,
        UpdateTarget { store, spec, config, scratch, .. }: &mut UpdateTarget<'_>,
        update: UpdatePushes<'_>,
        budget: &mut u64,
    ) -> Result<bool, NoFreeBlock> {
        while let Some(TouchedRows { partition, rows }) = self.touched.get(self.at) {
            let row_bytes = partition.row_bytes();
            let pushes = update.rows_of(partition);
            let count = match rows {
                RowSelection::Pushed(rows) => rows.len(),
                RowSelection::All => partition.row_count() as usize,
                RowSelection::Ids(_, ids) => ids.len(),
            };
            let change = spec.change_of(partition);
            let reduction = config.mode.sparse_reduction();
            let sums = PushedRowSums { partition, pushes: &pushes, reduction };
            if matches!(rows, RowSelection::Ids(..)) {
                store.settle_tables(self.version);
                if store.is_in_place() {
                    *budget = budget_of(store);
                }
            }
            while self.done < count {
                if *budget == 0 {
                    return Ok(false);
                }
                // A single push needs no sum.
                let single = match &pushes[..] {
                    [push] if push.factor == 1.0 && !matches!(rows, RowSelection::All) => {
                        Some(push)
                    }
                    _ => None,
                };
                let bytes = if single.is_some() { *budget } else { TILE_BYTES };
                let each = (bytes / row_bytes).max(1) as usize;
                let these = self.done..count.min(self.done.saturating_add(each));
                let start = self.done * row_bytes as usize;
                let end = these.end * row_bytes as usize;
                let values = match (single, rows) {
                    (Some(push), _) => &push.values[start..end],
                    (None, RowSelection::Pushed(rows)) => {
                        let rows = &self.numbers[rows.clone()][these.clone()];
                        sums.add_up(
                            rows.iter().map(|&row| row.into()),
                            &mut scratch.tile,
                            &mut self.push_counts,
                        )
                    }
                    (None, RowSelection::Ids(_, ids)) => {
                        let ids = &self.ids[ids.clone()][these.clone()];
                        sums.add_up(ids.iter().copied(), &mut scratch.tile, &mut self.push_counts)
                    }
                    (None, RowSelection::All) => {
                        let all = these.clone().map(|row| row as u64);
                        sums.add_up(all, &mut scratch.tile, &mut self.push_counts)
                    }
                };
                let end = these.end;
                match rows {
                    RowSelection::Pushed(rows) => {
                        let rows = &self.numbers[rows.clone()][these];
                        store.change_rows(change, partition, rows, values)?;
                    }
                    RowSelection::Ids(table, _) => {
                        store.change_table(*table, change, these, values);
                    }
                    RowSelection::All => {
                        let start = partition.offset + start as u64;
                        store.change(change, start..start + values.len() as u64, values.into())?;
                    }
                }
                let read = (end - self.done) as u64 * row_bytes * pushes.len() as u64;
                *budget = budget.saturating_sub(read.max(8));
                self.done = end;
            }
            self.at += 1;
            self.done = 0;
        }
        Ok(true)
    }
}

impl<'a> UpdatePushes<'a> {
    /// Returns the rows that the pushes have of a partition, in order, with their factors.
    fn rows_of(&self, partition: &Partition) -> PerPush<PushedRows<'a>> {
        let factors = self.factors.iter().copied().chain(std::iter::repeat(1.0));
        let rows_of = |(&slot, factor)| Some(self.inbox.rows(slot, partition)?.times(factor));
        self.push_slots.iter().zip(factors).filter_map(rows_of).collect()
    }
}

/// Appends the distinct rows of `pushes` pushes, ascending. Returns their range.
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

/// Sums pushed rows of a partition, in the order of the pushes, and divides the sums by the
/// reduction.
struct PushedRowSums<'a> {
    partition: &'a Partition,
    pushes: &'a [PushedRows<'a>],
    reduction: SparseReduction,
}

impl PushedRowSums<'_> {
    /// Returns the sums of these rows; zeros for a row without a gradient. `push_counts` is scratch
    /// memory.
    fn add_up<'a>(
        &self,
        rows: impl ExactSizeIterator<Item = u64> + Clone,
        tile: &'a mut Vec<u64>,
        push_counts: &mut Vec<u32>,
    ) -> &'a [u8] {
        let bytes = rows.len() * self.partition.row_bytes() as usize;
        tile.clear();
        tile.resize(bytes.div_ceil(8), 0);
        let sums = &mut bytemuck::cast_slice_mut(tile)[..bytes];
        push_counts.clear();
        push_counts.resize(rows.len(), 0);
        match self.partition.dtype {
            DType::F32 => self.add_up_as::<f32>(rows, sums, push_counts),
            DType::F64 => self.add_up_as::<f64>(rows, sums, push_counts),
            _ => unreachable!("only floating-point variables are trainable"),
        }
        sums
    }

    fn add_up_as<T: MeanElement>(
        &self,
        rows: impl Iterator<Item = u64> + Clone,
        sums: &mut [u8],
        push_counts: &mut [u32],
    ) {
        let width = self.partition.row_bytes() as usize / size_of::<T>();
        let sums: &mut [T] = bytemuck::cast_slice_mut(sums);
        for push in self.pushes {
            let values: &[T] = bytemuck::cast_slice(push.values);
            let mut next = rows.clone().next().map_or(0, |first| push.first_from(first));
            let each = sums.chunks_exact_mut(width).zip(&mut *push_counts);
            for (row, (sum, push_counts)) in rows.clone().zip(each) {
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
                // A sum starts with a copy of the first row, as a dense gradient's sum does.
                mean::add(sum, values, push.factor, *push_counts == 0);
                *push_counts += 1;
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
                let each = sums.chunks_exact_mut(width).zip(push_counts);
                each.for_each(|(sum, push_counts)| divide(sum, *push_counts));
            }
            SparseReduction::ReplicaMean => divide(sums, self.pushes.len() as u32),
        }
    }
}
