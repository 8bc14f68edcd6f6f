//! Embedding tables that grow, from the worker's side.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use pushpull::blocking::{Reader, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::checkpoint::{export, export_since};
use pushpull::cluster::ShardId;
use pushpull::error::{VariableError, ViewError};
use pushpull::optim::{Adagrad, Optimizer};
use pushpull::variable::{DType, Eviction, Initializer, Partitioner, RowAdmission, TableSpec};
use pushpull::{Adam, Error, Pulled, Push, Sgd, Storage, VariableSpec};
use safetensors::SafeTensors;

use super::cluster::{TestCluster, vector};
use super::rows::check_reductions;

/// A table in `parts` partitions, and a dense bias.
fn variables(parts: u32, spec: TableSpec) -> Vec<VariableSpec> {
    let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    let table = VariableSpec::table("table", DType::F32, [3], spec).unwrap();
    let table = table.initializer(normal).seed(7);
    vec![vector("bias", 4), table.partitioner(Partitioner::Fixed { shards: parts })]
}

fn large_table() -> TableSpec {
    TableSpec::new(1 << 24)
}

/// Maps a number to an id anywhere in 64 bits.
fn id(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns the ids of a step: some of every step, some new, and some duplicates.
fn ids_of(step: u64) -> Vec<u64> {
    let numbers = (0..5).chain(step * 300..step * 300 + 400).chain([3, step * 300]);
    numbers.map(id).collect()
}

/// Trains these steps with gradients that equal the rows.
fn train(worker: &mut Worker, steps: std::ops::Range<u64>) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let ids = ids_of(step);
        let mut rows = vec![0.0_f32; 3 * ids.len()];
        let pulled = worker.pull_rows(&token, "table", &ids, &mut rows).unwrap();
        assert_eq!(pulled, Pulled::Pulled { step });
        assert_eq!(rows[9..12], rows[3 * 405..3 * 406], "duplicate ids give equal rows");
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("bias").unwrap().fill(step as f32);
        gradients.set_rows("table", &ids, &rows).unwrap();
        let pushed = worker.push(token, gradients).unwrap();
        assert!(matches!(pushed, Push::Applied { .. }), "{pushed:?}");
    }
}

fn rows_of(cluster: &TestCluster, ids: &[u64]) -> Vec<f32> {
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut rows = vec![0.0; 3 * ids.len()];
    reader.pull_rows("table", ids, &mut rows).unwrap();
    rows
}

fn all_ids(steps: u64) -> Vec<u64> {
    // The last ids are never pushed.
    (0..=steps * 300 + 400).map(id).collect()
}

fn trained(ps: usize, shards: u16, optimizer: impl Optimizer + Clone) -> Vec<f32> {
    let cluster = TestCluster::start(ps, 1, optimizer, |config| config.shards(shards));
    let mut worker = cluster.worker(0);
    worker.join(&variables(5, large_table()), |_| ()).unwrap();
    train(&mut worker, 0..6);
    let rows = rows_of(&cluster, &all_ids(6));
    let metrics = cluster.servers.iter().map(|ps| ps.handle().metrics().table_rows).sum::<u64>();
    assert_eq!(metrics, 5 * 300 + 400, "rows on {ps} times {shards}");
    cluster.stop();
    rows
}

#[test]
fn tables_do_not_depend_on_the_number_of_shards() {
    let rows = trained(1, 1, Adagrad::new(0.1));
    let lazy = trained(1, 1, Adam::new(0.1).lazy());
    assert!(rows != lazy && rows.iter().all(|value| value.is_finite()));
    for (ps, shards) in [(2, 1), (5, 1), (2, 2)] {
        assert_eq!(trained(ps, shards, Adagrad::new(0.1)), rows, "{ps} times {shards}");
        assert_eq!(trained(ps, shards, Adam::new(0.1).lazy()), lazy, "{ps} times {shards}");
    }
}

#[test]
fn a_synchronous_step_reduces_rows() {
    let table = VariableSpec::table("table", DType::F32, [3], large_table()).unwrap();
    check_reductions(&table, id);
}

/// Exports the newest checkpoint, or only rows pushed since a step. Returns the ids of the table
/// and the other tensors by name.
fn exported(directory: &Path, since: u64) -> (Vec<u64>, BTreeMap<String, Vec<f32>>) {
    let file = directory.with_extension("safetensors");
    let storage = Arc::new(LocalDirectory::create(directory).unwrap());
    match since {
        0 => export(storage, None, &file, true).unwrap(),
        since => export_since(storage, None, &file, true, since).unwrap(),
    };
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut ids = Vec::new();
    let mut others = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let words = tensor.data().chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap()));
        match name.ends_with(":ids") {
            true => ids = words.collect(),
            false => {
                let floats = tensor.data().chunks(4);
                let floats = floats.map(|v| f32::from_le_bytes(v.try_into().unwrap()));
                others.insert(name.to_owned(), floats.collect());
            }
        }
    }
    (ids, others)
}

#[test]
fn tables_are_saved_and_restored_into_any_layout() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path().join("checkpoints");
    let start = |ps, shards| {
        let storage = || LocalDirectory::create(&directory).unwrap();
        let configure = |config: pushpull::PsConfig| {
            config.shards(shards).checkpoints(Checkpoints::new(storage()))
        };
        TestCluster::start(ps, 1, Adagrad::new(0.1), configure)
    };
    let first = start(2, 2);
    let mut worker = first.worker(0);
    worker.join(&variables(5, large_table()), |_| ()).unwrap();
    train(&mut worker, 0..3);
    worker.save(b"").unwrap();
    train(&mut worker, 3..5);
    worker.save(b"").unwrap();
    let ids = all_ids(7);
    let saved = rows_of(&first, &ids);
    train(&mut worker, 5..7);
    let expected = rows_of(&first, &ids);
    drop(worker);
    first.stop();

    let (all, tensors) = exported(&directory, 0);
    assert_eq!((all.len(), tensors["table"].len()), (4 * 300 + 400, 3 * (4 * 300 + 400)));
    assert_eq!(tensors["table:accumulator"].len(), tensors["table"].len());
    let rows: BTreeMap<u64, &[f32]> = all.iter().copied().zip(tensors["table"].chunks(3)).collect();
    for (id, row) in ids.iter().zip(saved.chunks(3)) {
        assert!(rows.get(id).is_none_or(|exported| *exported == row), "row {id}");
    }
    // The rows that steps 3 and 4 have pushed.
    let (since, tensors) = exported(&directory, 3);
    let mut touched: Vec<u64> = (3..5).flat_map(ids_of).collect();
    touched.sort_unstable();
    touched.dedup();
    let mut since_sorted = since.clone();
    since_sorted.sort_unstable();
    assert_eq!(since_sorted, touched);
    assert!(since.iter().zip(tensors["table"].chunks(3)).all(|(id, row)| rows[id] == row));

    for (ps, shards, parts) in [(2, 2, 5), (1, 1, 1), (3, 1, 7)] {
        let other = start(ps, shards);
        let mut worker = other.worker(0);
        worker.join(&variables(parts, large_table()), |_| ()).unwrap();
        assert_eq!(rows_of(&other, &ids), saved, "{ps} times {shards}");
        train(&mut worker, 5..7);
        assert_eq!(rows_of(&other, &ids), expected, "slots must be restored");
        drop(worker);
        other.stop();
    }
    // The rows do not fit a smaller table, so nothing is restored.
    let small = start(1, 1);
    let mut worker = small.worker(0);
    let refused = worker.join(&variables(1, TableSpec::new(1 << 12)), |_| ()).unwrap_err();
    let refusal = "holds at most 51 of its rows";
    assert!(refused.to_string().contains(refusal), "{refused}");
    drop(worker);
    small.stop();
}

/// Checks a table with random admission. It draws when a push is applied, so the number of new rows
/// is not known before: a table takes pushes until it is full, then refuses those with new rows.
#[test]
fn a_table_filled_by_random_admission_refuses_new_rows() {
    let cluster = TestCluster::start(1, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let spec = TableSpec::new(100 * (16 + TableSpec::ROW_OVERHEAD_BYTES)).rows_at_once(1_000);
    let spec = spec.admission(RowAdmission::Chance { probability: 0.05 });
    worker.join(&variables(1, spec), |_| ()).unwrap();
    let mut push = |ids: std::ops::Range<u64>| {
        let token = worker.token().unwrap().unwrap();
        let ids = ids.collect::<Vec<u64>>();
        let mut gradients = worker.gradients();
        gradients.set_rows("table", &ids, &vec![1.0_f32; 3 * ids.len()])?;
        worker.push(token, gradients)
    };
    let rows = || cluster.handle().metrics().table_rows;
    for block in 0..100 {
        let before = rows();
        let result = push(1_000 * block..1_000 * block + 1_000);
        let Ok(result) = result else {
            assert_eq!(before, 100, "only a full table refuses");
            let full = Error::TableFull {
                variable: "table".to_owned(),
                shard: ShardId::default(),
                rows: 100,
                more: 1_000,
                limit: 100,
            };
            assert_eq!(result, Err(full));
            assert!(block >= 2, "about 50 rows of each 1000 are admitted");
            return cluster.stop();
        };
        assert!(matches!(result, Push::Applied { .. }));
    }
    panic!("no push was refused at {} rows", rows());
}

#[test]
fn pushes_beyond_the_limits_of_a_table_are_refused() {
    let cluster = TestCluster::start(1, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let spec = TableSpec::new(100 * (16 + TableSpec::ROW_OVERHEAD_BYTES)).rows_at_once(200);
    worker.join(&variables(1, spec), |_| ()).unwrap();
    let mut push = |ids: Vec<u64>| {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.set_rows("table", &ids, &vec![1.0_f32; 3 * ids.len()])?;
        worker.push(token, gradients)
    };
    assert!(matches!(push((0..90).collect()), Ok(Push::Applied { .. })));
    let before = rows_of(&cluster, &[0, 89, 95]);
    let full = push((80..120).collect()).unwrap_err();
    let variable = "table".to_owned();
    let shard = ShardId::default();
    let expected = Error::TableFull { variable, shard, rows: 90, more: 30, limit: 100 };
    assert_eq!(full, expected);
    assert_eq!(rows_of(&cluster, &[0, 89, 95]), before, "nothing may be applied");
    let many = push((0..201).collect()).unwrap_err();
    assert!(matches!(many, Error::View(ViewError::RowsAtOnce { rows: 201, limit: 200, .. })));
    assert!(matches!(push((80..100).collect()), Ok(Push::Applied { .. })), "these rows fit");

    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let width = gradients.set_rows("table", &[7], &[1.0_f32; 4]).unwrap_err();
    assert!(matches!(width, ViewError::Width { width: 3, .. }));
    gradients.set_rows("table", &[u64::MAX, 7], &[1.0, 1.0, 1.0, 1.0, f32::NAN, 1.0]).unwrap();
    let error = worker.push(token, gradients).unwrap_err();
    assert!(matches!(error, Error::NonFiniteRow { row: 7, element: 1, .. }), "{error}");
    cluster.stop();

    // A table's limit may not exceed the server's memory, even while the table is empty.
    let storage = || Storage::memory().bytes_max(1 << 25);
    let cluster = TestCluster::start(1, 1, Sgd::new(0.1), |config| config.storage(storage()));
    let large = cluster.worker(0).join(&variables(1, TableSpec::new(1 << 30)), |_| ()).unwrap_err();
    let large = large.to_string();
    assert!(large.contains("bytes") && large.contains(&(1 << 25).to_string()), "{large}");
    cluster.stop();

    let cluster = TestCluster::start(1, 1, Adam::new(0.1), |config| config);
    let refused = cluster.worker(0).join(&variables(1, large_table()), |_| ()).unwrap_err();
    assert!(refused.to_string().contains("moves rows that no push has"), "{refused}");
    let fans = variables(1, large_table()).remove(1).initializer(Initializer::HeNormal).validate();
    assert!(matches!(fans, Err(VariableError::Table { .. })));
    cluster.stop();
}

#[test]
fn large_pushes_of_many_tables_are_one_commit() {
    let cluster = TestCluster::start(1, 1, Adagrad::new(0.1), |config| config);
    let mut worker = cluster.worker(0);
    let tables = ["a", "b", "c", "d"]
        .map(|name| VariableSpec::table(name, DType::F32, [], TableSpec::new(1 << 26)).unwrap());
    worker.join(&tables, |_| ()).unwrap();
    let ids: Vec<u64> = (0..30_000).map(id).collect();
    for _ in 0..2 {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for table in &tables {
            gradients.set_rows(table.name(), &ids, &vec![1.0_f32; ids.len()]).unwrap();
        }
        assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
    }
    // More ids than there are rows of one element in one response body.
    let ids: Vec<u64> = (0..200_000).map(id).collect();
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    for table in &tables {
        let mut rows = vec![0.0_f32; ids.len()];
        reader.pull_rows(table.name(), &ids, &mut rows).unwrap();
        assert!(rows[..30_000].iter().all(|&value| value == rows[0] && value < -0.15));
        assert!(rows[30_000..].iter().all(|&value| value == 0.0));
    }
    cluster.stop();
}

#[test]
fn a_table_with_a_budget_keeps_the_rows_in_use() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let spec = TableSpec::new(400 * (16 + TableSpec::ROW_OVERHEAD_BYTES));
    let spec = spec.eviction(Eviction::LeastRecent).admission(RowAdmission::After { pushes: 2 });
    worker.join(&variables(2, spec), |_| ()).unwrap();
    for step in 0..30 {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        // 100 rows in every step, and 50 that come in two steps.
        let numbers = (0..100).chain(1000 + step / 2 * 50..1050 + step / 2 * 50);
        let ids: Vec<u64> = numbers.map(id).collect();
        gradients.set_rows("table", &ids, &vec![1.0_f32; 3 * ids.len()]).unwrap();
        worker.push(token, gradients).unwrap();
    }
    let ids: Vec<u64> = (0..100).map(id).collect();
    let never = TestCluster::start(1, 1, Sgd::new(1.0), |config| config);
    never.worker(0).join(&variables(1, large_table()), |_| ()).unwrap();
    let rows = rows_of(&cluster, &ids);
    let first = rows_of(&never, &ids);
    // The first gradient of each row is not applied: admission takes two pushes.
    for (row, first) in rows.iter().zip(first) {
        assert!((row - (first - 29.0)).abs() < 1e-4, "{row} of {first}");
    }
    let sum = |value: fn(&pushpull::server::Metrics) -> u64| -> u64 {
        cluster.servers.iter().map(|ps| value(&ps.handle().metrics())).sum()
    };
    assert!(sum(|m| m.table_rows) <= 400 && sum(|m| m.table_rows_evicted) >= 400);
    assert_eq!(sum(|m| m.table_rows_turned_away), 100 + 15 * 50);
    assert!(sum(|m| m.table_hits) >= 28 * 100 && sum(|m| m.table_bytes) > 0);
    drop(worker);
    cluster.stop();
    never.stop();
}
