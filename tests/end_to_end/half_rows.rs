//! Rows of f16 and bf16, in sparse variables and in tables: two bytes per element on workers and on
//! the wire, f32 on servers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use pushpull::blocking::{Reader, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::checkpoint::{export, export_since};
use pushpull::error::ViewError;
use pushpull::optim::Optimizer;
use pushpull::server::NonFinite;
use pushpull::variable::{
    DType, Element, Initializer, Partitioner, TableSpec, VariableId, bf16, f16,
};
use pushpull::worker::{Codec, LossScale};
use pushpull::{Adam, Error, Mode, PsConfig, Push, Sgd, Synchronous, Token, VariableSpec};
use safetensors::{Dtype, SafeTensors};

use crate::cluster::{TestCluster, vector};

/// Elements per row. Odd, so that rows do not end on whole words.
const WIDTH: usize = 5;
const ROWS: u64 = 41;

/// Starts one ps task with `shards` shards.
fn cluster(
    shards: u16,
    optimizer: impl Optimizer + Clone,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> TestCluster {
    TestCluster::start(1, 1, optimizer, |config| configure(config.shards(shards)))
}

fn checkpoints(directory: &Path) -> impl Fn(PsConfig) -> PsConfig {
    move |config| config.checkpoints(Checkpoints::new(LocalDirectory::create(directory).unwrap()))
}

fn partitioned(variable: VariableSpec) -> VariableSpec {
    variable.partitioner(Partitioner::Fixed { shards: 5 })
}

fn sparse(name: &str, dtype: DType) -> VariableSpec {
    let extents = [ROWS, WIDTH as u64];
    partitioned(match dtype {
        DType::F16 => VariableSpec::f16(name, extents).unwrap().sparse(),
        DType::Bf16 => VariableSpec::bf16(name, extents).unwrap().sparse(),
        _ => VariableSpec::f32(name, extents).unwrap().sparse(),
    })
}

fn table(name: &str, dtype: DType) -> VariableSpec {
    let table = TableSpec::new(1 << 24).rows_at_once(1 << 10);
    partitioned(VariableSpec::table(name, dtype, [WIDTH as u64], table).unwrap())
}

/// Sparse f16 rows and a bf16 table, each with an f32 twin. All are f32 if `half` is false.
fn variables(half: bool) -> Vec<VariableSpec> {
    let [half, other] = if half { [DType::F16, DType::Bf16] } else { [DType::F32, DType::F32] };
    vec![
        sparse("rows", half),
        sparse("rows/twin", DType::F32),
        table("table", other),
        table("table/twin", DType::F32),
        vector("bias", 3),
    ]
}

/// Returns the ids of a step's rows: distinct and unordered.
fn ids(name: &str, step: u64) -> Vec<u64> {
    let numbers =
        (0..ROWS).rev().filter(|row| row.is_multiple_of(7) || (row + step).is_multiple_of(3));
    numbers.map(|number| id(name, number)).collect()
}

fn id(name: &str, number: u64) -> u64 {
    if name.starts_with("table") { number.wrapping_mul(0x9e37_79b9_7f4a_7c15) } else { number }
}

fn all(name: &str) -> Vec<u64> {
    (0..ROWS).map(|number| id(name, number)).collect()
}

/// Returns numbers between -1 and 1 that f16 and bf16 represent exactly.
fn numbers(step: u64, count: usize) -> Vec<f32> {
    let number = |index: usize| {
        let mixed = (index as u64 * 31 + step * 977 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        bf16::from_f32(mixed as f32 / (1_u64 << 31) as f32 - 1.0).to_f32()
    };
    (0..count).map(number).collect()
}

fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().copied().map(f16::from_f32).collect()
}

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().copied().map(bf16::from_f32).collect()
}

/// Pushes the same numbers to each variable and its twin. Of three steps, one pushes all at once,
/// one scales the gradients, and one streams them.
fn train(worker: &mut Worker, steps: std::ops::Range<u64>) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let [rows, table] = ["rows", "table"].map(|name| ids(name, step));
        let values = numbers(step, WIDTH * rows.len());
        let push = if step % 3 == 2 {
            let mut pushing = worker.begin(token).unwrap();
            pushing.rows("rows", &rows, &to_f16(&values)).unwrap();
            pushing.rows("rows/twin", &rows, &values).unwrap();
            pushing.rows("table", &table, &to_bf16(&values)).unwrap();
            pushing.rows("table/twin", &table, &values).unwrap();
            pushing.finish().unwrap()
        } else {
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>("bias").unwrap().fill(1.0);
            gradients.set_rows("rows", &rows, &to_f16(&values)).unwrap();
            gradients.set_rows("rows/twin", &rows, &values).unwrap();
            gradients.set_rows("table", &table, &to_bf16(&values)).unwrap();
            gradients.set_rows("table/twin", &table, &values).unwrap();
            if step % 3 == 1 {
                gradients.scale(1.0 / 3.0);
            }
            worker.push(token, gradients).unwrap()
        };
        assert!(matches!(push, Push::Applied { .. } | Push::Accepted { .. }), "{push:?}");
    }
}

fn pull<T: Element>(worker: &mut Worker, token: &Token, name: &str) -> Vec<T> {
    let ids = all(name);
    let mut rows = vec![T::zeroed(); WIDTH * ids.len()];
    assert!(!worker.pull_rows(token, name, &ids, &mut rows).unwrap().is_stale());
    rows
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Checks that pulled rows equal their rounded twins, and returns the bits of the twins.
fn check_rounding(worker: &mut Worker) -> [Vec<u32>; 2] {
    let token = worker.token().unwrap().unwrap();
    let rows = pull::<f32>(worker, &token, "rows/twin");
    assert_eq!(pull::<f16>(worker, &token, "rows"), to_f16(&rows));
    let table = pull::<f32>(worker, &token, "table/twin");
    assert_eq!(pull::<bf16>(worker, &token, "table"), to_bf16(&table));
    [bits(&rows), bits(&table)]
}

/// Checks, for several numbers of shards and both modes, that the servers' rows equal those of f32
/// variables with the same pushes, bit for bit. Pulled rows are their rounding, and a checkpoint
/// holds them unrounded.
#[test]
fn master_rows_equal_f32_rows() {
    let modes = [Mode::default(), Synchronous::new(1).into()];
    for (shards, mode) in [1, 2, 5].into_iter().flat_map(|n| modes.map(|mode| (n, mode))) {
        let folder = tempfile::tempdir().unwrap();
        let saving = checkpoints(folder.path());
        let adam = || Adam::new(0.25).lazy();
        let first = cluster(shards, adam(), |config| saving(config).mode(mode));
        let mut worker = first.worker(0);
        worker.join(&variables(true), |_| ()).unwrap();
        for steps in [0..1, 1..2, 2..7] {
            train(&mut worker, steps);
            check_rounding(&mut worker);
        }
        worker.save(b"").unwrap();
        let trained = check_rounding(&mut worker);
        // A bf16 is the upper half of an f32.
        assert!(trained[1].iter().filter(|&&bits| bits & 0xffff != 0).count() > 100, "are rounded");
        first.stop();

        let second = cluster(shards % 5 + 1, adam(), &saving);
        let mut worker = second.worker(0);
        worker.join(&variables(false), |_| panic!("already restored")).unwrap();
        let token = worker.token().unwrap().unwrap();
        let masters = ["rows", "table"].map(|name| bits(&pull(&mut worker, &token, name)));
        assert!(masters == trained, "on {shards} shards in {mode:?}");
        drop(token);
        second.stop();
    }
}

/// Checks that training continues bit for bit after a restore into any number of shards. An export
/// has the variable's own type, also an export of the rows that were pushed since a step.
#[test]
fn checkpoints_keep_master_rows_and_export_half_precision() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let saving = checkpoints(&directory);
    let adam = || Adam::new(0.25).lazy();
    let first = cluster(2, adam(), &saving);
    let mut worker = first.worker(0);
    worker.join(&variables(true), |_| ()).unwrap();
    train(&mut worker, 0..3);
    let before: Vec<u64> = (0..3).flat_map(|step| ids("table", step)).collect();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let new = [1_u64 << 50, 3];
    gradients.set_rows("table", &new, &to_bf16(&numbers(77, 2 * WIDTH))).unwrap();
    gradients.set_rows("table/twin", &new, &numbers(77, 2 * WIDTH)).unwrap();
    worker.push(token, gradients).unwrap();
    worker.save(b"").unwrap();

    let file = folder.path().join("model.safetensors");
    let storage = || Arc::new(LocalDirectory::create(&directory).unwrap());
    let token = worker.token().unwrap().unwrap();
    for since in [0, 3] {
        match since {
            0 => export(storage(), None, &file, true).unwrap(),
            since => export_since(storage(), None, &file, true, since).unwrap(),
        };
        let bytes = std::fs::read(&file).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |name: &str| tensors.tensor(name).unwrap();
        let rows = tensor("rows");
        assert_eq!((rows.dtype(), rows.shape()), (Dtype::F16, &[ROWS as usize, WIDTH][..]));
        let held = pull::<f16>(&mut worker, &token, "rows");
        assert!(rows.data() == bytemuck::cast_slice::<f16, u8>(&held));

        let words = |name: &str| -> Vec<u64> {
            tensor(name).data().as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect()
        };
        let found = words("table:ids");
        let mut expected: Vec<u64> = new.to_vec();
        expected.extend(before.iter().filter(|_| since == 0));
        expected.sort_unstable();
        expected.dedup();
        let mut sorted = found.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, expected);
        let mut held = vec![bf16::ZERO; WIDTH * found.len()];
        worker.pull_rows(&token, "table", &found, &mut held).unwrap();
        assert_eq!(
            (tensor("table").dtype(), tensor("table").shape()[0]),
            (Dtype::BF16, found.len())
        );
        assert!(tensor("table").data() == bytemuck::cast_slice::<bf16, u8>(&held));
        // Slots are f32 and equal those of the twin, whose rows may be in another order.
        assert!(tensor("rows:m").data() == tensor("rows/twin:m").data());
        let slots = |name: &str| -> BTreeMap<u64, Vec<u8>> {
            let slots = tensor(&format!("{name}:v"));
            assert_eq!(slots.dtype(), Dtype::F32);
            let rows = slots.data().chunks(4 * WIDTH).map(<[u8]>::to_vec);
            words(&format!("{name}:ids")).into_iter().zip(rows).collect()
        };
        assert_eq!(slots("table"), slots("table/twin"));
    }
    drop(token);
    train(&mut worker, 4..8);
    let expected = check_rounding(&mut worker);
    first.stop();

    for shards in [1, 5] {
        let other = cluster(shards, adam(), &saving);
        let mut worker = other.worker(0);
        worker.join(&variables(true), |_| panic!("already restored")).unwrap();
        train(&mut worker, 4..8);
        assert!(check_rounding(&mut worker) == expected, "on {shards} shards");
        other.stop();
    }
}

/// Checks initial values, `assign_rows`, plain rows, readers, and pull codecs for f32 rows.
#[test]
fn every_operation_takes_half_precision_rows() {
    let cluster = cluster(2, Sgd::new(1.0), |config| config);
    let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    let variables = [
        sparse("rows", DType::F16).initializer(normal).seed(3),
        table("table", DType::Bf16).initializer(normal),
        sparse("plain", DType::Bf16).plain(),
        sparse("singles", DType::F32).initializer(normal),
    ];
    let mut worker = cluster.worker(0);
    let params = worker.join(&variables, |_| ()).unwrap();
    let mut first = vec![0_f32; WIDTH * ROWS as usize];
    params.catalogue().fill(VariableId(0), 0, &mut first);
    let mut rows = to_f16(&first);
    let given = [1.5, -2.0, 65504.0, 1e-3, 0.0].map(f16::from_f32);
    worker.assign_rows("rows", &[7], &given).unwrap();
    rows[7 * WIDTH..8 * WIDTH].copy_from_slice(&given);
    let plain = to_bf16(&numbers(3, 2 * WIDTH));
    worker.assign_rows("plain", &[40, 0], &plain).unwrap();
    worker.assign_rows("table", &[u64::MAX], &plain[..WIDTH]).unwrap();

    let short = cluster.config(0).pull_codec(Codec::F16);
    for (config, short) in [(cluster.config(0), false), (short, true)] {
        let mut reader = Reader::connect(config).unwrap();
        let mut found = vec![f16::ZERO; rows.len()];
        reader.pull_rows("rows", &all("rows"), &mut found).unwrap();
        assert_eq!(found, rows);
        let mut found = vec![bf16::ZERO; 3 * WIDTH];
        reader.pull_rows("plain", &[0, 40, 0], &mut found).unwrap();
        assert_eq!(found, [&plain[WIDTH..], &plain[..WIDTH], &plain[WIDTH..]].concat());
        reader.pull_rows("table", &[5, u64::MAX, 5], &mut found).unwrap();
        assert_eq!(found[WIDTH..2 * WIDTH], plain[..WIDTH]);
        assert_eq!(found[..WIDTH], found[2 * WIDTH..]);
        assert!(found[0] != bf16::ZERO, "a missing row is pulled with its initial values");
        let mut singles = [0_f32; WIDTH];
        reader.pull_rows("singles", &[9], &mut singles).unwrap();
        let rounded = singles.map(|value| f16::from_f32(value).to_f32());
        assert_eq!(singles == rounded, short, "a pull codec rounds f32 rows");
    }
    cluster.stop();
}

/// Checks several parts of 1 MiB and several requests: half the bytes of f32 in both directions.
#[test]
fn many_rows_travel_in_two_bytes_per_element() {
    const WIDE: u64 = 30_011;
    let cluster = cluster(2, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let rows = VariableSpec::f16("rows", [60, WIDE]).unwrap().sparse();
    worker.join(&[rows.partitioner(Partitioner::Fixed { shards: 2 })], |_| ()).unwrap();
    let ids: Vec<u64> = (0..60).rev().collect();
    let gradient = to_f16(&numbers(5, 60 * WIDE as usize));
    let before = cluster.handle().metrics();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.set_rows("rows", &ids, &gradient).unwrap();
    worker.push(token, gradients).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut found = vec![f16::ZERO; gradient.len()];
    worker.pull_rows(&token, "rows", &ids, &mut found).unwrap();
    assert!(found.iter().zip(&gradient).all(|(found, given)| *found == -*given));
    let metrics = cluster.handle().metrics();
    let all = 2 * 60 * WIDE;
    let about = all..all + 1000;
    assert!(about.contains(&(metrics.push_bytes - before.push_bytes)), "{}", metrics.push_bytes);
    assert!(about.contains(&(metrics.pull_bytes - before.pull_bytes)), "{}", metrics.pull_bytes);
    drop(token);
    cluster.stop();
}

/// Checks sums and products that would be lost if they were computed in f16 or bf16.
#[test]
fn rows_are_rounded_only_once() {
    let cluster = cluster(1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let variables = [
        VariableSpec::bf16("rows", [4]).unwrap().sparse(),
        VariableSpec::table("table", DType::F16, [], TableSpec::new(1 << 20)).unwrap(),
    ];
    worker.join(&variables, |_| ()).unwrap();
    let small = 2f32.powi(-8);
    assert_eq!(bf16::from_f32(1.0 + small), bf16::ONE, "bf16 loses it");
    let mut scale = LossScale::default();
    let tiny = 2f64.powi(-26);
    assert_eq!(f16::from_f64(tiny), f16::ZERO);
    let scaled = f16::from_f64(tiny * scale.scale());
    for step in 0..64 {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        if step == 0 {
            let rows = to_bf16(&[1.0, small, small]);
            gradients.set_rows("rows", &[2, 2, 2], &rows).unwrap();
            worker.push(token, gradients).unwrap();
            continue;
        }
        gradients.set_rows("table", &[9], &[scaled]).unwrap();
        assert!(scale.unscale(&mut gradients));
        if step == 63 {
            // Rows that are set after `unscale` are not scaled.
            gradients.set_rows("table", &[8], &[scaled]).unwrap();
        }
        worker.push(token, gradients).unwrap();
    }
    let token = worker.token().unwrap().unwrap();
    let mut rows = [bf16::ZERO; 2];
    worker.pull_rows(&token, "rows", &[2, 1], &mut rows).unwrap();
    assert_eq!(rows, [bf16::from_f32(-1.0 - 2.0 * small), bf16::ZERO]);
    let mut rows = [f16::ZERO; 2];
    worker.pull_rows(&token, "table", &[9, 8], &mut rows).unwrap();
    assert_eq!(rows, [f16::from_f64(-62.0 * tiny), -scaled]);
    drop(token);
    cluster.stop();
}

/// Checks that a codec of another type encodes rows from f32 and keeps f32 residuals, as for the
/// twins.
#[test]
fn codecs_encode_half_precision_rows_from_f32() {
    for codec in [Codec::Int8, Codec::Bf16, Codec::F16] {
        let cluster = cluster(2, Sgd::new(1.0 / 3.0), |config| config);
        let mut worker = Worker::connect(cluster.config(0).codec("*", codec)).unwrap();
        worker.join(&variables(true), |_| ()).unwrap();
        train(&mut worker, 0..4);
        if codec == Codec::Int8 {
            check_rounding(&mut worker);
        }
        let residuals = worker.residuals().unwrap();
        assert!(residuals.len() > 1000, "{codec} must leave residuals");
        worker.restore_residuals(&residuals).unwrap();
        assert!(worker.residuals().unwrap() == residuals);
        train(&mut worker, 4..7);
        if codec == Codec::Int8 {
            check_rounding(&mut worker);
        }
        cluster.stop();
    }
}

/// Checks that a wrong type, a wrong width, NaN and infinity are reported by name, and that nothing
/// is changed.
#[test]
fn bad_half_precision_rows_are_reported_by_name() {
    let cluster = cluster(1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let variables = [sparse("rows", DType::F16), table("table", DType::Bf16)];
    worker.join(&variables, |_| ()).unwrap();
    fn check<T: Element>(worker: &mut Worker, name: &str, dtype: DType) {
        let wrong = ViewError::Type { name: name.to_owned(), asked: T::DTYPE, dtype };
        let mut row = [T::zeroed(); WIDTH];
        let is_it = |error: Error| match error {
            Error::View(error) => assert_eq!(error, wrong),
            error => panic!("{error}"),
        };
        assert_eq!(worker.gradients().set_rows(name, &[1], &row).unwrap_err(), wrong);
        is_it(worker.assign_rows(name, &[1], &row).unwrap_err());
        let token = worker.token().unwrap().unwrap();
        is_it(worker.pull_rows(&token, name, &[1], &mut row).unwrap_err());
        is_it(worker.begin(token).unwrap().rows(name, &[1], &row).unwrap_err());
    }
    check::<f32>(&mut worker, "rows", DType::F16);
    check::<bf16>(&mut worker, "rows", DType::F16);
    check::<f32>(&mut worker, "table", DType::Bf16);
    check::<f16>(&mut worker, "table", DType::Bf16);
    let width = worker.gradients().set_rows("rows", &[1], &[f16::ONE; 4]).unwrap_err();
    assert!(matches!(width, ViewError::Width { elements: 4, .. }), "{width}");

    let element = |error: Error| match error {
        Error::NonFinite { variable, element, value } if variable == "rows" => {
            assert!(!value.is_finite());
            element
        }
        error => panic!("{error}"),
    };
    for bad in [f16::NAN, f16::INFINITY, f16::from_f32(1e5)] {
        let mut row = [f16::ONE; 2 * WIDTH];
        row[WIDTH + 2] = bad;
        assert_eq!(element(worker.assign_rows("rows", &[3, 6], &row).unwrap_err()), 32);
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.set_rows("rows", &[3, 6], &row).unwrap();
        assert_eq!(element(worker.push(token, gradients).unwrap_err()), 32);
    }
    // Each element is finite, but their sum is not, nor is the product with the scale.
    let most = [f16::MAX; 2 * WIDTH];
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.set_rows("rows", &[3, 3], &most).unwrap();
    assert_eq!(element(worker.push(token, gradients).unwrap_err()), 15);
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.set_rows("rows", &[3], &most[..WIDTH]).unwrap();
    gradients.scale(1e35);
    assert_eq!(element(worker.push(token, gradients).unwrap_err()), 15);
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.set_rows("table", &[77], &[bf16::NAN; WIDTH]).unwrap();
    let error = worker.push(token, gradients).unwrap_err();
    assert!(matches!(error, Error::NonFiniteRow { row: 77, .. }), "{error}");
    assert_eq!(cluster.handle().metrics().push_bytes, 0, "it must not be sent");
    cluster.stop();

    // Under `NonFinite::Count` the servers count them, and the rows hold them.
    let cluster = TestCluster::sgd(1, |config| config.non_finite(NonFinite::Count));
    let mut worker = cluster.worker(0);
    worker.join(&variables, |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    let mut row = [f16::ONE; WIDTH];
    row[1] = f16::NAN;
    row[3] = f16::INFINITY;
    gradients.set_rows("rows", &[40], &row).unwrap();
    worker.push(token, gradients).unwrap();
    assert_eq!(cluster.handle().metrics().non_finite, 2);
    let token = worker.token().unwrap().unwrap();
    worker.pull_rows(&token, "rows", &[40], &mut row).unwrap();
    assert!(row[1].is_nan());
    assert_eq!((row[0], row[3]), (f16::NEG_ONE, f16::NEG_INFINITY));
    drop(token);
    cluster.stop();
}
