//! First values that the chief loads from files: rows of sparse variables and tables.

use std::path::Path;
use std::sync::Arc;

use pushpull::blocking::Reader;
use pushpull::checkpoint::{Checkpoints, LocalDirectory, export};
use pushpull::error::LoadError;
use pushpull::optim::Adagrad;
use pushpull::variable::{DType, Initializer, Partitioner, TableSpec, f16};
use pushpull::worker::LoadOptions;
use pushpull::{Error, VariableSpec};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::cluster::{TestCluster, vector};

/// A tensor of a file: name, type, shape and bytes.
type Tensor<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn write(path: &Path, tensors: &[Tensor<'_>]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn singles(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A sparse variable in two partitions, whose rows begin with ones.
fn sparse(name: &str, rows: u64, width: u64) -> VariableSpec {
    let variable = VariableSpec::f32(name, [rows, width]).unwrap().sparse();
    variable.initializer(Initializer::Ones).partitioner(Partitioner::Fixed { shards: 2 })
}

fn rows_of(cluster: &TestCluster, name: &str, ids: &[u64], width: usize) -> Vec<f32> {
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut rows = vec![0.0; ids.len() * width];
    reader.pull_rows(name, ids, &mut rows).unwrap();
    rows
}

/// The file of a report: `e` of 2 rows of 2 `f32`, and `w` of one.
#[test]
fn pretrained_rows_are_loaded() {
    let header = "{\"e\": {\"dtype\": \"F32\", \"shape\": [2, 2], \"data_offsets\": [0, 16]}, \
                  \"w\": {\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [16, 20]}}";
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(singles(&[1.0, 2.0, 3.0, 4.0, 0.0]));
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let cluster = TestCluster::sgd_of(2, 1, |config| config);
    let variables = [sparse("e", 2, 2), vector("w", 1)];
    let mut worker = cluster.worker(0);
    worker.join(&variables, |initial| initial.load(file.path())).unwrap();
    assert_eq!(rows_of(&cluster, "e", &[1, 0], 2), [3.0, 4.0, 1.0, 2.0]);
    drop(worker);
    cluster.stop();
}

/// Rows of several pieces, one file of a sharded checkpoint for rows and one for the rest, and
/// another worker that waits for the values.
#[test]
fn a_sharded_checkpoint_fills_partitioned_rows() {
    const ROWS: usize = 300_001;
    let folder = tempfile::tempdir().unwrap();
    let halves = |place: usize| f16::from_f32((place % 2003) as f32);
    let values = (0..8 * ROWS).flat_map(|place| halves(place).to_le_bytes()).collect();
    let w: Tensor<'_> = ("w", Dtype::F32, &[3], singles(&[7.0, 8.0, 9.0]));
    write(&folder.path().join("model-00001-of-00002.safetensors"), &[w]);
    let rows: Tensor<'_> = ("emb.weight", Dtype::F16, &[ROWS, 8], values);
    write(&folder.path().join("model-00002-of-00002.safetensors"), &[rows]);
    let index = "{\"metadata\": {\"total_size\": 4800028}, \"weight_map\": {\
                 \"w\": \"model-00001-of-00002.safetensors\", \
                 \"emb.weight\": \"model-00002-of-00002.safetensors\"}}";
    std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();

    let cluster = TestCluster::sgd_of(2, 2, |config| config);
    let variables = [vector("w", 3), sparse("embedding", ROWS as u64, 8)];
    let ids: Vec<u64> = (0..ROWS as u64).rev().collect();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut worker = cluster.worker(1);
            let mut params = worker.join(&variables, |_| panic!("only the chief fills")).unwrap();
            let token = worker.token().unwrap().unwrap();
            worker.pull(&token, &mut params).unwrap();
            let mut rows = vec![0.0_f32; 8 * ROWS];
            worker.pull_rows(&token, "embedding", &ids, &mut rows).unwrap();
            (params.view::<f32>("w").unwrap().to_vec(), rows)
        });
        let mut chief = cluster.worker(0);
        let options = LoadOptions::new().rename("embedding", "emb.weight").cast(true);
        chief.join(&variables, |initial| initial.load_with(folder.path(), &options)).unwrap();
        let (w, rows) = other.join().unwrap();
        assert_eq!(w, [7.0, 8.0, 9.0]);
        for (&id, row) in ids.iter().zip(rows.chunks(8)) {
            let expected = (0..8).map(|place| halves(8 * id as usize + place).to_f32());
            assert!(row.iter().copied().eq(expected), "row {id} is {row:?}");
        }
    });
    cluster.stop();
}

/// An export of a sparse variable and a table fills them again, on another number of shards.
#[test]
fn an_export_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let storage = || LocalDirectory::create(folder.path().join("saved")).unwrap();
    let variables = || {
        let table = TableSpec::new(1 << 22).rows_at_once(64);
        let table = VariableSpec::table("table", DType::Bf16, [3], table).unwrap();
        let table = table.partitioner(Partitioner::Fixed { shards: 3 });
        vec![vector("w", 2), sparse("rows", 9, 2), table]
    };
    let ids: Vec<u64> = (0..200_u64).map(|id| id.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let values: Vec<f32> = (0..600).map(|value| value as f32 * 0.25).collect();
    let halves: Vec<_> = values.iter().map(|&x| pushpull::variable::bf16::from_f32(x)).collect();
    let table_of = |cluster: &TestCluster| {
        let mut reader = Reader::connect(cluster.config(0)).unwrap();
        let mut rows = vec![pushpull::variable::bf16::ZERO; 603];
        let all: Vec<u64> = ids.iter().copied().chain([1]).collect();
        reader.pull_rows("table", &all, &mut rows).unwrap();
        rows
    };

    let optimizer = || Adagrad::new(0.5);
    let first = TestCluster::start(1, 1, optimizer(), |config| {
        config.checkpoints(Checkpoints::new(storage()))
    });
    let mut worker = first.worker(0);
    worker.join(&variables(), |_| ()).unwrap();
    for (ids, rows) in ids.chunks(50).zip(halves.chunks(150)) {
        worker.assign_rows("table", ids, rows).unwrap();
    }
    worker.assign_rows("rows", &[8, 0, 4], &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    worker.assign("w", &[0.5_f32, -0.5]).unwrap();
    worker.save(b"").unwrap();
    let numbers: Vec<u64> = (0..9).collect();
    let rows = rows_of(&first, "rows", &numbers, 2);
    let table = table_of(&first);
    assert_eq!(table[..600], halves);
    first.stop();

    let file = folder.path().join("model.safetensors");
    export(Arc::new(storage()), None, &file, false).unwrap();
    let second = TestCluster::start(3, 1, optimizer(), |config| config);
    let mut worker = second.worker(0);
    // The folder has the file under the name that Hugging Face gives it.
    let params = worker.join(&variables(), |initial| initial.load(folder.path())).unwrap();
    assert_eq!(params.view::<f32>("w").unwrap(), [0.5, -0.5]);
    assert_eq!(rows_of(&second, "rows", &numbers, 2), rows);
    assert_eq!(table_of(&second), table);
    let found = second.servers.iter().map(|ps| ps.handle().metrics().table_rows).sum::<u64>();
    assert_eq!(found, 200);
    drop(worker);
    second.stop();
}

/// A chief fails in the middle of its rows, and the next one loads nothing: all rows are initialized,
/// in the partition that had some as well.
#[test]
fn an_interrupted_load_leaves_no_values() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut values = vec![5.0_f32; 12];
    // In the second partition, and not its last row.
    values[8] = f32::NAN;
    write(file.path(), &[("rows", Dtype::F32, &[6, 2], singles(&values))]);
    let cluster = TestCluster::sgd_of(2, 1, |config| config);
    let variables = [sparse("rows", 6, 2)];
    let mut chief = cluster.worker(0);
    let error = chief.join(&variables, |initial| initial.load(file.path())).unwrap_err();
    let Error::NonFinite { variable, element, .. } = &error else { panic!("{error}") };
    assert_eq!((variable.as_str(), *element), ("rows", 8));
    let metrics = cluster.servers.iter().map(|ps| ps.handle().metrics());
    assert_eq!(
        metrics.map(|metrics| metrics.assigns_applied).sum::<u64>(),
        1,
        "some rows are there"
    );
    drop(chief);

    let mut chief = cluster.worker(0);
    chief.join(&variables, |_| ()).unwrap();
    assert_eq!(rows_of(&cluster, "rows", &[0, 1, 2, 3, 4, 5], 2), [1.0; 12]);
    drop(chief);
    cluster.stop();
}

#[test]
fn a_table_without_ids_is_an_error_of_the_join() {
    let file = tempfile::NamedTempFile::new().unwrap();
    write(file.path(), &[("table", Dtype::F32, &[1, 2], singles(&[1.0, 2.0]))]);
    let cluster = TestCluster::sgd(1, |config| config);
    let table = VariableSpec::table("table", DType::F32, [2], TableSpec::new(1 << 20)).unwrap();
    let mut worker = cluster.worker(0);
    let error = worker.join(&[table], |initial| initial.load(file.path())).unwrap_err();
    let Error::Load(LoadError::Ids { tensor, .. }) = &error else { panic!("{error}") };
    assert_eq!(tensor, "table:ids");
    drop(worker);
    cluster.stop();
}
