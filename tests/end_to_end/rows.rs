//! Rows of sparse variables, from the worker's side.

use pushpull::blocking::{Reader, Worker};
use pushpull::error::ViewError;
use pushpull::optim::SparseReduction;
use pushpull::optim::{Adagrad, Optimizer};
use pushpull::variable::{Initializer, Partitioner};
use pushpull::{Adam, Error, Mode, Pulled, Push, Sgd, Synchronous, VariableSpec};

use super::cluster::{TestCluster, vector};

const ROWS: u64 = 23;

/// A dense bias, and a sparse variable of 23 rows of 3 elements in `parts` partitions.
fn variables(parts: u32) -> Vec<VariableSpec> {
    let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    let table = VariableSpec::f32("table", [ROWS, 3]).unwrap().initializer(normal).seed(7);
    vec![vector("bias", 4), table.sparse().partitioner(Partitioner::Fixed { shards: parts })]
}

fn reader(cluster: &TestCluster) -> Reader {
    Reader::connect(cluster.config(0)).unwrap()
}

fn all_rows(reader: &mut Reader) -> Vec<f32> {
    let ids: Vec<u64> = (0..ROWS).collect();
    let mut rows = vec![0.0; 3 * ids.len()];
    reader.pull_rows("table", &ids, &mut rows).unwrap();
    rows
}

/// Trains for `steps` steps with rows in no order and with duplicate rows.
fn train(worker: &mut Worker, steps: u64) {
    let mut params = worker.join(&variables(5), |_| ()).unwrap();
    for step in 0..steps {
        let token = worker.token().unwrap().unwrap();
        assert_eq!(worker.pull(&token, &mut params).unwrap(), Pulled::Pulled { step });
        let ids: Vec<u64> = (0..7).map(|i| (step * 11 + i * 5) % ROWS).chain([3, 3]).collect();
        let mut rows = vec![0.0_f32; 3 * ids.len()];
        worker.pull_rows(&token, "table", &ids, &mut rows).unwrap();
        // Both pulls of a duplicate id give the same row.
        assert_eq!(rows[21..24], rows[24..27]);
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("bias").unwrap().fill(step as f32);
        gradients.set_rows("table", &ids, &rows).unwrap();
        let pushed = worker.push(token, gradients).unwrap();
        assert!(matches!(pushed, Push::Applied { .. }), "{pushed:?}");
    }
}

fn trained(ps: usize, shards: u16, optimizer: impl Optimizer + Clone) -> Vec<f32> {
    let cluster = TestCluster::start(ps, 1, optimizer, |config| config.shards(shards));
    let mut worker = cluster.worker(0);
    train(&mut worker, 6);
    let rows = all_rows(&mut reader(&cluster));
    cluster.stop();
    rows
}

#[test]
fn rows_do_not_depend_on_the_number_of_shards() {
    // Adagrad skips rows that a push lacks, Adam does not: every shard counts every push.
    let lazy = trained(1, 1, Adagrad::new(0.1));
    let eager = trained(1, 1, Adam::new(0.1));
    assert!(lazy != eager && lazy.iter().all(|value| value.is_finite()));
    for (ps, shards) in [(2, 1), (5, 1), (2, 2)] {
        assert_eq!(trained(ps, shards, Adagrad::new(0.1)), lazy, "{ps} times {shards}");
        assert_eq!(trained(ps, shards, Adam::new(0.1)), eager, "{ps} times {shards}");
    }
}

#[test]
fn a_synchronous_step_reduces_rows() {
    let table = VariableSpec::f32("table", [ROWS, 3]).unwrap().sparse();
    check_reductions(&table, |row| row);
}

/// Checks every sparse reduction over the gradients of one step, on a variable of zeros. `id` maps
/// row numbers to ids.
pub(crate) fn check_reductions(table: &VariableSpec, id: fn(u64) -> u64) {
    let table = table.clone().partitioner(Partitioner::Fixed { shards: 4 });
    let pulled = |reduction| {
        let mode = Synchronous::new(2).sparse_reduction(reduction);
        let configure = |config: pushpull::PsConfig| config.mode(mode).shards(2);
        let cluster = TestCluster::start(2, 2, Sgd::new(1.0), configure);
        let mut workers = [cluster.worker(0), cluster.worker(1)];
        for worker in &mut workers {
            worker.join(&[vector("bias", 4), table.clone()], |_| ()).unwrap();
        }
        let tokens: Vec<_> = workers.iter_mut().map(|w| w.token().unwrap().unwrap()).collect();
        for (index, (worker, token)) in workers.iter_mut().zip(tokens).enumerate() {
            let mut row = [0.0_f32; 3];
            assert_eq!(
                worker.pull_rows(&token, "table", &[id(20)], &mut row).unwrap(),
                Pulled::Pulled { step: 0 }
            );
            let mut gradients = worker.gradients();
            // One row from both workers, and one from each alone.
            let ids = [id(1), id(20 + index as u64)];
            let rows = [-2.0_f32; 6];
            gradients.set_rows("table", &ids, &rows).unwrap();
            assert_eq!(worker.push(token, gradients).unwrap(), Push::Accepted { step: 1 });
        }
        let token = workers[0].token().unwrap().unwrap();
        let mut rows = [0.0_f32; 12];
        let ids = [0, 1, 20, 21].map(id);
        let found = workers[0].pull_rows(&token, "table", &ids, &mut rows).unwrap();
        assert_eq!(found, Pulled::Pulled { step: 1 });
        drop(token);
        cluster.stop();
        [rows[0], rows[3], rows[6], rows[9]]
    };
    assert_eq!(pulled(SparseReduction::ReplicaMean), [0.0, 2.0, 1.0, 1.0]);
    assert_eq!(pulled(SparseReduction::RowMean), [0.0, 2.0, 2.0, 2.0]);
    assert_eq!(pulled(SparseReduction::Sum), [0.0, 4.0, 2.0, 2.0]);
}

#[test]
fn rows_are_streamed_and_assigned() {
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    worker.join(&variables(3), |_| ()).unwrap();
    worker.assign_rows("table", &[22, 0], &[5.0_f32, 5.0, 5.0, 1.0, 2.0, 3.0]).unwrap();
    worker.assign_rows::<f32>("table", &[], &[]).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut push = worker.begin(token).unwrap();
    push.rows("table", &[22], &[1.0_f32; 3]).unwrap();
    push.variable("bias", &[1.0_f32; 4]).unwrap();
    let twice = push.rows("table", &[0], &[1.0_f32; 3]).unwrap_err();
    assert_eq!(twice, Error::View(ViewError::Twice { name: "table".to_owned() }));
    push.finish().unwrap();
    let mut rows = [0.0_f32; 6];
    reader(&cluster).pull_rows("table", &[0, 22], &mut rows).unwrap();
    assert_eq!(rows, [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]);
    cluster.stop();
}

#[test]
fn bad_rows_are_reported_before_anything_is_sent() {
    let cluster = TestCluster::start(1, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&variables(2), |_| ()).unwrap();
    let before = all_rows(&mut reader(&cluster));
    let token = worker.token().unwrap().unwrap();
    let table = || "table".to_owned();
    let bias = || "bias".to_owned();
    let row = ViewError::Row { name: table(), row: ROWS, place: 1, rows: ROWS };
    let pulled = worker.pull_rows(&token, "table", &[0, ROWS], &mut [0.0_f32; 6]).unwrap_err();
    assert_eq!(pulled, row.clone().into());
    let mut gradients = worker.gradients();
    assert_eq!(gradients.set_rows("table", &[0, ROWS], &[0.0_f32; 6]), Err(row));
    let width = ViewError::Width { name: table(), rows: 1, elements: 2, width: 3 };
    assert_eq!(gradients.set_rows("table", &[0], &[0.0_f32; 2]), Err(width));
    let dense = ViewError::Dense { name: bias() };
    assert_eq!(gradients.set_rows("bias", &[0], &[0.0_f32]), Err(dense));
    let sparse = ViewError::Sparse { name: table() };
    assert_eq!(gradients.view_mut::<f32>("table").unwrap_err(), sparse);
    assert_eq!(params.view_mut::<f32>("table").unwrap_err(), sparse);
    let twice = ViewError::RowTwice { name: table(), row: 4, place: 2 };
    let assigned = worker.assign_rows("table", &[4, 1, 4], &[0.0_f32; 9]).unwrap_err();
    assert_eq!(assigned, twice.into());
    let mut values = [0.0_f32; 6];
    values[4] = f32::NAN;
    gradients.set_rows("table", &[9, 2], &values).unwrap();
    match worker.push(token, gradients).unwrap_err() {
        Error::NonFinite { variable, element, value } => {
            assert_eq!((variable, element), (table(), 2 * 3 + 1));
            assert!(value.is_nan());
        }
        error => panic!("{error}"),
    }
    assert_eq!(all_rows(&mut reader(&cluster)), before);
    cluster.stop();
}

/// Checks that a push that updates rows in place commits them together with its dense variables,
/// however large these are.
#[test]
fn few_rows_and_a_large_dense_variable_are_one_commit() {
    const DENSE: u64 = 400_000;
    const TABLE: u64 = 210_000;
    let synchronous = Synchronous::new(1);
    for mode in [Mode::default(), synchronous.into()] {
        let cluster = TestCluster::start(1, 1, Sgd::new(1.0), |config| config.mode(mode));
        let mut worker = cluster.worker(0);
        let table = VariableSpec::f32("table", [TABLE, 16]).unwrap().sparse();
        let mut params = worker.join(&[vector("dense", DENSE), table], |_| ()).unwrap();
        // One row in most of the blocks: to copy the blocks would be eight times the work.
        let ids: Vec<u64> = (0..TABLE).step_by(1000).collect();
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("dense").unwrap().fill(-1.0);
        gradients.set_rows("table", &ids, &vec![-2.0_f32; 16 * ids.len()]).unwrap();
        worker.push(token, gradients).unwrap();
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        let dense = params.view::<f32>("dense").unwrap();
        assert!(dense.iter().all(|&value| value == 1.0), "{mode:?}");
        let mut rows = vec![0.0_f32; 16 * ids.len()];
        worker.pull_rows(&token, "table", &ids, &mut rows).unwrap();
        assert!(rows.iter().all(|&value| value == 2.0), "{mode:?}");
        drop(token);
        cluster.stop();
    }
}
