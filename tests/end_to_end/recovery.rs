//! What a training session tries again and what ends it, and who hears of that.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushpull::blocking::TrainingSession;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::error::TrainingError;
use pushpull::protocol::Refusal;
use pushpull::server::{OnLoss, PsListener};
use pushpull::training::{
    Flow, Hook, HookError, JoinReport, RetryReport, TrainingConfig, TrainingEnd,
};
use pushpull::{
    Error, Ps, PsConfig, Sgd, Storage, Synchronous, TaskId, VariableSpec, WorkerConfig,
};

use super::cluster::{LONG, TestCluster, block_on, listen, spec, vector, wait_for_end};
use super::proxy::Proxy;

/// Records texts, from any thread.
#[derive(Clone, Default)]
struct Texts(Arc<Mutex<Vec<String>>>);

impl Texts {
    fn add(&self, text: impl ToString) {
        self.0.lock().unwrap().push(text.to_string());
    }

    fn any(&self, part: &str) -> bool {
        self.0.lock().unwrap().iter().any(|text| text.contains(part))
    }
}

/// Records the causes of retries and of failed saves, and calls a function at a failed save.
struct Causes<F>(Texts, F);

impl<F: FnMut() + Send> Hook for Causes<F> {
    fn retrying(&mut self, retry: &RetryReport) -> Result<Flow, HookError> {
        self.0.add(format!("retry: {}", retry.cause));
        (self.1)();
        Ok(Flow::Continue)
    }

    fn save_failed(&mut self, error: &Error) -> Result<Flow, HookError> {
        self.0.add(format!("save: {error}"));
        (self.1)();
        Ok(Flow::Continue)
    }
}

fn run(config: TrainingConfig, gradient: f32) -> Result<TrainingEnd, TrainingError> {
    TrainingSession::start(config)?.run(|step| {
        step.parts().1.view_mut::<f32>("w")?.fill(gradient);
        Ok::<(), HookError>(())
    })
}

#[test]
fn a_checkpoint_of_another_model_ends_a_session_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let events = Texts::default();
    let cluster = || {
        let events = events.clone();
        let path = folder.path().to_owned();
        TestCluster::sgd(1, move |config| {
            let events = events.clone();
            let storage = LocalDirectory::create(&path).unwrap();
            let config = config.checkpoints(Checkpoints::new(storage)).last_step(2);
            config.on_event(move |event| events.add(event))
        })
    };
    let session = |cluster: &TestCluster, w: VariableSpec| {
        TrainingConfig::new(cluster.config(0)).variables([w]).checkpoint_every(LONG)
    };
    let first = cluster();
    run(session(&first, vector("w", 3)), 1.0).unwrap();
    first.stop();
    // The servers have nothing but the checkpoint.
    let second = cluster();
    let causes = Texts::default();
    let config = session(&second, vector("w", 4)).hook(Causes(causes.clone(), || ()));
    let error = run(config, 1.0).unwrap_err();
    let Some(Error::Refused { refusal: Refusal::Checkpoint { detail }, .. }) = error.worker_error()
    else {
        panic!("{error}")
    };
    assert!(detail.as_str().contains("\"w\""), "{error}");
    assert!(causes.0.lock().unwrap().is_empty(), "another attempt would fail in the same way");
    assert!(events.any("has refused the chief, which asked to restore the variables"));
    second.stop();
}

/// Stops a server once the chief has joined, before its first checkpoint, and starts it again once
/// that has failed.
struct StopDuringSave<F> {
    server: Option<Ps>,
    restart: F,
    restarted: Arc<Mutex<Option<Ps>>>,
    heard: Texts,
}

impl<F: FnMut() -> Ps + Send> Hook for StopDuringSave<F> {
    fn joined(&mut self, _: &JoinReport<'_>) -> Result<Flow, HookError> {
        if let Some(server) = self.server.take() {
            server.handle().suspend();
            wait_for_end(server)?;
        }
        Ok(Flow::Continue)
    }

    fn save_failed(&mut self, error: &Error) -> Result<Flow, HookError> {
        self.heard.add(error);
        let mut restarted = self.restarted.lock().unwrap();
        restarted.get_or_insert_with(&mut self.restart);
        Ok(Flow::Continue)
    }
}

#[test]
fn a_server_that_is_away_during_the_first_save_ends_no_session() {
    let folder = tempfile::tempdir().unwrap();
    let listeners = [listen(), listen()];
    let spec = spec(listeners.iter().map(PsListener::address), 1);
    let addresses = listeners.each_ref().map(PsListener::address);
    let config = {
        let spec = spec.clone();
        let root = folder.path().to_owned();
        move |index: u32| {
            let storage = LocalDirectory::create(root.join("checkpoints")).unwrap();
            PsConfig::new(spec.clone(), TaskId::ps(index), Sgd::new(1.0))
                .storage(Storage::directory(root.join(format!("state-{index}"))).bytes_max(1 << 26))
                .checkpoints(Checkpoints::new(storage))
                .last_step(6)
        }
    };
    let mut index = 0;
    let [owner, second] = listeners.map(|listener| {
        let server = listener.start(config(index)).unwrap();
        index += 1;
        server
    });
    let restarted = Arc::<Mutex<Option<Ps>>>::default();
    let heard = Texts::default();
    let restart = {
        let address = addresses[1].clone();
        move || block_on(Ps::listen(&address)).unwrap().start(config(1)).unwrap()
    };
    let hook = StopDuringSave {
        server: Some(second),
        restart,
        restarted: restarted.clone(),
        heard: heard.clone(),
    };
    // Operations on the server time out while it is away, so that the session sees the save.
    let worker = WorkerConfig::new(spec, TaskId::worker(0)).timeout(Duration::from_millis(300));
    let training = TrainingConfig::new(worker)
        .variables(["w", "v"].map(|name| vector(name, 1000)))
        .checkpoint_every(LONG)
        .hook(hook);
    let ended = TrainingSession::start(training).unwrap().run(|step| {
        let gradients = step.parts().1;
        gradients.view_mut::<f32>("w")?.fill(1.0);
        gradients.view_mut::<f32>("v")?.fill(1.0);
        Ok::<(), HookError>(())
    });
    let ended = ended.unwrap();
    assert_eq!(ended.checkpoint.map(|checkpoint| checkpoint.step), Some(6));
    assert!(heard.any("/job:ps/task:1") || heard.any("ps task 1"), "{:?}", heard.0);
    let second = restarted.lock().unwrap().take().expect("it was started again");
    for server in [owner, second] {
        server.handle().stop();
        wait_for_end(server).unwrap();
    }
}

#[test]
fn a_replica_that_is_absent_ends_a_session_at_once_if_the_policy_says_so() {
    let mode = Synchronous::new(2).on_loss(OnLoss::Fail);
    let cluster = TestCluster::sgd(2, |config| config.mode(mode));
    let retries = Texts::default();
    let config = TrainingConfig::new(cluster.config(0)).variables([vector("w", 3)]);
    let session = TrainingSession::start(config.hook(Causes(retries.clone(), || ()))).unwrap();
    let mut other = cluster.worker(1);
    let _ = other.join(&[vector("w", 3)], |_| ()).unwrap();
    other.leave().unwrap();
    let ended = session.run(|step| {
        step.parts().1.view_mut::<f32>("w")?.fill(1.0);
        Ok::<(), HookError>(())
    });
    let error = ended.unwrap_err();
    let Some(Error::ReplicasAbsent { awaited, .. }) = error.worker_error() else {
        panic!("{error}")
    };
    assert!(awaited.contains("/job:worker/task:1 (left"), "{error}");
    assert!(retries.0.lock().unwrap().is_empty(), "another attempt would end the same way");
    cluster.stop();
}

/// The directory is a file for a while, so the first save fails.
#[test]
fn a_disk_that_fails_for_a_while_ends_no_session() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = TestCluster::sgd(1, |config| {
        let storage = LocalDirectory::create(&directory).unwrap();
        config.checkpoints(Checkpoints::new(storage)).last_step(20)
    });
    std::fs::remove_dir(&directory).unwrap();
    std::fs::write(&directory, "").unwrap();
    let causes = Texts::default();
    let progress = Texts::default();
    let reported = progress.clone();
    let config = cluster.config(0).on_progress(LONG, move |shards| reported.add(shards));
    let repair = move || {
        // Another save may have failed since the first.
        if std::fs::remove_file(&directory).is_ok() {
            LocalDirectory::create(&directory).unwrap();
        }
    };
    let config = TrainingConfig::new(config)
        .variables([vector("w", 3)])
        .checkpoint_every_steps(5)
        .hook(Causes(causes.clone(), repair));
    let ended = run(config, 1.0).unwrap();
    assert_eq!(ended.checkpoint.map(|checkpoint| checkpoint.step), Some(20));
    assert_eq!((ended.metrics.pushes, ended.metrics.pushes_non_finite), (20, 0));
    for heard in [causes, progress] {
        assert!(heard.any("storage failed"), "{:?}", heard.0);
    }
    cluster.stop();
}

#[test]
fn a_session_whose_chief_never_comes_names_it() {
    let cluster = TestCluster::sgd(2, |config| config);
    let progress = Texts::default();
    let reported = progress.clone();
    let config = cluster
        .config(1)
        .connect_timeout(Duration::from_secs(1))
        .on_progress(Duration::from_millis(100), move |shards| reported.add(shards));
    let error = run(TrainingConfig::new(config).variables([vector("w", 3)]), 1.0).unwrap_err();
    let chief = "the chief /job:worker/task:0 (not joined yet)";
    assert!(error.to_string().contains(chief), "{error}");
    assert!(progress.any(chief), "{:?}", progress.0);
    cluster.stop();
}

#[test]
fn a_model_that_gives_nothing_but_nan_ends_its_session() {
    let cluster = TestCluster::sgd(1, |config| config);
    let config = TrainingConfig::new(cluster.config(0)).variables([vector("w", 3)]);
    let error = run(config, f32::NAN).unwrap_err();
    let TrainingError::NonFinite { in_a_row: 101, source } = &error else { panic!("{error}") };
    assert!(matches!(source, Error::NonFinite { variable, .. } if variable == "w"), "{error}");
    assert_eq!(cluster.handle().metrics().global_step, 0);
    cluster.stop();
}

/// One shard alone checks a push itself. With two the worker checks it before it sends.
#[test]
fn gradients_with_nan_are_counted_by_their_worker() {
    for servers in [1, 2] {
        let cluster = TestCluster::sgd_of(servers, 1, |config| config.last_step(4));
        let config = TrainingConfig::new(cluster.config(0)).variables([vector("w", 3)]);
        let mut bad = 3;
        let ended = TrainingSession::start(config).unwrap().run(|step| {
            let gradient = if bad > 0 { f32::NAN } else { 1.0 };
            bad -= i32::from(bad > 0);
            step.parts().1.view_mut::<f32>("w")?.fill(gradient);
            Ok::<(), HookError>(())
        });
        let metrics = ended.unwrap().metrics;
        assert_eq!((metrics.pushes, metrics.pushes_non_finite), (4, 3), "{servers} servers");
        cluster.stop();
    }
}

/// Records when the training fails.
struct FailedAt(Arc<Mutex<Option<Instant>>>);

impl Hook for FailedAt {
    fn failed(&mut self, _: &TrainingError) {
        *self.0.lock().unwrap() = Some(Instant::now());
    }
}

#[test]
fn a_session_that_gives_up_leaves_before_its_timeout() {
    let cluster = TestCluster::sgd(1, |config| config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let hidden = spec([listener.local_addr().unwrap().to_string()], 1);
    let proxy = Proxy::start(listener, cluster.handle().address().to_owned(), 0, 0);
    let timeout = Duration::from_secs(4);
    let failed_at = Arc::default();
    let worker = WorkerConfig::new(hidden, TaskId::worker(0)).timeout(timeout);
    let config = TrainingConfig::new(worker).variables([vector("w", 4)]);
    let config =
        config.recover_for(Duration::from_millis(100)).hook(FailedAt(Arc::clone(&failed_at)));
    let mut session = TrainingSession::start(config).unwrap();
    drop(session.step().unwrap());
    proxy.pause();
    let error = loop {
        match session.step() {
            Ok(step) => drop(step),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, TrainingError::GaveUp { .. }), "{error}");
    let leave = failed_at.lock().unwrap().unwrap().elapsed();
    assert!(leave < timeout, "the leave took {leave:?}");
    proxy.resume();
    cluster.stop();
}
