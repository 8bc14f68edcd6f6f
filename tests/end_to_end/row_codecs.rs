//! Encoded rows of sparse variables and of tables: decoded values, residuals, and pulls.

use std::collections::BTreeMap;
use std::net::TcpListener;

use pushpull::blocking::{Reader, Worker};
use pushpull::optim::Adagrad;
use pushpull::variable::{DType, Initializer, Partitioner, Shape, TableSpec};
use pushpull::worker::Codec;
use pushpull::{Error, Mode, PsConfig, Push, Sgd, Synchronous, TaskId, VariableSpec, WorkerConfig};
use pushpull_common::codec::{Residual, ScaleBlocks};

use super::cluster::{TestCluster, listen, spec, vector};
use super::proxy::Proxy;

const CODECS: [Codec; 3] = [Codec::F16, Codec::Bf16, Codec::Int8];

/// Elements per row. Odd, so that rows do not end on whole words.
const WIDTH: usize = 5;

const NAMES: [&str; 2] = ["rows", "table"];

/// `rows` and `table` in `parts` partitions, and a dense `bias`.
fn variables(rows: u64, parts: u32) -> [VariableSpec; 3] {
    let width = WIDTH as u64;
    let sparse = VariableSpec::f32("rows", [rows, width]).unwrap().sparse();
    let table = TableSpec::new(1 << 24);
    let table = VariableSpec::table("table", DType::F32, [width], table).unwrap();
    let cut = |variable: VariableSpec| variable.partitioner(Partitioner::Fixed { shards: parts });
    [cut(sparse), cut(table), vector("bias", 3)]
}

/// Returns the id of a row: its number in `rows`, scattered over 64 bits in `table`.
fn id(name: &str, number: u64) -> u64 {
    if name == "table" { number.wrapping_mul(0x9e37_79b9_7f4a_7c15) } else { number }
}

/// Returns the gradient of a row. Magnitudes differ between rows by up to 1000 times.
fn row(step: u64, worker: u64, number: u64) -> [f32; WIDTH] {
    std::array::from_fn(|element| {
        let seed = number * 31 + step * 977 + worker * 7919 + element as u64 * 131;
        let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (mixed as f32 / (1 << 23) as f32 - 1.0) * 10f32.powi(number as i32 % 4 - 2)
    })
}

/// Computes what servers decode from a worker's rows: each is encoded alone, with its residual.
struct RowEncoder {
    codec: Codec,
    residuals: BTreeMap<(&'static str, u64), Residual<f32>>,
}

impl RowEncoder {
    fn new(codec: Codec) -> RowEncoder {
        RowEncoder { codec, residuals: BTreeMap::new() }
    }

    fn row(&mut self, name: &'static str, number: u64, given: &[f32]) -> Vec<f32> {
        let residual = self.residuals.entry((name, number)).or_insert_with(|| Residual::new(WIDTH));
        let mut bytes = Vec::new();
        let mut found = vec![0.0; WIDTH];
        residual.encode(&self.codec, ScaleBlocks::THROUGH, 0, given, &mut bytes).unwrap();
        self.codec.encoding().decode(&bytes, &mut found).unwrap();
        found
    }
}

/// Returns the numbers and gradients of the rows that a worker pushes in a step.
fn pushed(step: u64, worker: u64, rows: u64) -> Vec<(u64, Vec<f32>)> {
    let numbers = (0..rows)
        .filter(|number| number.is_multiple_of(7) || (number + step + worker).is_multiple_of(3));
    numbers.map(|number| (number, row(step, worker, number).to_vec())).collect()
}

fn concat(rows: &[(u64, Vec<f32>)], name: &str) -> (Vec<u64>, Vec<f32>) {
    let ids = rows.iter().map(|(number, _)| id(name, *number)).collect();
    (ids, rows.iter().flat_map(|(_, row)| row.iter().copied()).collect())
}

fn with_codec(config: WorkerConfig, codec: Codec) -> WorkerConfig {
    NAMES.into_iter().fold(config, |config, name| config.codec(name, codec))
}

/// Returns the rows after four steps of two workers, and the bytes that servers received. Unless
/// `encoded` is set, the workers push the decoded rows without the codec.
fn trained(ps: usize, mode: Mode, codec: Codec, encoded: bool) -> (Vec<Vec<f32>>, u64) {
    const ROWS: u64 = 41;
    let cluster = TestCluster::start(ps, 2, Adagrad::new(0.1), |config| config.mode(mode));
    let mut workers = [0, 1].map(|index| {
        let config = cluster.config(index);
        let config = if encoded { with_codec(config, codec) } else { config };
        Worker::connect(config).unwrap()
    });
    for worker in &mut workers {
        worker.join(&variables(ROWS, 5), |_| ()).unwrap();
    }
    let mut encoder = [RowEncoder::new(codec), RowEncoder::new(codec)];
    for step in 0..4 {
        let tokens: Vec<_> = workers.iter_mut().map(|w| w.token().unwrap().unwrap()).collect();
        for (index, (worker, token)) in workers.iter_mut().zip(tokens).enumerate() {
            let given = NAMES.map(|name| {
                let mut rows = pushed(step, index as u64, ROWS);
                if encoded {
                    // One row is given twice, half each: the worker sums both before it encodes.
                    rows.push((0, rows[0].1.iter().map(|value| value / 2.0).collect()));
                    rows[0].1.iter_mut().for_each(|value| *value /= 2.0);
                    return (name, concat(&rows, name));
                }
                for (number, row) in &mut rows {
                    *row = encoder[index].row(name, *number, row);
                }
                (name, concat(&rows, name))
            });
            let push = if index == 0 {
                let mut gradients = worker.gradients();
                gradients.view_mut::<f32>("bias").unwrap().fill(1.0);
                for (name, (ids, rows)) in &given {
                    gradients.set_rows(name, ids, rows).unwrap();
                }
                worker.push(token, gradients).unwrap()
            } else {
                let mut streamed = worker.begin(token).unwrap();
                for (name, (ids, rows)) in &given {
                    streamed.rows(name, ids, rows).unwrap();
                }
                streamed.finish().unwrap()
            };
            assert!(matches!(push, Push::Applied { .. } | Push::Accepted { .. }), "{push:?}");
        }
    }
    let token = workers[0].token().unwrap().unwrap();
    let rows = NAMES.map(|name| {
        let ids: Vec<u64> = (0..ROWS).map(|number| id(name, number)).collect();
        let mut rows = vec![0.0; WIDTH * ids.len()];
        workers[0].pull_rows(&token, name, &ids, &mut rows).unwrap();
        rows
    });
    let bytes = cluster.servers.iter().map(|ps| ps.handle().metrics().push_bytes).sum();
    drop(token);
    drop(workers);
    cluster.stop();
    (rows.to_vec(), bytes)
}

#[test]
fn encoded_rows_train_as_their_decoded_values() {
    let synchronous = Synchronous::new(2);
    for mode in [Mode::default(), synchronous.into()] {
        for codec in CODECS {
            let (expected, plain) = trained(1, mode, codec, false);
            assert!(expected.iter().flatten().filter(|&&value| value != 0.0).count() > 300);
            for ps in [1, 2, 5] {
                let (rows, bytes) = trained(ps, mode, codec, true);
                assert!(rows == expected, "{codec} on {ps} servers in {mode:?}");
                assert!(ps > 1 || bytes < plain * 3 / 4, "{codec}: {bytes} bytes, plain {plain}");
            }
        }
    }
}

/// Pushes the rows of these steps.
fn descend(worker: &mut Worker, steps: std::ops::Range<u64>, rows: u64) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for name in NAMES {
            let (ids, rows) = concat(&pushed(step, 0, rows), name);
            gradients.set_rows(name, &ids, &rows).unwrap();
        }
        assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
    }
}

/// Computes the rows that gradient descent at rate 1 from zeros reaches after these steps. Without
/// `feedback`, residuals are dropped.
fn expected_rows(
    encoder: &mut RowEncoder,
    steps: std::ops::Range<u64>,
    rows: u64,
    feedback: bool,
) -> [Vec<f32>; 2] {
    NAMES.map(|name| {
        let mut values = vec![0f32; WIDTH * rows as usize];
        for step in steps.clone() {
            for (number, given) in pushed(step, 0, rows) {
                let found = encoder.row(name, number, &given);
                if !feedback {
                    encoder.residuals.clear();
                }
                let values = &mut values[number as usize * WIDTH..][..WIDTH];
                values.iter_mut().zip(found).for_each(|(value, found)| *value -= found);
            }
        }
        values
    })
}

fn values(reader: &mut Reader, rows: u64) -> [Vec<f32>; 2] {
    NAMES.map(|name| {
        let ids: Vec<u64> = (0..rows).map(|number| id(name, number)).collect();
        let mut values = vec![0.0; WIDTH * ids.len()];
        reader.pull_rows(name, &ids, &mut values).unwrap();
        values
    })
}

/// Checks that rows are encoded once and applied once, wherever connections are cut.
#[test]
fn encoded_rows_count_once_through_cut_connections() {
    let rows = 6000;
    let steps = 20;
    let listener = listen();
    let proxy_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = spec([proxy_listener.local_addr().unwrap().to_string()], 1);
    let proxy = Proxy::start(proxy_listener, listener.address(), 100_000, 7);
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
    let server = listener.start(config).unwrap();
    let config = || WorkerConfig::new(cluster.clone(), TaskId::worker(0));
    let mut worker = Worker::connect(with_codec(config(), Codec::Int8)).unwrap();
    worker.join(&variables(rows, 2), |_| ()).unwrap();
    descend(&mut worker, 0..steps, rows);
    proxy.heal();
    let found = values(&mut Reader::connect(config()).unwrap(), rows);
    assert!(found == expected_rows(&mut RowEncoder::new(Codec::Int8), 0..steps, rows, true));
    assert!(proxy.cuts() > 10, "only {} cuts", proxy.cuts());
    drop(server);
}

#[test]
fn residuals_of_rows_are_restored_by_another_worker() {
    const ROWS: u64 = 50;
    for codec in CODECS {
        let cluster = TestCluster::sgd(1, |config| config);
        let connect = |config: WorkerConfig| {
            let mut worker = Worker::connect(with_codec(config, codec)).unwrap();
            worker.join(&variables(ROWS, 3), |_| ()).unwrap();
            worker
        };
        let mut worker = connect(cluster.config(0));
        descend(&mut worker, 0..3, ROWS);
        let saved = worker.residuals().unwrap();
        worker.leave().unwrap();

        let mut worker = connect(cluster.config(0));
        for at in (0..saved.len()).step_by(97) {
            let mut other = saved.clone();
            other[at] ^= 1;
            let damaged = Err(Error::DamagedResiduals);
            assert_eq!(worker.restore_residuals(&other), damaged, "a bit at {at}");
            assert_eq!(worker.restore_residuals(&saved[..at]), damaged, "cut at {at}");
        }
        worker.restore_residuals(&saved).unwrap();
        assert!(worker.residuals().unwrap() == saved);
        descend(&mut worker, 3..6, ROWS);
        let found = values(&mut Reader::connect(cluster.config(0)).unwrap(), ROWS);
        assert!(found == expected_rows(&mut RowEncoder::new(codec), 0..6, ROWS, true), "{codec}");
        drop(worker);
        cluster.stop();

        // With no memory for residuals, each push is encoded alone.
        let cluster = TestCluster::sgd(1, |config| config);
        let mut worker = connect(cluster.config(0).row_residual_bytes(0));
        descend(&mut worker, 0..4, ROWS);
        assert!(worker.residuals().unwrap().len() < 100);
        let found = values(&mut Reader::connect(cluster.config(0)).unwrap(), ROWS);
        let alone = expected_rows(&mut RowEncoder::new(codec), 0..4, ROWS, false);
        let fed_back = expected_rows(&mut RowEncoder::new(codec), 0..4, ROWS, true);
        assert!(found == alone && alone != fed_back, "{codec}");
        drop(worker);
        cluster.stop();
    }
}

/// Checks that pulled rows are rounded. Plain rows are pulled exactly, and the servers keep full
/// precision.
#[test]
fn rows_are_pulled_in_half_as_many_bytes() {
    const ROWS: u64 = 1000;
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| config);
    let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    let shape = |rows| Shape::new([rows, 3]).unwrap();
    let [rows, table, _] = variables(ROWS, 4);
    let variables = [
        rows.initializer(normal),
        table.initializer(normal),
        VariableSpec::new("doubles", DType::F64, shape(4)).unwrap().sparse().initializer(normal),
        VariableSpec::new("counts", DType::I64, shape(4)).unwrap().sparse(),
        VariableSpec::f32("plain", [4, 3]).unwrap().sparse().plain().initializer(normal),
    ];
    let mut worker = Worker::connect(cluster.config(0).pull_codec(Codec::Bf16)).unwrap();
    worker.join(&variables, |_| ()).unwrap();
    worker.assign_rows("counts", &[3], &[i64::MAX, 0, -1]).unwrap();
    let rounded = |value: f64| {
        let mut bytes = Vec::new();
        let mut found = [0f64];
        Codec::Bf16.encode(&[value], &mut bytes).unwrap();
        Codec::Bf16.encoding().decode(&bytes, &mut found).unwrap();
        found[0]
    };
    let mut whole = Reader::connect(cluster.config(0)).unwrap();
    let given = values(&mut whole, ROWS);
    let token = worker.token().unwrap().unwrap();
    let pulled = || cluster.servers.iter().map(|ps| ps.handle().metrics().pull_bytes).sum::<u64>();
    for (name, given) in NAMES.into_iter().zip(given) {
        let before = pulled();
        let ids: Vec<u64> = (0..ROWS).map(|number| id(name, number)).collect();
        let mut rows = vec![0f32; given.len()];
        worker.pull_rows(&token, name, &ids, &mut rows).unwrap();
        // Each request is padded to whole words.
        assert!(pulled() - before <= 2 * given.len() as u64 + 4 * 8, "{name}");
        let expected = given.iter().map(|&value| rounded(value.into()) as f32);
        assert!(rows.iter().copied().eq(expected), "{name}");
        assert!(rows != given, "{name}");
    }
    let mut doubles = [0f64; 6];
    let mut all = [0f64; 6];
    worker.pull_rows(&token, "doubles", &[2, 0], &mut doubles).unwrap();
    whole.pull_rows("doubles", &[2, 0], &mut all).unwrap();
    assert_eq!(doubles, all.map(rounded));
    let mut counts = [7; 6];
    worker.pull_rows(&token, "counts", &[3, 1], &mut counts).unwrap();
    assert_eq!(counts, [i64::MAX, 0, -1, 0, 0, 0]);
    let mut plain = [0f32; 6];
    let mut all = [0f32; 6];
    worker.pull_rows(&token, "plain", &[1, 3], &mut plain).unwrap();
    whole.pull_rows("plain", &[1, 3], &mut all).unwrap();
    assert_eq!(plain, all);

    let mut reader = Reader::connect(cluster.config(0).pull_codec(Codec::F16)).unwrap();
    let mut short = [0f64; 3];
    reader.pull_rows("doubles", &[1], &mut short).unwrap();
    whole.pull_rows("doubles", &[1], &mut all.map(f64::from)[..3]).unwrap();
    assert!(short.iter().all(|&value| value != 0.0 && f64::from(value as f32) == value));
    drop(token);
    cluster.stop();
}
