//! What a rule counts is one count of the training: values depend neither on the placement, nor on
//! which variables a push contains, nor on a restore into another layout, nor on which worker pushes.

use std::ops::Range;
use std::path::Path;

use pushpull::blocking::{Reader, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::optim::{Adadelta, Adagrad, AdamW, Ftrl, Lamb, Momentum, RmsProp};
use pushpull::variable::{DType, Initializer, Partitioner, RowAdmission, TableSpec};
use pushpull::{Adam, Mode, PsConfig, Sgd, Synchronous, VariableSpec};

use super::cluster::{TestCluster, vector};

/// A layout of the variables: ps tasks, shards of each, and the parts of a partitioned variable.
#[derive(Clone, Copy, Debug)]
struct Layout {
    tasks: usize,
    shards: u16,
    parts: u32,
}

const LAYOUTS: [Layout; 4] = [
    Layout { tasks: 1, shards: 1, parts: 1 },
    Layout { tasks: 2, shards: 1, parts: 2 },
    Layout { tasks: 3, shards: 2, parts: 4 },
    Layout { tasks: 1, shards: 4, parts: 3 },
];

/// A rule, and whether it trains partitioned variables, rows, and tables.
struct TrainedBy {
    name: &'static str,
    assign: fn(PsConfig, &str) -> PsConfig,
    parts: bool,
    rows: bool,
    tables: bool,
}

fn trained_by(
    name: &'static str,
    assign: fn(PsConfig, &str) -> PsConfig,
    [parts, rows, tables]: [bool; 3],
) -> TrainedBy {
    TrainedBy { name, assign, parts, rows, tables }
}

/// Every rule, in every form that counts in another way.
fn rules() -> Vec<TrainedBy> {
    let all = [true; 3];
    let not_tables = [true, true, false];
    vec![
        trained_by("sgd", |c, names| c.optimizer_for(names, Sgd::new(0.1)), all),
        trained_by("momentum", |c, names| c.optimizer_for(names, Momentum::new(0.1, 0.9)), all),
        trained_by(
            "nesterov",
            |c, names| c.optimizer_for(names, Momentum::nesterov(0.1, 0.9)),
            all,
        ),
        trained_by("adagrad", |c, names| c.optimizer_for(names, Adagrad::new(0.1)), all),
        trained_by("adadelta", |c, names| c.optimizer_for(names, Adadelta::new(0.1)), all),
        trained_by("rmsprop", |c, names| c.optimizer_for(names, RmsProp::new(0.1).centered()), all),
        trained_by("adam", |c, names| c.optimizer_for(names, adam()), not_tables),
        trained_by("lazy", |c, names| c.optimizer_for(names, adam().lazy()), all),
        trained_by("counted", |c, n| c.optimizer_for(n, adam().lazy_with_row_counts()), all),
        trained_by(
            "after",
            |c, n| c.optimizer_for(n, adam().epsilon_after_correction()),
            not_tables,
        ),
        trained_by("adamw", |c, names| c.optimizer_for(names, AdamW::new(0.1)), not_tables),
        trained_by("lamb", |c, names| c.optimizer_for(names, Lamb::new(0.1)), [false; 3]),
        trained_by("ftrl", |c, names| c.optimizer_for(names, Ftrl::new(0.1)), all),
    ]
}

fn adam() -> Adam {
    Adam::new(0.1)
}

/// The variables of a layout: for each rule two vectors, rows and a table, as far as it trains them.
fn variables(layout: Layout) -> Vec<VariableSpec> {
    let cut = || Partitioner::Fixed { shards: layout.parts };
    let table = TableSpec::new(1 << 20).rows_at_once(64);
    let table = table.admission(RowAdmission::Chance { probability: 0.4 });
    let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    let mut all = Vec::new();
    for TrainedBy { name, parts, rows, tables, .. } in rules() {
        let large = vector(&format!("{name}/large"), 90).initializer(normal);
        all.push(if parts { large.partitioner(cut()) } else { large });
        all.push(vector(&format!("{name}/small"), 5));
        if rows {
            let rows = VariableSpec::f32(format!("{name}/rows"), [9, 3]).unwrap().sparse();
            all.push(rows.initializer(normal).partitioner(cut()));
        }
        if tables {
            let table = VariableSpec::table(format!("{name}/table"), DType::F32, [2], table);
            all.push(table.unwrap().initializer(normal).partitioner(cut()));
        }
    }
    all
}

fn row_width(variable: &VariableSpec) -> u64 {
    if variable.as_table().is_some() { 2 } else { 3 }
}

/// Returns 64 bits that depend on these numbers alone.
fn noise(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |sum, &number| {
        let sum = (sum ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (sum ^ (sum >> 29)).wrapping_mul(0xc4ce_b9fe_1a85_ec53)
    }) >> 16
}

fn number(numbers: &[u64]) -> f32 {
    (noise(numbers) % 1000) as f32 / 500.0 - 1.0
}

/// Pushes the gradients of these steps, each by the next worker. Each contains a subset of the
/// variables: most, few or one.
fn train(workers: &mut [Worker], variables: &[VariableSpec], seed: u64, steps: Range<u64>) {
    for step in steps {
        let turn = step as usize % workers.len();
        let worker = &mut workers[turn];
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        let sparsity = [2, 10, 1000][noise(&[seed, step]) as usize % 3];
        let always = noise(&[seed, step, 1]) as usize % variables.len();
        for (index, variable) in variables.iter().enumerate() {
            let at = index as u64;
            if index != always && !noise(&[seed, step, 2, at]).is_multiple_of(sparsity) {
                continue;
            }
            let name = variable.name();
            if variable.is_sparse() {
                let width = row_width(variable);
                let mut ids: Vec<u64> = (0..4).map(|n| noise(&[seed, step, at, n]) % 9).collect();
                ids.dedup();
                let rows: Vec<f32> = (0..ids.len() as u64 * width)
                    .map(|n| number(&[seed, step, at, 3, n]))
                    .collect();
                gradients.set_rows(name, &ids, &rows).unwrap();
            } else {
                let view = gradients.view_mut::<f32>(name).unwrap();
                (0..).zip(view).for_each(|(n, g): (u64, _)| *g = number(&[seed, step, at, 4, n]));
            }
        }
        worker.push(token, gradients).unwrap();
    }
}

/// Returns the bits of all values.
fn bits(cluster: &TestCluster, variables: &[VariableSpec]) -> Vec<(String, Vec<u32>)> {
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut params = reader.params();
    reader.pull(&mut params).unwrap();
    let mut all = Vec::new();
    for variable in variables {
        let name = variable.name();
        let ids: Vec<u64> = (0..9).collect();
        let values = if variable.is_sparse() {
            let mut rows = vec![0.0_f32; 9 * row_width(variable) as usize];
            reader.pull_rows(name, &ids, &mut rows).unwrap();
            rows
        } else {
            params.view::<f32>(name).unwrap().to_vec()
        };
        all.push((name.to_owned(), values.into_iter().map(f32::to_bits).collect()));
    }
    all
}

fn start(layout: Layout, mode: Mode, directory: &Path) -> TestCluster {
    TestCluster::start(layout.tasks, 2, Sgd::new(0.1), |config| {
        let checkpoints = Checkpoints::new(LocalDirectory::create(directory).unwrap());
        let config = config.shards(layout.shards).mode(mode).checkpoints(checkpoints);
        let assign = |config, rule: TrainedBy| (rule.assign)(config, &format!("{}/*", rule.name));
        rules().into_iter().fold(config, assign)
    })
}

/// Trains in these layouts, one after the other, each up to a step, with a restore in between. The
/// workers push in turns.
fn trained(
    layouts: &[(Layout, u64)],
    mode: Mode,
    workers: u32,
    seed: u64,
) -> Vec<(String, Vec<u32>)> {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let mut from = 0;
    let mut values = Vec::new();
    for &(layout, to) in layouts {
        let cluster = start(layout, mode, &directory);
        let mut workers: Vec<Worker> = (0..workers).map(|index| cluster.worker(index)).collect();
        let variables = variables(layout);
        for worker in &mut workers {
            worker.join(&variables, |_| ()).unwrap();
        }
        assert_eq!(workers[0].restored().map_or(0, |restored| restored.step), from);
        train(&mut workers, &variables, seed, from..to);
        workers[0].save(b"").unwrap();
        values = bits(&cluster, &variables);
        workers.into_iter().for_each(|worker| worker.leave().unwrap());
        cluster.stop();
        from = to;
    }
    values
}

const STEPS: u64 = 24;

fn assert_equal(found: &[(String, Vec<u32>)], expected: &[(String, Vec<u32>)], case: &str) {
    let differ = found.iter().zip(expected).filter(|(found, expected)| found.1 != expected.1);
    let differ: Vec<&str> = differ.map(|(found, _)| found.0.as_str()).collect();
    assert!(differ.is_empty(), "{differ:?} differ for {case}");
}

/// Placements x subsets x rules x restores x workers.
#[test]
fn values_do_not_depend_on_placement_subset_restore_or_worker() {
    let synchronous = Mode::from(Synchronous::new(1));
    for seed in 0..3 {
        let expected = trained(&[(LAYOUTS[0], STEPS)], Mode::default(), 1, seed);
        for (number, layout) in LAYOUTS.into_iter().enumerate().skip(1) {
            let mode = if (seed as usize + number).is_multiple_of(2) {
                synchronous
            } else {
                Mode::default()
            };
            // In synchronous mode each step here takes one gradient of its only replica.
            let workers = if mode == synchronous { 1 } else { 2 };
            let found = trained(&[(layout, STEPS)], mode, workers, seed);
            assert_equal(&found, &expected, &format!("{layout:?}, {mode:?}, seed {seed}"));
        }
        let cuts = [1 + noise(&[seed, 10]) % 8, 10 + noise(&[seed, 11]) % 8];
        let at = |n: u64| LAYOUTS[noise(&[seed, 12, n]) as usize % LAYOUTS.len()];
        let chain = [(at(0), cuts[0]), (at(1), cuts[1]), (at(2), STEPS)];
        let found = trained(&chain, Mode::default(), 2, seed);
        assert_equal(&found, &expected, &format!("{chain:?}, seed {seed}"));
    }
}
