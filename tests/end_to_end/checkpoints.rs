//! Checkpoints of whole clusters: saved, restored into other layouts, and rolled back to.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::checkpoint::{CheckpointStorage, Checkpoints, LocalDirectory, Retention};
use pushpull::checkpoint::{ReadFile, StorageFault, WriteFile, export, list};
use pushpull::cluster::ShardId;
use pushpull::error::{Chain, StartError};
use pushpull::server::Event;
use pushpull::variable::Partitioner;
use pushpull::{
    Adam, ClusterSpec, Error, Params, Ps, PsConfig, Sgd, Storage, Synchronous, TaskId,
    VariableSpec, WorkerConfig,
};
use safetensors::SafeTensors;

use crate::cluster::{LONG, TestCluster, block_on, listen, spec, vector, wait_for_end};
use crate::proxy::Proxy;

const ROWS: u64 = 37;

/// A matrix in `parts` partitions, and two variables in one piece.
fn variables(parts: u32) -> Vec<VariableSpec> {
    let partitioner = Partitioner::Fixed { shards: parts };
    vec![
        VariableSpec::f32("matrix", [ROWS, 11]).unwrap().partitioner(partitioner),
        vector("bias", 5),
        VariableSpec::f32("count", [3]).unwrap().plain(),
    ]
}

fn storage(directory: &Path) -> LocalDirectory {
    LocalDirectory::create(directory).unwrap()
}

fn cluster(ps: usize, directory: &Path) -> TestCluster {
    TestCluster::start(ps, 2, Adam::new(0.25), |config| {
        config.shards(2).checkpoints(Checkpoints::new(storage(directory)))
    })
}

#[test]
fn another_cluster_does_not_start_on_checkpoints_that_one_saves() {
    let folder = tempfile::tempdir().unwrap();
    let first = cluster(1, folder.path());
    let listener = listen();
    let spec = spec([listener.address()], 1);
    let config = PsConfig::new(spec, TaskId::ps(0), Sgd::new(1.0));
    let config = config.checkpoints(Checkpoints::new(storage(folder.path())));
    let error = listener.start(config.clone()).unwrap_err();
    assert!(matches!(error, StartError::CheckpointsInUse { .. }), "{error}");
    let folder = folder.path().display().to_string();
    let text = format!("cannot use {folder}: another cluster saves its checkpoints there");
    assert!(Chain(&error).to_string().ends_with(&text), "{error}");
    first.stop();
    let second = listen().start(config).unwrap();
    second.handle().stop();
    wait_for_end(second).unwrap();
}

/// Trains these steps, each with different gradients.
fn train(worker: &mut Worker, steps: std::ops::Range<u64>) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for name in ["matrix", "bias"] {
            let gradient = gradients.view_mut::<f32>(name).unwrap();
            for (index, value) in gradient.iter_mut().enumerate() {
                *value = ((index as f32 + 1.0) * (step as f32 + 0.5)).sin();
            }
        }
        worker.push(token, gradients).unwrap();
    }
}

fn values(worker: &mut Worker, params: &mut Params) -> Vec<Vec<f32>> {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    ["matrix", "bias", "count"].map(|name| params.view::<f32>(name).unwrap().to_vec()).into()
}

/// Exports the newest checkpoint and returns the bytes of its values and slots by name.
fn exported(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let file = directory.with_extension("safetensors");
    export(Arc::new(storage(directory)), None, &file, true).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
}

#[test]
fn a_checkpoint_fits_any_number_of_partitions_shards_and_tasks() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let first = cluster(2, &directory);
    let mut worker = first.worker(0);
    let mut params = worker.join(&variables(3), |_| ()).unwrap();
    assert!(worker.restored().is_none());
    worker.assign_add("count", &[1.0_f32, 2.0, 3.0]).unwrap();
    train(&mut worker, 0..5);
    let saved = worker.save(b"row 4711").unwrap();
    assert_eq!(saved.step, 5);
    let before = exported(&directory);
    assert_eq!(
        before.keys().collect::<Vec<_>>(),
        ["bias", "bias:m", "bias:v", "count", "matrix", "matrix:m", "matrix:v"]
    );
    train(&mut worker, 5..8);
    let expected = values(&mut worker, &mut params);
    first.stop();
    let listed = list(&storage(&directory)).unwrap().checkpoints;
    assert_eq!((listed[0].global_step, &listed[0].user[..]), (5, &b"row 4711"[..]));

    for (ps, parts, epoch) in [(1, 1, 2), (3, 4, 3)] {
        let other = cluster(ps, &directory);
        let mut worker = other.worker(0);
        let mut params = worker.join(&variables(parts), |_| panic!("already restored")).unwrap();
        let restored = worker.restored().unwrap();
        assert_eq!((restored.step, restored.epoch), (5, epoch));
        // Values and slots have the same bits: another save and further training show it.
        worker.save(b"row 4711").unwrap();
        assert!(exported(&directory) == before, "{ps} tasks, {parts} parts");
        train(&mut worker, 5..8);
        assert!(values(&mut worker, &mut params) == expected, "{ps} tasks, {parts} parts");
        other.stop();
    }
    assert_eq!(list(&storage(&directory)).unwrap().checkpoints.len(), 3);
}

/// A server that keeps its address across restarts but loses its state.
struct ForgetfulServer {
    folder: tempfile::TempDir,
    ps: Option<Ps>,
    events: Arc<Mutex<Vec<Event>>>,
}

impl ForgetfulServer {
    fn start() -> ForgetfulServer {
        let mut server = ForgetfulServer {
            folder: tempfile::tempdir().unwrap(),
            ps: None,
            events: Arc::default(),
        };
        server.restart();
        server
    }

    fn spec(&self) -> pushpull::ClusterSpec {
        spec([format!("unix:{}", self.folder.path().join("ps.sock").display())], 2)
    }

    fn checkpoints(&self) -> std::path::PathBuf {
        self.folder.path().join("checkpoints")
    }

    fn restart(&mut self) {
        if let Some(ps) = self.ps.take() {
            block_on(ps.serve(async {})).unwrap();
        }
        let cluster = self.spec();
        let address = cluster.task_address("ps", 0).unwrap().to_owned();
        let events = self.events.clone();
        let config = PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.25))
            .checkpoints(Checkpoints::new(storage(&self.checkpoints())))
            .on_event(move |event| events.lock().unwrap().push(event.clone()));
        self.ps = Some(block_on(Ps::listen(&address)).unwrap().start(config).unwrap());
    }

    fn worker(&self, index: u32) -> Worker {
        Worker::connect(WorkerConfig::new(self.spec(), TaskId::worker(index))).unwrap()
    }
}

#[test]
fn a_worker_ahead_of_the_restored_checkpoint_gets_a_rollback_error() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let start = || {
        let listener = listen();
        let cluster = spec([listener.address()], 2);
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Adam::new(0.25))
            .checkpoints(Checkpoints::new(storage(&directory)));
        (listener.start(config).unwrap(), cluster)
    };
    let connect = |cluster: &ClusterSpec, index: u32| {
        Worker::connect(WorkerConfig::new(cluster.clone(), TaskId::worker(index))).unwrap()
    };
    let (ps, cluster) = start();
    let proxy_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxied = spec([proxy_listener.local_addr().unwrap().to_string()], 2);
    let proxy = Proxy::start(proxy_listener, ps.handle().address().to_owned(), 0, 1);
    let mut chief = connect(&cluster, 0);
    chief.join(&variables(1), |_| ()).unwrap();
    let mut other = connect(&proxied, 1);
    let mut params = other.join(&variables(1), |_| ()).unwrap();
    train(&mut chief, 0..5);
    chief.save(b"").unwrap();
    train(&mut other, 5..8);
    // The other worker finds no server until the checkpoint is restored.
    proxy.redirect(None);
    drop(chief);
    block_on(ps.serve(async {})).unwrap();
    let (ps, cluster) = start();
    let mut chief = connect(&cluster, 0);
    chief.join(&variables(1), |_| panic!("already restored")).unwrap();
    assert_eq!(chief.restored().unwrap().step, 5);
    proxy.redirect(Some(ps.handle().address().to_owned()));
    // The worker may hold a token from its last answer already; then the pull gets the error.
    let token = other.token();
    let error = token.and_then(|token| other.pull(&token.unwrap(), &mut params)).unwrap_err();
    assert_eq!(error, Error::RolledBack { from_step: 8, to_step: 5 });
    drop(other);
    let mut other = connect(&proxied, 1);
    other.join(&variables(1), |_| ()).unwrap();
    train(&mut other, 5..6);
    assert_eq!(ps.handle().metrics().global_step, 6);
}

#[test]
fn a_worker_that_reconnects_before_the_restore_gets_a_state_lost_error() {
    let mut server = ForgetfulServer::start();
    let mut chief = server.worker(0);
    chief.join(&variables(1), |_| ()).unwrap();
    let mut other = server.worker(1);
    let mut params = other.join(&variables(1), |_| ()).unwrap();
    train(&mut chief, 0..5);
    chief.save(b"").unwrap();
    train(&mut other, 5..8);
    // The chief is gone, so the checkpoint is not restored.
    drop(chief);
    server.restart();
    let token = other.token();
    let error = token.and_then(|token| other.pull(&token.unwrap(), &mut params)).unwrap_err();
    assert_eq!(error, Error::StateLost { shard: ShardId { task: 0, shard: 0 } });
    // A new worker waits for the chief, and both continue from the checkpoint.
    drop(other);
    let mut other = server.worker(1);
    let mut chief = server.worker(0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.join(&variables(1), |_| ()).map(|_| ()));
        chief.join(&variables(1), |_| panic!("already restored")).unwrap();
        waiting.join().unwrap().unwrap();
    });
    train(&mut other, 5..6);
    assert_eq!(server.ps.as_ref().unwrap().handle().metrics().global_step, 6);
}

#[test]
fn a_damaged_checkpoint_is_passed_over_for_an_older_one() {
    let mut server = ForgetfulServer::start();
    let mut chief = server.worker(0);
    chief.join(&variables(1), |_| ()).unwrap();
    for steps in [0..2, 2..4] {
        train(&mut chief, steps);
        chief.save(b"").unwrap();
    }
    let newest = server.checkpoints().join("ckpt-1-4/shard-0-0.safetensors");
    let mut bytes = std::fs::read(&newest).unwrap();
    let last = bytes.len() - 9;
    bytes[last] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    server.restart();
    drop(chief);
    let mut chief = server.worker(0);
    chief.join(&variables(1), |_| ()).unwrap();
    let restored = chief.restored().unwrap();
    assert_eq!(restored.step, 2);
    let [passed_over] = &restored.passed_over[..] else { panic!("{restored:?}") };
    assert_eq!(passed_over.checkpoint, "ckpt-1-4");
    assert!(passed_over.cause.contains("shard-0-0.safetensors"), "{restored:?}");
    let handle = server.ps.as_ref().unwrap().handle();
    assert_eq!(handle.metrics().checkpoints_passed_over, 1);
    let mut events = server.events.lock().unwrap();
    events.retain(|event| event.kind() == "checkpoint-passed-over");
    let [Event::CheckpointPassedOver { checkpoint, cause, taken, .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((&**checkpoint, taken.as_deref()), ("ckpt-1-4", Some("ckpt-1-2")));
    assert!(cause.contains("shard-0-0.safetensors"), "{cause}");
}

#[test]
fn one_server_without_state_takes_all_back_to_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let addresses: Vec<String> =
        (0..2).map(|i| format!("unix:{}/{i}.sock", folder.path().display())).collect();
    let cluster = spec(addresses.clone(), 1);
    let start = |index: u32| {
        let state = folder.path().join(format!("state-{index}"));
        let storage_of_state = Storage::directory(state).bytes_max(1 << 26);
        let config = PsConfig::new(cluster.clone(), TaskId::ps(index), Adam::new(0.25))
            .storage(storage_of_state)
            .checkpoints(Checkpoints::new(storage(&folder.path().join("checkpoints"))));
        let listener = block_on(Ps::listen(&addresses[index as usize])).unwrap();
        listener.start(config).unwrap()
    };
    let mut servers = vec![start(0), start(1)];
    let connect = || Worker::connect(WorkerConfig::new(cluster.clone(), TaskId::worker(0)));
    let mut chief = connect().unwrap();
    let mut params = chief.join(&variables(2), |_| ()).unwrap();
    train(&mut chief, 0..3);
    let expected = values(&mut chief, &mut params);
    chief.save(b"").unwrap();
    train(&mut chief, 3..5);
    drop(chief);
    // One server loses its state, the other keeps running.
    block_on(servers.remove(1).serve(async {})).unwrap();
    std::fs::remove_dir_all(folder.path().join("state-1")).unwrap();
    servers.push(start(1));
    let mut chief = connect().unwrap();
    let mut params = chief.join(&variables(2), |_| panic!("already restored")).unwrap();
    let restored = chief.restored().unwrap();
    assert_eq!((restored.step, restored.epoch), (3, 2));
    assert!(values(&mut chief, &mut params) == expected, "both are at the checkpoint's step");
    for server in servers {
        block_on(server.serve(async {})).unwrap();
    }
}

/// One of two servers loses its state, and the other lives, with the values of step 5 in part. No
/// worker may go on with values of step 3 as if nothing had happened.
#[test]
fn a_state_lost_by_one_of_two_servers_is_told_to_every_worker() {
    let folder = tempfile::tempdir().unwrap();
    let addresses: Vec<String> =
        (0..2).map(|i| format!("unix:{}/{i}.sock", folder.path().display())).collect();
    let cluster = spec(addresses.clone(), 3);
    let start = |index: u32| {
        let config = PsConfig::new(cluster.clone(), TaskId::ps(index), Adam::new(0.25))
            .checkpoints(Checkpoints::new(storage(&folder.path().join("checkpoints"))));
        block_on(Ps::listen(&addresses[index as usize])).unwrap().start(config).unwrap()
    };
    let lives = start(0);
    let forgets = start(1);
    let connect =
        |index| Worker::connect(WorkerConfig::new(cluster.clone(), TaskId::worker(index))).unwrap();
    let mut workers: Vec<(Worker, Params)> = (0..3)
        .map(|index| {
            let mut worker = connect(index);
            let params = worker.join(&variables(2), |_| ()).unwrap();
            (worker, params)
        })
        .collect();
    train(&mut workers[0].0, 0..3);
    workers[0].0.save(b"").unwrap();
    train(&mut workers[0].0, 3..5);
    let mut seen = Vec::new();
    for (worker, params) in &mut workers {
        seen = values(worker, params);
    }
    // A worker reads until it is told. What it reads meanwhile is what it has seen before.
    let told = |(worker, params): &mut (Worker, Params)| loop {
        let token = worker.token();
        match token.and_then(|token| worker.pull(&token.unwrap(), params)) {
            Ok(_) => {
                let found =
                    ["matrix", "bias", "count"].map(|name| params.view::<f32>(name).unwrap());
                assert!(found.iter().zip(&seen).all(|(found, seen)| found == seen), "lower values");
            }
            Err(error) => return error,
        }
    };
    block_on(forgets.serve(async {})).unwrap();
    let forgets = start(1);
    let lost = Error::StateLost { shard: ShardId { task: 1, shard: 0 } };
    let back = Error::RolledBack { from_step: 5, to_step: 3 };
    // The last worker asks only after the restore.
    let mut late = workers.pop().unwrap();
    for (index, worker) in workers.iter_mut().enumerate() {
        assert_eq!(told(worker), lost, "worker {index}");
    }
    drop(workers);
    let mut chief = connect(0);
    chief.join(&variables(2), |_| panic!("already restored")).unwrap();
    let restored = chief.restored().unwrap();
    assert_eq!((restored.step, restored.epoch), (3, 2));
    let error = told(&mut late);
    assert!(error == lost || error == back, "{error:?}");
    drop(late);
    // With another session each of them goes on.
    let mut late = connect(2);
    let mut params = late.join(&variables(2), |_| ()).unwrap();
    let mut of_chief = params.clone();
    train(&mut late, 3..5);
    assert!(values(&mut late, &mut params) == seen, "the steps are made again");
    assert!(values(&mut chief, &mut of_chief) == seen);
    for server in [lives, forgets] {
        block_on(server.serve(async {})).unwrap();
    }
}

/// Starts a server with automatic saves every 30 ms, and its worker.
fn auto_saving(directory: &Path) -> (TestCluster, Worker) {
    let every = Duration::from_millis(30);
    let cluster = TestCluster::start(1, 1, Adam::new(0.25), |config| {
        config.checkpoints(Checkpoints::new(storage(directory)).every(every))
    });
    let mut worker = cluster.worker(0);
    worker.join(&variables(1), |_| ()).unwrap();
    (cluster, worker)
}

/// Waits until the server has saved more than `saved` checkpoints.
fn wait_for_more_than(saved: u64, cluster: &TestCluster) {
    let since = Instant::now();
    while cluster.handle().metrics().checkpoints_saved <= saved {
        assert!(since.elapsed() < LONG, "no checkpoint was saved");
        std::thread::yield_now();
    }
}

#[test]
fn automatic_saves_are_made_only_after_new_steps() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let (cluster, mut worker) = auto_saving(&directory);
    // A second cluster with the same period is the clock: it has a new step to save in each.
    let (clock, mut ticking) = auto_saving(&folder.path().join("clock"));
    let periods = |worker: &mut Worker| {
        for period in 0..5 {
            let saved = clock.handle().metrics().checkpoints_saved;
            train(worker, period..period + 1);
            wait_for_more_than(saved, &clock);
        }
    };
    let names = || {
        let listed = list(&storage(&directory)).unwrap().checkpoints;
        listed.into_iter().map(|checkpoint| checkpoint.name).collect::<Vec<_>>()
    };
    train(&mut worker, 0..1);
    wait_for_more_than(0, &cluster);
    periods(&mut ticking);
    assert_eq!(
        (cluster.handle().metrics().checkpoints_saved, names()),
        (1, vec!["ckpt-1-1".into()])
    );
    // An explicit save repeats a saved step. Automatic saves then skip the step as well.
    let name = block_on(cluster.handle().save(b"by hand")).unwrap();
    assert_eq!((&*name, names()), ("ckpt-1-1.1", vec![name.clone()]));
    train(&mut worker, 1..2);
    let by_hand = block_on(cluster.handle().save(b"by hand")).unwrap();
    let saved = cluster.handle().metrics().checkpoints_saved;
    periods(&mut ticking);
    assert_eq!(cluster.handle().metrics().checkpoints_saved, saved);
    let newest = list(&storage(&directory)).unwrap().checkpoints.remove(0);
    assert_eq!((newest.name, &newest.user[..]), (by_hand, &b"by hand"[..]));
    cluster.stop();
    clock.stop();
}

/// The clock would overflow at the first of these periods, and not at the second.
#[test]
fn a_period_that_does_not_pass_saves_nothing_and_delays_no_stop() {
    let folder = tempfile::tempdir().unwrap();
    let (clock, mut ticking) = auto_saving(&folder.path().join("clock"));
    for (run, never) in [Duration::MAX, Duration::from_secs(1 << 62)].into_iter().enumerate() {
        let directory = folder.path().join(run.to_string());
        let cluster = TestCluster::start(1, 1, Adam::new(0.25), |config| {
            config.checkpoints(Checkpoints::new(storage(&directory)).every(never))
        });
        let mut worker = cluster.worker(0);
        worker.join(&variables(1), |_| ()).unwrap();
        train(&mut worker, 0..2);
        for step in 0..3 {
            let saved = clock.handle().metrics().checkpoints_saved;
            train(&mut ticking, step..step + 1);
            wait_for_more_than(saved, &clock);
        }
        let counts = cluster.handle().metrics();
        assert_eq!((counts.checkpoints_saved, counts.saves_failed_in_a_row), (0, 0), "{never:?}");
        assert_eq!(block_on(cluster.handle().save(b"")).unwrap(), "ckpt-1-2");
        train(&mut worker, 2..3);
        cluster.stop();
    }
    clock.stop();
}

#[test]
fn failing_automatic_saves_are_reported_until_the_directory_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let state = folder.path().join("state");
    let events = Arc::new(Mutex::new(Vec::new()));
    let cluster = TestCluster::start(1, 1, Adam::new(0.25), |config| {
        let every = Duration::from_millis(30);
        let sink = events.clone();
        let state = Storage::directory(state.clone()).bytes_max(1 << 26);
        config
            .storage(state)
            .checkpoints(Checkpoints::new(storage(&directory)).every(every))
            .on_event(move |event| sink.lock().unwrap().push(event.clone()))
    });
    let mut worker = cluster.worker(0);
    worker.join(&variables(1), |_| ()).unwrap();
    train(&mut worker, 0..1);
    wait_for_more_than(0, &cluster);
    assert_eq!(cluster.handle().saves().failed_in_a_row, 0);
    // A file replaces the directory. Permissions would not stop a test that runs as root.
    std::fs::remove_dir_all(&directory).unwrap();
    std::fs::write(&directory, "no directory").unwrap();
    train(&mut worker, 1..2);
    let since = Instant::now();
    while cluster.handle().metrics().saves_failed_in_a_row < 2 {
        assert!(since.elapsed() < LONG, "no save failed");
        std::thread::yield_now();
    }
    let saves = cluster.handle().saves();
    assert_eq!(saves.newest.as_deref(), Some("ckpt-1-1"));
    assert!(saves.since_success.is_some() && saves.failed_in_a_row >= 2, "{saves:?}");
    let cause = saves.last_error.unwrap();
    assert!(cause.contains(&directory.display().to_string()), "{cause}");
    let noted = pushpull::inspect(&state).unwrap().saves_failing.unwrap();
    assert!(noted.in_a_row >= 2 && noted.cause == cause, "{noted:?}");
    // Once the file is gone, the server creates the directory again without a restart.
    std::fs::remove_file(&directory).unwrap();
    let saved = cluster.handle().metrics().checkpoints_saved;
    wait_for_more_than(saved, &cluster);
    assert_eq!(cluster.handle().saves().failed_in_a_row, 0);
    cluster.stop();
    assert_eq!(pushpull::inspect(&state).unwrap().saves_failing, None);
    let names: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["ckpt-1-2"]);
    let mut kinds: Vec<&str> = events.lock().unwrap().iter().map(Event::kind).collect();
    kinds.retain(|kind| kind.starts_with("save"));
    assert!(kinds.starts_with(&["save-failed", "save-failed"]), "{kinds:?}");
    assert_eq!(kinds.last(), Some(&"saves-resumed"), "{kinds:?}");
}

/// Saves checkpoints while two replicas train over two ps tasks without a pause. Each element
/// equals the number of steps that its shard has applied.
#[test]
fn synchronous_checkpoints_hold_one_step_on_all_shards() {
    const SAVES: usize = 12;
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| {
        config.mode(Synchronous::new(2)).checkpoints(Checkpoints::new(storage(&directory)))
    });
    let variables = [vector("a", 9_000), vector("b", 20_000)];
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for index in 0..2 {
            let cluster = &cluster;
            let variables = &variables;
            let over = &over;
            scope.spawn(move || {
                let mut worker = cluster.worker(index);
                worker.join(variables, |_| ()).unwrap();
                while !over.load(Ordering::Relaxed) {
                    let token = worker.token().unwrap().unwrap();
                    let mut gradients = worker.gradients();
                    for name in ["a", "b"] {
                        gradients.view_mut::<f32>(name).unwrap().fill(-1.0);
                    }
                    worker.push(token, gradients).unwrap();
                }
                worker.leave().unwrap();
            });
        }
        let since = Instant::now();
        while cluster.handle().metrics().steps_applied == 0 {
            assert!(since.elapsed() < LONG, "no step was applied");
            std::thread::yield_now();
        }
        let mut steps = Vec::new();
        for _ in 0..SAVES {
            block_on(cluster.handle().save(b"")).unwrap();
            let newest = list(&storage(&directory)).unwrap().checkpoints.remove(0);
            for (name, bytes) in exported(&directory) {
                let step = newest.global_step as f32;
                let mut values = bytes.chunks_exact(4);
                assert!(values.all(|value| value == step.to_le_bytes()), "{name} of step {step}");
            }
            steps.push(newest.global_step);
        }
        over.store(true, Ordering::Relaxed);
        assert!(steps.is_sorted() && steps[0] < steps[SAVES - 1], "training continues: {steps:?}");
    });
    cluster.stop();
}

/// A directory of checkpoints with faults for tests.
#[derive(Clone, Debug)]
struct FaultyStorage {
    directory: Arc<LocalDirectory>,
    /// Whether the deletion of a published checkpoint fails.
    refuses_deletion: bool,
    /// The gate at which reads of shard files wait.
    gate: Option<SaveGate>,
}

/// Holds reads back until the test admits them, and counts them.
type SaveGate = Arc<(Mutex<SaveGateState>, Condvar)>;

#[derive(Debug, Default)]
struct SaveGateState {
    reads: usize,
    reads_admitted: usize,
    /// Number of files that may still be opened without the gate.
    opens_ungated: usize,
}

impl FaultyStorage {
    fn new(directory: &Path) -> FaultyStorage {
        FaultyStorage {
            directory: Arc::new(storage(directory)),
            refuses_deletion: false,
            gate: None,
        }
    }
}

/// A file whose reads wait at a gate.
#[derive(Debug)]
struct SlowFile {
    gate: SaveGate,
    file: Box<dyn ReadFile>,
}

impl ReadFile for SlowFile {
    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        let mut state = self.gate.0.lock().unwrap();
        state.reads += 1;
        let number = state.reads;
        self.gate.1.notify_all();
        drop(wait(&self.gate, state, |state| state.reads_admitted < number));
        self.file.read(offset, out)
    }
}

fn wait<'a>(
    gate: &'a SaveGate,
    state: MutexGuard<'a, SaveGateState>,
    on: impl Fn(&SaveGateState) -> bool,
) -> MutexGuard<'a, SaveGateState> {
    let (state, timeout) = gate.1.wait_timeout_while(state, LONG, |state| on(state)).unwrap();
    assert!(!timeout.timed_out(), "timed out at the gate: {state:?}");
    state
}

impl CheckpointStorage for FaultyStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        self.directory.list(folder)
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.directory.create_folder(folder)
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        self.directory.create(folder, file)
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let opened = self.directory.open(folder, file)?;
        Ok(match &self.gate {
            Some(gate) if file.starts_with("shard-") => {
                let mut state = gate.0.lock().unwrap();
                if state.opens_ungated > 0 {
                    state.opens_ungated -= 1;
                    return Ok(opened);
                }
                Box::new(SlowFile { gate: gate.clone(), file: opened })
            }
            _ => opened,
        })
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        if self.refuses_deletion && to.ends_with(".tmp") {
            let refused = std::io::ErrorKind::PermissionDenied.into();
            return Err(StorageFault::new("rename", from, refused));
        }
        self.directory.rename_folder(from, to)
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        self.directory.remove_folder(folder)
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        self.directory.sync(folder)
    }
}

#[test]
fn a_save_succeeds_although_older_checkpoints_cannot_be_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = TestCluster::start(1, 1, Adam::new(0.25), |config| {
        let mut retention = Retention::default();
        retention.max_to_keep = 1;
        let checkpoints = Checkpoints::new(FaultyStorage {
            refuses_deletion: true,
            ..FaultyStorage::new(&directory)
        });
        config.checkpoints(checkpoints.retention(retention))
    });
    let mut worker = cluster.worker(0);
    worker.join(&variables(1), |_| ()).unwrap();
    for step in 0..2 {
        train(&mut worker, step..step + 1);
        assert_eq!(worker.save(b"").unwrap().step, step + 1);
    }
    let metrics = cluster.handle().metrics();
    assert_eq!((metrics.checkpoints_saved, metrics.retentions_failed), (2, 1));
    assert_eq!(metrics.saves_failed, 0);
    assert_eq!(list(&storage(&directory)).unwrap().checkpoints.len(), 2);
    cluster.stop();
}

#[test]
fn a_stopping_server_finishes_only_the_current_piece_of_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let gate = SaveGate::default();
    let faulty = FaultyStorage {
        gate: Some(gate.clone()),
        ..FaultyStorage::new(&folder.path().join("checkpoints"))
    };
    let cluster = TestCluster::start(1, 1, Adam::new(0.25), |config| {
        config.checkpoints(Checkpoints::new(faulty.clone()))
    });
    let mut worker = cluster.worker(0);
    // Several pieces of 1 MiB.
    worker.join(&[vector("w", 1 << 20)], |_| ()).unwrap();
    let mut reader = Reader::connect(cluster.config(0).timeout(Duration::from_secs(1))).unwrap();
    let mut params = reader.params();
    reader.pull(&mut params).unwrap();
    let handle = cluster.handle();
    let saving = std::thread::spawn(move || block_on(handle.save(b"")));
    drop(wait(&gate, gate.0.lock().unwrap(), |state| state.reads == 0));
    cluster.handle().stop();
    // The connections end when the shard has received the stop.
    let since = Instant::now();
    while reader.pull(&mut params).is_ok() {
        assert!(since.elapsed() < LONG, "the server did not stop");
    }
    gate.0.lock().unwrap().reads_admitted = 1;
    gate.1.notify_all();
    cluster.stop();
    assert!(saving.join().unwrap().is_err());
    assert_eq!(gate.0.lock().unwrap().reads, 1, "no second piece may be read");
}

#[test]
fn a_stopping_server_abandons_a_restore() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let variables = || [vector("w", 1 << 20)];
    let first = TestCluster::start(1, 1, Adam::new(0.25), |config| {
        config.checkpoints(Checkpoints::new(storage(&directory)))
    });
    let mut worker = first.worker(0);
    worker.join(&variables(), |_| ()).unwrap();
    worker.save(b"").unwrap();
    first.stop();

    // The file is read once to select the checkpoint, and again to restore it.
    let gate = SaveGate::default();
    gate.0.lock().unwrap().opens_ungated = 1;
    let faulty = FaultyStorage { gate: Some(gate.clone()), ..FaultyStorage::new(&directory) };
    let cluster = TestCluster::start(1, 1, Adam::new(0.25), |config| {
        config.checkpoints(Checkpoints::new(faulty.clone()))
    });
    let proxy_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxied = spec([proxy_listener.local_addr().unwrap().to_string()], 1);
    let proxy = Proxy::start(proxy_listener, cluster.handle().address().to_owned(), 0, 1);
    // This bounds the wait for the stopped server at the end of the test.
    let config =
        WorkerConfig::new(proxied, TaskId::worker(0)).connect_timeout(Duration::from_secs(10));
    let mut chief = Worker::connect(config).unwrap();
    let joining = std::thread::spawn(move || {
        let joined = chief.join(&variables(), |_| panic!("already restored")).map(|_| ());
        (chief, joined)
    });
    drop(wait(&gate, gate.0.lock().unwrap(), |state| state.reads == 0));
    cluster.handle().stop();
    // The connections end when the shard has received the stop.
    let since = Instant::now();
    while !proxy.has_ended_connection() {
        assert!(since.elapsed() < LONG, "the server did not stop");
        std::thread::yield_now();
    }
    gate.0.lock().unwrap().reads_admitted = 1;
    gate.1.notify_all();
    cluster.stop();
    assert_eq!(gate.0.lock().unwrap().reads, 1, "no second piece may be read");
    assert!(joining.join().unwrap().1.is_err());
}

/// Python script that reads a safetensors file. It prints name, shape, type and sum of each tensor.
const PYTHON: &str = r"
import sys
from safetensors.numpy import load_file
for name, tensor in sorted(load_file(sys.argv[1]).items()):
    print(name, list(tensor.shape), tensor.dtype, float(tensor.sum(dtype='float64')))
";

#[test]
fn the_tool_exports_for_other_programs_and_inspects_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = cluster(2, &directory);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&variables(3), |_| ()).unwrap();
    train(&mut worker, 0..3);
    worker.assign_add("count", &[1.0_f32, 2.0, 3.0]).unwrap();
    worker.save(b"").unwrap();
    let expected = values(&mut worker, &mut params);
    cluster.stop();

    let tool = |arguments: &[&str]| {
        let tool =
            std::process::Command::new(env!("CARGO_BIN_EXE_pushpull")).args(arguments).output();
        tool.unwrap()
    };
    let from = directory.to_str().unwrap();
    let to = folder.path().join("model.safetensors");
    let exported = tool(&["export", from, "--to", to.to_str().unwrap()]);
    assert!(exported.status.success(), "{exported:?}");
    let bytes = std::fs::read(&to).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("matrix").unwrap().shape(), [ROWS as usize, 11]);
    for (name, expected) in ["matrix", "bias", "count"].iter().zip(&expected) {
        let found: Vec<f32> = tensors
            .tensor(name)
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(&found, expected);
    }
    let python = std::process::Command::new("python3").arg("-c").arg(PYTHON).arg(&to).output();
    match python {
        Ok(python) if python.status.success() => {
            let said = String::from_utf8(python.stdout).unwrap();
            let lines: Vec<&str> = said.lines().collect();
            assert!(lines[1].starts_with("count [3] float32 6.0"), "{said}");
            assert!(lines[2].starts_with("matrix [37, 11] float32"), "{said}");
        }
        _ => println!("SKIPPED: cannot read the export without Python's safetensors and numpy"),
    }

    let inspected = tool(&["inspect", from, "--json"]);
    assert!(inspected.status.success(), "{inspected:?}");
    let found: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    let checkpoint = &found["checkpoints"][0];
    assert_eq!((&checkpoint["step"], &checkpoint["sound"]), (&3.into(), &true.into()));
    assert_eq!(checkpoint["variables"][0]["name"], "matrix");
    // One damaged byte fails the inspection.
    let file = directory.join("ckpt-1-3/shard-1-0.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let inspected = tool(&["inspect", from]);
    let page = String::from_utf8(inspected.stdout).unwrap();
    assert!(!inspected.status.success() && page.contains("shard-1-0.safetensors"), "{page}");
}

/// Directories that a server refuses: their group may write, or they belong to another user.
#[test]
fn the_tool_reads_checkpoints_of_a_group_and_of_another_user() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = cluster(1, &directory);
    let mut worker = cluster.worker(0);
    worker.join(&variables(1), |_| ()).unwrap();
    train(&mut worker, 0..2);
    worker.save(b"").unwrap();
    cluster.stop();
    let check = |of: &str| {
        let refused = Chain(&LocalDirectory::open(&directory).unwrap_err()).to_string();
        assert!(refused.contains(of), "{refused}");
        let from = directory.to_str().unwrap();
        let to = folder.path().join("model.safetensors");
        for arguments in [&["inspect", from][..], &["export", from, "--to", to.to_str().unwrap()]] {
            let mut tool = std::process::Command::new(env!("CARGO_BIN_EXE_pushpull"));
            let read = tool.args(arguments).output().unwrap();
            assert!(read.status.success(), "{of}: {read:?}");
        }
        std::fs::remove_file(to).unwrap();
    };
    std::fs::set_permissions(&directory, Permissions::from_mode(0o770)).unwrap();
    check("mode 770");
    std::fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can give a directory to another user");
        return;
    }
    chown(&directory, Some(65_534), None).unwrap();
    check("65534");
}
