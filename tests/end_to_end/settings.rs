//! Settings that contradict each other: refused with both values, or reported.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use pushpull::blocking::{TrainingSession, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::error::DataError;
use pushpull::protocol::Refusal;
use pushpull::training::TrainingConfig;
use pushpull::training::data::{GrantedBatches, Pipeline, SliceSource};
use pushpull::{
    Adam, ClusterSpec, Error, Ps, PsConfig, Storage, Synchronous, TaskId, WorkerConfig,
};

use super::cluster::{LONG, TestCluster, listen, spec, vector};

/// Starts ps tasks of these settings. Their events arrive at the receiver.
fn serve(
    configure: &[&dyn Fn(PsConfig) -> PsConfig],
    rules: &[Adam],
) -> (Vec<Ps>, ClusterSpec, Receiver<String>) {
    let listeners: Vec<_> = configure.iter().map(|_| listen()).collect();
    let cluster = spec(listeners.iter().map(|listener| listener.address()), 2);
    let (sender, events) = channel();
    let started = listeners.into_iter().zip(configure).zip(rules).zip(0..).map(
        |(((listener, configure), rule), task)| {
            let sender = Mutex::new(sender.clone());
            let config = PsConfig::new(cluster.clone(), TaskId::ps(task), rule.clone());
            let config = configure(config).on_event(move |event| {
                let _ = sender.lock().unwrap().send(event.to_string());
            });
            listener.start(config).unwrap()
        },
    );
    (started.collect(), cluster, events)
}

/// Waits for an event with all these words.
fn await_event(events: &Receiver<String>, words: &[&str]) {
    loop {
        let event = events.recv_timeout(LONG).unwrap_or_else(|_| panic!("no event has {words:?}"));
        if words.iter().all(|word| event.contains(word)) {
            return;
        }
    }
}

#[test]
fn servers_with_another_hyperparameter_or_schedule_are_refused_with_both_values() {
    let others =
        [(Adam::new(0.01), "Constant(0.01)"), (Adam::new(0.001).betas(0.8, 0.999), "beta1: 0.8")];
    for (other, value) in others {
        let same = |config: PsConfig| config;
        let (servers, cluster, events) = serve(&[&same, &same], &[Adam::new(0.001), other]);
        let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
        let error = worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap_err();
        let Error::Identity { field, left_value, right_value, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(field, "rules");
        assert!(left_value.contains("Constant(0.001)") && right_value.contains(value), "{error}");
        let refused =
            "/job:ps/task:1/shard:0 has no connection to the step owner: it refuses this task";
        await_event(&events, &[refused, value]);
        drop(servers);
    }
}

#[test]
fn servers_with_another_lease_or_last_step_are_refused_by_name() {
    let same = |config: PsConfig| config;
    let steps = |config: PsConfig| config.last_step(7);
    let lease = |config: PsConfig| config.lease(Duration::from_millis(4000));
    type Change<'a> = &'a dyn Fn(PsConfig) -> PsConfig;
    let others: [(Change<'_>, [&str; 3]); 2] =
        [(&steps, ["last_step", "none", "7"]), (&lease, ["lease_ms", "5000", "4000"])];
    for (other, [name, here, there]) in others {
        let rules = [Adam::new(0.1), Adam::new(0.1)];
        let (servers, cluster, events) = serve(&[&same, other], &rules);
        let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
        let error = worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap_err();
        let Error::Identity { field, left_value, right_value, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!([field, left_value, right_value], [name, here, there]);
        let refused = "it refuses this task";
        await_event(&events, &["/job:ps/task:1/shard:0", refused, name, there]);
        drop(servers);
    }
}

#[test]
fn servers_of_which_only_some_save_checkpoints_report_it() {
    let directory = tempfile::tempdir().unwrap();
    let saves = |config: PsConfig| {
        config.checkpoints(Checkpoints::new(LocalDirectory::create(directory.path()).unwrap()))
    };
    let same = |config: PsConfig| config;
    let (servers, cluster, events) = serve(&[&saves, &same], &[Adam::new(0.1), Adam::new(0.1)]);
    await_event(&events, &["checkpoints is \"configured\"", "\"none\" on /job:ps/task:1"]);
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap();
    let error = worker.save(b"").unwrap_err();
    let expected =
        "has not saved its part: no place for checkpoints is configured (--checkpoint-dir)";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(error.to_string().contains("/job:ps/task:1/shard:0 at "), "{error}");
    drop(servers);
}

#[test]
fn a_save_ends_if_the_servers_have_different_directories() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [first, second] = folders.each_ref().map(|folder| {
        move |config: PsConfig| {
            config.checkpoints(Checkpoints::new(LocalDirectory::create(folder.path()).unwrap()))
        }
    });
    let (servers, cluster, _) = serve(&[&first, &second], &[Adam::new(0.1), Adam::new(0.1)]);
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap();
    let error = worker.save(b"").unwrap_err();
    assert!(
        matches!(error, Error::Refused { refusal: Refusal::Checkpoint { .. }, .. }),
        "a retry cannot help: {error}"
    );
    for named in [
        "/job:ps/task:1/shard:0 at ",
        folders[1].path().to_str().unwrap(),
        "/job:ps/task:0 has created this folder in another directory",
    ] {
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
    drop(servers);
}

#[test]
fn more_replicas_than_workers_are_reported_at_the_start() {
    let five = |config: PsConfig| config.mode(Synchronous::new(5));
    let (servers, _, events) = serve(&[&five], &[Adam::new(0.1)]);
    await_event(&events, &["expect 5 replicas", "2 workers"]);
    drop(servers);
}

#[test]
fn a_hyperparameter_that_has_changed_on_an_old_state_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let stored = |config: PsConfig| config.storage(Storage::directory(&state));
    let (servers, _, _) = serve(&[&stored], &[Adam::new(0.1)]);
    drop(servers);
    let (servers, _, events) = serve(&[&stored], &[Adam::new(0.1).betas(0.8, 0.999)]);
    await_event(&events, &["rules of", "beta1: 0.8", "beta1: 0.9"]);
    drop(servers);
}

#[test]
fn a_worker_that_expects_another_mode_or_an_end_is_refused_with_both_values() {
    let cluster = TestCluster::sgd(1, |config| config);
    let cases = [
        (cluster.config(0).expect_synchronous(true), "the mode of"),
        (cluster.config(0).expect_last_step(100), "is none, and this worker expects 100"),
    ];
    for (config, text) in cases {
        let error = Worker::connect(config).unwrap_err();
        assert!(matches!(error, Error::Unexpected { .. }), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    Worker::connect(cluster.config(0).expect_synchronous(false).expect_no_last_step()).unwrap();
    cluster.stop();
    let cluster = TestCluster::sgd(1, |config| config.last_step(7));
    let error = Worker::connect(cluster.config(0).expect_no_last_step()).unwrap_err();
    assert!(error.to_string().contains("is 7, and this worker expects none"), "{error}");
    cluster.stop();
}

#[test]
fn a_loader_with_another_seed_than_the_declared_data_set_is_refused() {
    let cluster = TestCluster::sgd(1, |config| config);
    let pipeline = |seed| {
        let source = SliceSource::new("letters", ('a'..='z').collect::<Vec<char>>());
        Pipeline::new(source).batch(2).shuffle(seed)
    };
    let config = TrainingConfig::new(cluster.config(0)).variables([vector("w", 2)]);
    let config = config.data(pipeline(1).data_set().unwrap());
    let mut session = TrainingSession::start(config).unwrap();
    let step = session.step().unwrap().unwrap();
    let mut other = GrantedBatches::new(pipeline(2).loader().unwrap());
    let error = step.load(&mut other).unwrap_err();
    assert!(matches!(error, DataError::Differs { .. }), "{error}");
    assert!(error.to_string().contains("seed is 1, not 2"), "{error}");
    let mut same = GrantedBatches::new(pipeline(1).loader().unwrap());
    assert_eq!(step.load(&mut same).unwrap().samples.len(), 2);
    step.skip();
    session.close().unwrap();
    cluster.stop();
}
