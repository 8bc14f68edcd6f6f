//! What rows cost: pulls and pushes of a sparse variable, and of a table that grows, in the store, in
//! turns with a bare gather.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use pushpull::measure::{RowsInPlace, StoreUnderTest};
use pushpull::{Adagrad, TableSpec};

use super::bench::take_turns;
use super::report::{Row, Unit};

/// The rows of the table, and those of a batch.
const ROWS: u32 = 1 << 20;
const BATCH: usize = 4096;
/// As many batches as it takes that their rows are not in cache when they come again.
const BATCHES: usize = 64;

/// Measures rows of 16 and of 64 elements.
pub(crate) fn run(rounds: usize, json: bool) -> Result<(), Box<dyn Error>> {
    let batches: Vec<Vec<u32>> = (0..BATCHES as u64).map(batch).collect();
    let sorted: Vec<Vec<u32>> = batches.iter().map(|rows| sorted(rows)).collect();
    for width in [16, 64] {
        let rule = Arc::new(Adagrad::new(0.5));
        let mut store = StoreUnderTest::table(ROWS.into(), width as u64, rule.clone())?;
        let mut plain = RowsInPlace::new(ROWS as usize, width, rule)?;
        let gradient: Vec<f32> = (0..BATCH * width).map(|i| (i % 17) as f32 - 8.0).collect();
        let row = |name: &str, (ours, ceiling)| Row {
            name: format!("rows_{name}_store_dim{width}"),
            unit: Unit::Rows,
            amount: BATCH as u64,
            ours,
            ceiling,
        };

        // Once beforehand, so that nobody waits for pages.
        for rows in &sorted {
            store.push_rows(rows, &gradient);
            plain.push(rows, &gradient);
        }
        let mut pushes = BATCHES;
        let (mut turn, mut out) = (0, vec![0.0_f32; BATCH * width]);
        let push = || {
            let rows = &sorted[pushes % BATCHES];
            pushes += 1;
            let start = Instant::now();
            store.push_rows(rows, &gradient);
            Ok(start.elapsed())
        };
        let gather = || {
            turn += 1;
            let start = Instant::now();
            plain.gather(&batches[turn % BATCHES], &mut out);
            Ok(start.elapsed())
        };
        row("push_adagrad", take_turns(rounds, push, gather)?).print(json);
        (BATCHES..pushes).for_each(|turn| plain.push(&sorted[turn % BATCHES], &gradient));
        if store.values() != plain.values() {
            return Err("the values of the table are not those of the rule in place".into());
        }

        let (mut turn, mut pulled) = (0, Vec::new());
        let pull = || {
            turn += 1;
            let start = Instant::now();
            pulled = store.pull_rows(&batches[turn % BATCHES]);
            Ok(start.elapsed())
        };
        let mut other = 0;
        let gather = || {
            other += 1;
            let start = Instant::now();
            plain.gather(&batches[other % BATCHES], &mut out);
            Ok(start.elapsed())
        };
        let times = take_turns(rounds, pull, gather)?;
        plain.gather(&batches[turn % BATCHES], &mut out);
        if pulled != bytemuck::cast_slice::<f32, u8>(&out) {
            return Err("what was pulled is not what the table holds".into());
        }
        row("pull", times).print(json);
        growing(rounds, json, width, &batches)?;
    }
    Ok(())
}

/// The same of a table that has grown to as many rows.
fn growing(
    rounds: usize,
    json: bool,
    width: usize,
    batches: &[Vec<u32>],
) -> Result<(), Box<dyn Error>> {
    let rule = Arc::new(Adagrad::new(0.5));
    let spec = TableSpec::new(1 << 33);
    let mut store = StoreUnderTest::growing(width as u64, spec, rule.clone())?;
    let mut plain = RowsInPlace::new(ROWS as usize, width, rule)?;
    let gradient: Vec<f32> = (0..BATCH * width).map(|i| (i % 17) as f32 - 8.0).collect();
    let row = |name: &str, (ours, ceiling)| Row {
        name: format!("rows_{name}_table_dim{width}"),
        unit: Unit::Rows,
        amount: BATCH as u64,
        ours,
        ceiling,
    };
    let all: Vec<u32> = (0..ROWS).collect();
    for rows in all.chunks(BATCH).map(by_id) {
        let zeros = vec![0.0; rows.len() * width];
        store.push_ids(&ids(&rows), &zeros);
        plain.push(&rows, &zeros);
    }
    let by_id: Vec<Vec<u32>> = batches.iter().map(|rows| by_id(rows)).collect();
    let ids_by_id: Vec<Vec<u64>> = by_id.iter().map(|rows| ids(rows)).collect();
    let mut pushes = 0;
    let (mut turn, mut out) = (0, vec![0.0_f32; BATCH * width]);
    let push = || {
        let ids = &ids_by_id[pushes % BATCHES];
        pushes += 1;
        let start = Instant::now();
        store.push_ids(ids, &gradient);
        Ok(start.elapsed())
    };
    let gather = || {
        turn += 1;
        let start = Instant::now();
        plain.gather(&batches[turn % BATCHES], &mut out);
        Ok(start.elapsed())
    };
    row("push_adagrad", take_turns(rounds, push, gather)?).print(json);
    (0..pushes).for_each(|turn| plain.push(&by_id[turn % BATCHES], &gradient));

    let ids: Vec<Vec<u64>> = batches.iter().map(|rows| ids(rows)).collect();
    let (mut turn, mut pulled) = (0, Vec::new());
    let pull = || {
        turn += 1;
        let start = Instant::now();
        pulled = store.pull_ids(&ids[turn % BATCHES]);
        Ok(start.elapsed())
    };
    let mut other = 0;
    let gather = || {
        other += 1;
        let start = Instant::now();
        plain.gather(&batches[other % BATCHES], &mut out);
        Ok(start.elapsed())
    };
    let times = take_turns(rounds, pull, gather)?;
    plain.gather(&batches[turn % BATCHES], &mut out);
    if pulled != bytemuck::cast_slice::<f32, u8>(&out) {
        return Err("what was pulled is not what the table holds".into());
    }
    row("pull", times).print(json);
    Ok(())
}

/// The ids of rows: of all sizes, in no order.
fn ids(rows: &[u32]) -> Vec<u64> {
    rows.iter().map(|&row| id(row)).collect()
}

fn id(row: u32) -> u64 {
    u64::from(row).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn by_id(rows: &[u32]) -> Vec<u32> {
    let mut rows = rows.to_vec();
    rows.sort_unstable_by_key(|&row| id(row));
    rows
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

fn sorted(rows: &[u32]) -> Vec<u32> {
    let mut rows = rows.to_vec();
    rows.sort_unstable();
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
