//! Panics in functions of the user. Each ends what runs it, with its message, and a caller that waits
//! hears so at once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pushpull::blocking::Worker;
use pushpull::checkpoint::{
    CheckpointStorage, Checkpoints, LocalDirectory, ReadFile, StorageFault, WriteFile,
};
use pushpull::error::ServeError;
use pushpull::optim::{ApplyAt, Optimizer, OptimizerSlot, Run};
use pushpull::{Error, Ps, Sgd, Synchronous};

use super::cluster::{LONG, TestCluster, vector, wait_for_end};

const BUG: &str = "a bug of the user";

#[derive(Clone, Debug)]
struct FaultyRule;

impl Optimizer for FaultyRule {
    fn kind(&self) -> &'static str {
        "faulty"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &[]
    }

    fn apply_f32(&self, _: ApplyAt, _: Run<'_, f32>) {
        panic!("{BUG}");
    }

    fn apply_f64(&self, _: ApplyAt, _: Run<'_, f64>) {
        panic!("{BUG}");
    }
}

fn push(worker: &mut Worker) -> Result<(), Error> {
    let token = worker.token()?.expect("the training goes on");
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("a").unwrap().fill(1.0);
    gradients.view_mut::<f32>("b").unwrap().fill(1.0);
    worker.push(token, gradients).map(|_| ())
}

/// The server has ended by the panic, and says so.
fn assert_panicked(server: Ps) {
    let error = wait_for_end(server).unwrap_err();
    assert!(matches!(&error, ServeError::Panicked { panic, .. } if panic == BUG), "{error}");
}

#[test]
fn a_panic_in_a_rule_ends_the_server_in_every_mode() {
    // Small variables are changed in place as soon as a push is whole, large ones in slices of a
    // job, and synchronous steps once they are committed.
    for (elements, shards, synchronous) in
        [(4, 1, false), (100_000, 1, false), (4, 2, false), (4, 1, true), (100_000, 2, true)]
    {
        let mut cluster = TestCluster::start(1, 2, FaultyRule, |config| {
            let config = config.shards(shards);
            if synchronous { config.mode(Synchronous::new(1)) } else { config }
        });
        let variables = [vector("a", elements), vector("b", elements)];
        // Without the goodbye these waits would last for a minute.
        let mut workers = [0, 1].map(|index| {
            let mut worker = Worker::connect(cluster.config(index).timeout(LONG)).unwrap();
            worker.join(&variables, |_| ()).unwrap();
            worker
        });
        let [first, second] = &mut workers;
        // A synchronous gradient is accepted before it is applied.
        let error = push(first).and_then(|()| push(first)).unwrap_err();
        let case = format!("{elements} {shards} {synchronous}");
        assert!(matches!(error, Error::ServerStopped { .. }), "{case}: {error}");
        let error = push(second).and_then(|()| push(second)).unwrap_err();
        assert!(matches!(error, Error::ServerStopped { .. }), "{case}: {error}");
        assert_panicked(cluster.servers.remove(0));
    }
}

#[test]
fn a_panic_in_on_event_ends_the_server() {
    let mut cluster = TestCluster::sgd(2, |config| {
        config.on_event(|event| assert!(event.kind() != "worker-left", "{BUG}"))
    });
    let variables = [vector("a", 4), vector("b", 4)];
    let mut workers = [0, 1].map(|index| cluster.worker(index));
    workers.iter_mut().for_each(|worker| _ = worker.join(&variables, |_| ()).unwrap());
    let [mut stays, leaves] = workers;
    // The answer may be lost with the server.
    _ = leaves.leave();
    while let Ok(()) = push(&mut stays) {}
    assert_panicked(cluster.servers.remove(0));
}

/// A directory in which no file can be created without a panic.
struct FaultyStorage(LocalDirectory);

impl fmt::Debug for FaultyStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyStorage")
    }
}

impl CheckpointStorage for FaultyStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        self.0.list(folder)
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.0.create_folder(folder)
    }

    fn create(&self, _: &str, _: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        panic!("{BUG}");
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        self.0.open(folder, file)
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        self.0.rename_folder(from, to)
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.0.remove_folder(folder)
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        self.0.sync(folder)
    }
}

#[test]
fn a_panic_in_a_checkpoint_storage_ends_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let directory = Arc::new(folder.path().join("checkpoints"));
    let mut cluster = TestCluster::sgd(1, |config| {
        let storage = FaultyStorage(LocalDirectory::create(&*directory).unwrap());
        config.checkpoints(Checkpoints::new(storage))
    });
    let mut chief = cluster.worker(0);
    chief.join(&[vector("a", 4), vector("b", 4)], |_| ()).unwrap();
    let error = chief.save(b"").unwrap_err();
    assert!(matches!(error, Error::ServerStopped { .. }), "{error}");
    assert_panicked(cluster.servers.remove(0));
}

#[test]
fn a_panic_in_a_function_of_a_worker_is_the_error_of_its_operation() {
    let cluster = TestCluster::start(1, 1, Sgd::new(1.0), |config| config);
    let mut worker = cluster.worker(0);
    let error = worker.join(&[vector("a", 4)], |_| panic!("{BUG}")).unwrap_err();
    let Error::Panicked { callback: "the function that sets first values", message } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(message, BUG);
    drop(worker);
    let config = cluster.config(0);
    cluster.stop();
    // Nobody listens any more, so the wait is reported.
    let config = config.on_progress(Duration::from_millis(20), |_| panic!("{BUG}"));
    let error = Worker::connect(config).unwrap_err();
    let Error::Panicked { callback: "on_progress", message } = &error else { panic!("{error}") };
    assert_eq!(message, BUG);
}
