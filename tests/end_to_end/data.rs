//! A declared data set: every sample of every epoch counts once, in the values and in checkpoints.

use std::path::Path;

use pushpull::blocking::Worker;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::error::DataSetError;
use pushpull::worker::{DataSet, SampleRange};
use pushpull::{Error, PsConfig, Push, Synchronous, VariableSpec};

use crate::cluster::{TestCluster, vector};

const SAMPLES: u64 = 50;

fn data_set() -> DataSet {
    DataSet::new("train", SAMPLES, 4).unwrap().epochs(3)
}

/// How often each sample counts, and a second variable for another shard.
fn variables() -> [VariableSpec; 2] {
    [vector("ledger", SAMPLES), vector("other", 3)]
}

fn worker(cluster: &TestCluster, index: u32) -> Worker {
    let mut worker = Worker::connect(cluster.config(index).data(data_set())).unwrap();
    worker.join(&variables(), |_| ()).unwrap();
    worker
}

fn indices(samples: SampleRange) -> std::ops::Range<usize> {
    let start = samples.start as usize;
    start..start + samples.len as usize
}

/// Trains up to `pushes` times: each sample of a batch adds `weight` to its element of the ledger.
fn train(worker: &mut Worker, weight: f32, pushes: usize) {
    for _ in 0..pushes {
        let Some(token) = worker.token().unwrap() else { return };
        let samples = token.samples().unwrap();
        assert_ne!(token.samples_ahead(), Some(samples));
        let mut gradients = worker.gradients();
        let ledger = gradients.view_mut::<f32>("ledger").unwrap();
        ledger.fill(0.0);
        ledger[indices(samples)].fill(-weight);
        gradients.view_mut::<f32>("other").unwrap().fill(-weight);
        let outcome = worker.push(token, gradients).unwrap();
        assert!(matches!(outcome, Push::Applied { .. } | Push::Accepted { .. }), "{outcome:?}");
    }
}

/// Pulls the ledger as a new worker of a cluster whose data have ended.
fn ledger(cluster: &TestCluster, index: u32) -> Vec<f32> {
    let mut worker = Worker::connect(cluster.config(index).data(data_set())).unwrap();
    let params = worker.join(&variables(), |_| ()).unwrap();
    assert!(worker.token().unwrap().is_none(), "the data have ended");
    params.view::<f32>("ledger").unwrap().to_vec()
}

#[test]
fn every_sample_counts_once_an_epoch_with_workers_that_come_and_go() {
    for ps in [1, 2] {
        let cluster = TestCluster::sgd_of(ps, 4, |config| config);
        let mut first = worker(&cluster, 0);
        train(&mut first, 1.0, 5);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut second = worker(&cluster, 1);
                train(&mut second, 1.0, 3);
                // A batch that nobody trains on goes to the other worker.
                drop(second.token().unwrap());
                train(&mut second, 1.0, 3);
                second.leave().unwrap();
            });
            scope.spawn(|| train(&mut first, 1.0, usize::MAX));
        });
        assert_eq!(ledger(&cluster, 2), [3.0; SAMPLES as usize]);
        let metrics = cluster.handle().metrics();
        assert_eq!((metrics.batches_begun, metrics.batches_unspent), (39, 0));
        cluster.stop();
    }
}

#[test]
fn a_skipped_batch_counts_in_no_other_worker() {
    let cluster = TestCluster::sgd(4, |config| config);
    let mut first = worker(&cluster, 0);
    let token = first.token().unwrap().unwrap();
    let skipped = indices(token.samples().unwrap());
    token.skip();
    train(&mut first, 1.0, usize::MAX);
    let mut expected = [3.0; SAMPLES as usize];
    expected[skipped].fill(2.0);
    assert_eq!(ledger(&cluster, 1), expected);
    assert_eq!(cluster.handle().metrics().batches_skipped, 1);
    cluster.stop();
}

fn checkpointed(directory: &Path) -> impl Fn(PsConfig) -> PsConfig {
    let directory = directory.to_owned();
    move |config| {
        let storage = LocalDirectory::create(&directory).unwrap();
        config.mode(Synchronous::new(2)).checkpoints(Checkpoints::new(storage))
    }
}

#[test]
fn a_restore_goes_back_to_values_and_data_of_one_moment() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let train_both = |cluster: &TestCluster, pushes| {
        std::thread::scope(|scope| {
            let both = [0, 1].map(|index| {
                scope.spawn(move || {
                    let mut worker = worker(cluster, index);
                    // A step is the mean of two gradients.
                    train(&mut worker, 2.0, pushes);
                    worker
                })
            });
            both.map(|worker| worker.join().unwrap())
        })
    };
    let cluster = TestCluster::sgd_of(2, 4, checkpointed(&directory));
    let [mut chief, other] = train_both(&cluster, 7);
    chief.save(b"").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| train(&mut chief, 2.0, 2));
        let mut other = other;
        train(&mut other, 2.0, 2);
    });
    cluster.stop();
    // All state is lost but the checkpoint, and other servers resume from it.
    let cluster = TestCluster::sgd_of(1, 4, checkpointed(&directory));
    let [chief, _other] = train_both(&cluster, usize::MAX);
    assert_eq!(chief.restored().map(|restored| restored.step), Some(7));
    assert_eq!(chief.data_begun().map(|begun| begun.batches >= 14), Some(true));
    let mut found = ledger(&cluster, 2);
    // 39 batches are 19 steps of two and one of one, whose mean is the gradient itself.
    let alone = found.iter().filter(|&&count| count == 4.0).count();
    found.iter_mut().filter(|count| **count == 4.0).for_each(|count| *count = 3.0);
    assert!(alone == 4 || alone == 2, "{alone} samples");
    assert_eq!(found, [3.0; SAMPLES as usize]);
    cluster.stop();
}

#[test]
fn other_data_than_the_declared_are_refused_by_name() {
    let cluster = TestCluster::sgd(4, |config| config);
    let _first = worker(&cluster, 0);
    let join = |set: Option<DataSet>| {
        let config = cluster.config(1);
        let config = set.into_iter().fold(config, |config, set| config.data(set));
        let mut worker = Worker::connect(config).unwrap();
        worker.join(&variables(), |_| ()).and_then(|_| worker.token().map(|_| ()))
    };
    let longer = DataSet::new("train", SAMPLES + 1, 4).unwrap().epochs(3);
    let Err(Error::DataDiffers { differs, .. }) = join(Some(longer)) else { panic!() };
    assert_eq!(differs, "of the declared data set samples is 50, not 51");
    let none = join(None).unwrap_err().to_string();
    assert!(none.contains("has not declared the data set \"train\""), "{none}");
    assert!(matches!(DataSet::new("train", 3, 4), Err(DataSetError::Batch { .. })));
    cluster.stop();
}
