//! Suite `rows` in the store: pulls and pushes of rows of a sparse variable and of a table that
//! grows, interleaved with a bare gather and with the rule in place.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use pushpull::optim::Adagrad;
use pushpull::variable::TableSpec;
use pushpull_ps::measure::{RowsInPlace, StoreUnderTest};

use crate::bench::report::{Report, Row, Unit};
use crate::bench::turns::{Pace, Rounds, interleave};

/// Rows of the variable or table, and rows of a batch.
pub(crate) const ROWS: u32 = 1 << 20;
pub(crate) const BATCH: usize = 4096;
/// Number of batches, large enough that their rows are out of cache when a batch repeats: two
/// thirds of the table's rows are in at least one batch. The 128,000 rows of 64 batches would be 8
/// MB at 16 elements. A cache of 32 MiB keeps those, and the ceiling would measure the cache.
const BATCHES: usize = 1024;

/// The ceilings of pushes and pulls.
pub(crate) const IN_PLACE: &str = "the rule in place";
pub(crate) const GATHER: &str = "a bare gather";

/// A container of rows.
trait RowStore {
    /// Key of a row: its index or its id.
    type Key: Copy + Ord;

    const NAME: &'static str;

    fn key(row: u32) -> Self::Key;

    /// Applies a gradient to rows with ascending keys.
    fn push(&mut self, rows: &[Self::Key], gradient: &[f32]);

    fn pull(&self, rows: &[Self::Key]) -> Vec<u8>;
}

/// A sparse variable.
struct SparseVariable(StoreUnderTest);

impl RowStore for SparseVariable {
    type Key = u32;

    const NAME: &'static str = "store";

    fn key(row: u32) -> u32 {
        row
    }

    fn push(&mut self, rows: &[u32], gradient: &[f32]) {
        self.0.push_rows(rows, gradient);
    }

    fn pull(&self, rows: &[u32]) -> Vec<u8> {
        self.0.pull_rows(rows)
    }
}

/// A table that has grown to [`ROWS`] rows.
struct GrowingTable(StoreUnderTest);

impl RowStore for GrowingTable {
    type Key = u64;

    const NAME: &'static str = "table";

    /// Ids over the whole range, in no order.
    fn key(row: u32) -> u64 {
        u64::from(row).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn push(&mut self, ids: &[u64], gradient: &[f32]) {
        self.0.push_ids(ids, gradient);
    }

    fn pull(&self, ids: &[u64]) -> Vec<u8> {
        self.0.pull_ids(ids)
    }
}

/// Measures rows of each of these widths, in elements.
pub(crate) fn run(widths: &[u64], pace: Pace, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let batches = batches();
    for &width in widths {
        let rule = || Arc::new(Adagrad::new(0.5));
        let store = SparseVariable(StoreUnderTest::table(ROWS.into(), width, rule())?);
        let ceiling = measure(store, width as usize, &batches, pace, report)?;
        let store = GrowingTable(StoreUnderTest::growing(width, TableSpec::new(1 << 33), rule())?);
        let ours = measure(store, width as usize, &batches, pace, report)?;
        let name = format!("rows_create_table_dim{width}");
        let ceiling_name = "the first push of rows of a variable";
        report.row(Row {
            name,
            unit: Unit::Rows,
            amount: BATCH as u64,
            ours,
            ceiling,
            ceiling_name,
        })?;
    }
    Ok(())
}

/// Measures pushes beside the rule in place and pulls beside a gather, of the same rows. Returns the
/// times of the first pushes, one to each row.
fn measure<H: RowStore>(
    mut store: H,
    width: usize,
    batches: &[Vec<u32>],
    pace: Pace,
    report: &mut Report,
) -> Result<Rounds, Box<dyn Error>> {
    let mut plain = RowsInPlace::new(ROWS as usize, width, Arc::new(Adagrad::new(0.5)))?;
    let gradient: Vec<f32> = (0..BATCH * width).map(|i| (i % 17) as f32 - 8.0).collect();
    let row = |name: &str, (ours, ceiling), ceiling_name| Row {
        name: format!("rows_{name}_{}_dim{width}", H::NAME),
        unit: Unit::Rows,
        amount: BATCH as u64,
        ours,
        ceiling,
        ceiling_name,
    };
    let keys = |rows: &[u32]| rows.iter().map(|&row| H::key(row)).collect::<Vec<H::Key>>();
    let sorted: Vec<Vec<u32>> = batches.iter().map(|rows| sorted_by::<H>(rows)).collect();
    let sorted_keys: Vec<Vec<H::Key>> = sorted.iter().map(|rows| keys(rows)).collect();
    let batch_keys: Vec<Vec<H::Key>> = batches.iter().map(|rows| keys(rows)).collect();

    // Push zeros to every row first: all rows exist then, and no measured operation faults pages
    // in.
    let all: Vec<u32> = (0..ROWS).collect();
    let zeros = vec![0.0; BATCH * width];
    let mut first = Vec::new();
    for rows in all.chunks(BATCH) {
        let keys = keys(&sorted_by::<H>(rows));
        let start = Instant::now();
        store.push(&keys, &zeros);
        first.push(start.elapsed());
    }
    for (rows, keys) in sorted.iter().zip(&sorted_keys) {
        store.push(keys, &gradient);
        plain.push(rows, &gradient);
    }
    let (mut pushes, mut applied) = (0, 0);
    let push = || {
        let keys = &sorted_keys[pushes % BATCHES];
        pushes += 1;
        let start = Instant::now();
        store.push(keys, &gradient);
        Ok(start.elapsed())
    };
    let apply = || {
        let rows = &sorted[applied % BATCHES];
        applied += 1;
        let start = Instant::now();
        plain.push(rows, &gradient);
        Ok(start.elapsed())
    };
    let times = interleave(pace, push, apply)?;
    report.row(row("push_adagrad", times, IN_PLACE))?;
    (pushes..applied).for_each(|turn| store.push(&sorted_keys[turn % BATCHES], &gradient));
    (applied..pushes).for_each(|turn| plain.push(&sorted[turn % BATCHES], &gradient));
    if store.pull(&keys(&all)) != bytemuck::cast_slice::<f32, u8>(plain.values()) {
        return Err("the rows differ from those of the rule in place".into());
    }

    let mut turn = 0;
    let mut out = vec![0.0_f32; BATCH * width];
    let mut pulled = Vec::new();
    let pull = || {
        turn += 1;
        let start = Instant::now();
        pulled = store.pull(&batch_keys[turn % BATCHES]);
        Ok(start.elapsed())
    };
    let mut other = 0;
    let gather = || {
        other += 1;
        let start = Instant::now();
        plain.gather(&batches[other % BATCHES], &mut out);
        Ok(start.elapsed())
    };
    let times = interleave(pace, pull, gather)?;
    plain.gather(&batches[turn % BATCHES], &mut out);
    if pulled != bytemuck::cast_slice::<f32, u8>(&out) {
        return Err("the pulled rows differ from those of the rule in place".into());
    }
    report.row(row("pull", times, GATHER))?;
    Ok(vec![first])
}

/// Returns the rows of each batch.
pub(crate) fn batches() -> Vec<Vec<u32>> {
    (0..BATCHES as u64).map(batch).collect()
}

/// Draws distinct rows by Zipf's law with exponent 1, and scatters the ranks over the table. It
/// uses the continuous form: the logarithm of the rank is uniform.
fn batch(seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut taken = vec![false; ROWS as usize];
    let mut rows = Vec::with_capacity(BATCH);
    while rows.len() < BATCH {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let uniform = (state >> 11) as f64 / (1_u64 << 53) as f64;
        let rank = (uniform * f64::from(ROWS).ln()).exp() as u32;
        // An odd factor maps every rank to a row of its own.
        let row = rank.wrapping_mul(0x9e37_79b1) % ROWS;
        if !std::mem::replace(&mut taken[row as usize], true) {
            rows.push(row);
        }
    }
    rows
}

/// Returns the rows in ascending order.
pub(crate) fn sorted(rows: &[u32]) -> Vec<u32> {
    sorted_by::<SparseVariable>(rows)
}

/// Returns the rows in the order of their keys.
fn sorted_by<H: RowStore>(rows: &[u32]) -> Vec<u32> {
    let mut rows = rows.to_vec();
    rows.sort_unstable_by_key(|&row| H::key(row));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_distinct_and_favour_a_few_rows() {
        let a = sorted(&batch(0));
        let b = sorted(&batch(1));
        assert!(a.windows(2).all(|pair| pair[0] < pair[1]) && a != b);
        let shared = a.iter().filter(|row| b.binary_search(row).is_ok()).count();
        // Two uniform batches out of a million rows would share 16.
        assert!((400..4000).contains(&shared), "{shared} rows are in both");
    }
}
