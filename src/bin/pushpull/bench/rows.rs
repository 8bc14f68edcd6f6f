//! What rows cost: pulls and pushes of a sparse variable, and of a table that grows, in the store, in
//! turns with a bare gather.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use pushpull::measure::{RowsInPlace, StoreUnderTest};
use pushpull::{Adagrad, TableSpec};

use super::report::{Report, Row, Unit};
use super::turns::{Pace, take_turns};

/// The rows of the table, and those of a batch.
pub(crate) const ROWS: u32 = 1 << 20;
pub(crate) const BATCH: usize = 4096;
/// As many batches as it takes that their rows are not in cache when they come again: two thirds of
/// the table's are in one of them. Those of 64 batches, 128,000 rows, would be 8 MB at 16 elements: a
/// cache of 32 MiB keeps them, and the ceiling would be the cache's.
const BATCHES: usize = 1024;

/// What holds the rows.
trait Held {
    /// What a row is called there.
    type Key: Copy + Ord;

    const NAME: &'static str;

    fn key(row: u32) -> Self::Key;

    /// A gradient of rows, whose keys rise.
    fn push(&mut self, rows: &[Self::Key], gradient: &[f32]);

    fn pull(&self, rows: &[Self::Key]) -> Vec<u8>;
}

/// A sparse variable.
struct Sparse(StoreUnderTest);

impl Held for Sparse {
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

/// A table that has grown to as many rows.
struct Growing(StoreUnderTest);

impl Held for Growing {
    type Key = u64;

    const NAME: &'static str = "table";

    /// Ids of all sizes, in no order.
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

/// Measures rows of so many elements.
pub(crate) fn run(widths: &[u64], pace: Pace, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let batches = batches();
    for &width in widths {
        let rule = || Arc::new(Adagrad::new(0.5));
        let store = Sparse(StoreUnderTest::table(ROWS.into(), width, rule())?);
        measure(store, width as usize, &batches, pace, report)?;
        let store = Growing(StoreUnderTest::growing(width, TableSpec::new(1 << 33), rule())?);
        measure(store, width as usize, &batches, pace, report)?;
    }
    Ok(())
}

/// Measures pushes and pulls beside a gather of the same rows.
fn measure<H: Held>(
    mut store: H,
    width: usize,
    batches: &[Vec<u32>],
    pace: Pace,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let mut plain = RowsInPlace::new(ROWS as usize, width, Arc::new(Adagrad::new(0.5)))?;
    let gradient: Vec<f32> = (0..BATCH * width).map(|i| (i % 17) as f32 - 8.0).collect();
    let row = |name: &str, (ours, ceiling)| Row {
        name: format!("rows_{name}_{}_dim{width}", H::NAME),
        unit: Unit::Rows,
        amount: BATCH as u64,
        ours,
        ceiling,
        beside: "a bare gather",
    };
    let keys = |rows: &[u32]| rows.iter().map(|&row| H::key(row)).collect::<Vec<H::Key>>();
    let sorted: Vec<Vec<u32>> = batches.iter().map(|rows| sorted_by::<H>(rows)).collect();
    let sorted_keys: Vec<Vec<H::Key>> = sorted.iter().map(|rows| keys(rows)).collect();
    let batch_keys: Vec<Vec<H::Key>> = batches.iter().map(|rows| keys(rows)).collect();

    // All rows are there, and nobody waits for pages. A gradient of 0 changes nothing.
    let all: Vec<u32> = (0..ROWS).collect();
    for rows in all.chunks(BATCH) {
        store.push(&keys(&sorted_by::<H>(rows)), &vec![0.0; rows.len() * width]);
    }
    for (rows, keys) in sorted.iter().zip(&sorted_keys) {
        store.push(keys, &gradient);
        plain.push(rows, &gradient);
    }
    let mut pushes = BATCHES;
    let (mut turn, mut out) = (0, vec![0.0_f32; BATCH * width]);
    let push = || {
        let keys = &sorted_keys[pushes % BATCHES];
        pushes += 1;
        let start = Instant::now();
        store.push(keys, &gradient);
        Ok(start.elapsed())
    };
    let gather = || {
        turn += 1;
        let start = Instant::now();
        plain.gather(&batches[turn % BATCHES], &mut out);
        Ok(start.elapsed())
    };
    report.row(row("push_adagrad", take_turns(pace, push, gather)?))?;
    (BATCHES..pushes).for_each(|turn| plain.push(&sorted[turn % BATCHES], &gradient));
    if store.pull(&keys(&all)) != bytemuck::cast_slice::<f32, u8>(plain.values()) {
        return Err("the rows are not those of the rule in place".into());
    }

    let (mut turn, mut pulled) = (0, Vec::new());
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
    let times = take_turns(pace, pull, gather)?;
    plain.gather(&batches[turn % BATCHES], &mut out);
    if pulled != bytemuck::cast_slice::<f32, u8>(&out) {
        return Err("what was pulled is not what the rows hold".into());
    }
    report.row(row("pull", times))?;
    Ok(())
}

/// The rows of each batch.
pub(crate) fn batches() -> Vec<Vec<u32>> {
    (0..BATCHES as u64).map(batch).collect()
}

/// Distinct rows, drawn by Zipf's law with exponent 1 (its continuous form: the logarithm of the rank
/// is uniform), the ranks scattered over the table.
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
        // Odd, so that every rank has a row of its own.
        let row = rank.wrapping_mul(0x9e37_79b1) % ROWS;
        if !std::mem::replace(&mut taken[row as usize], true) {
            rows.push(row);
        }
    }
    rows
}

/// Rows in their order.
pub(crate) fn sorted(rows: &[u32]) -> Vec<u32> {
    sorted_by::<Sparse>(rows)
}

/// Rows in the order of their keys.
fn sorted_by<H: Held>(rows: &[u32]) -> Vec<u32> {
    let mut rows = rows.to_vec();
    rows.sort_unstable_by_key(|&row| H::key(row));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_distinct_and_favour_a_few_rows() {
        let (a, b) = (sorted(&batch(0)), sorted(&batch(1)));
        assert!(a.windows(2).all(|pair| pair[0] < pair[1]) && a != b);
        let shared = a.iter().filter(|row| b.binary_search(row).is_ok()).count();
        // Of a million rows two uniform batches would share 16.
        assert!((400..4000).contains(&shared), "{shared} rows are in both");
    }
}
