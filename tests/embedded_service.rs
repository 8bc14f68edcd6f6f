//! A service that runs several trainings in one process, and ends each in another way. This is a
//! test binary of its own because it lists the threads of the process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, TrainingSession};
use pushpull::error::TrainingError;
use pushpull::local::Cluster;
use pushpull::training::{StopReason, TrainingConfig, TrainingEnd};
use pushpull::worker::Interrupt;
use pushpull::{Error, Params, PsConfig, PsHandle, Sgd, Synchronous, VariableSpec};

/// Ends a hang. Nothing depends on its length.
const GUARD: Duration = Duration::from_secs(10);

type Ended = Result<TrainingEnd, TrainingError>;

/// Two servers and two workers in threads.
struct Training {
    cluster: Cluster,
    interrupt: Interrupt,
    /// The gradients that each worker has pushed.
    pushed: Vec<Arc<AtomicU64>>,
    trainers: Vec<JoinHandle<()>>,
    ends: Receiver<Ended>,
}

impl Training {
    fn start(name: &str, configure: impl Fn(PsConfig) -> PsConfig) -> Training {
        let cluster = Cluster::start(2, 2, |cluster, task| {
            configure(PsConfig::new(cluster, task, Sgd::new(1.0)))
        });
        let cluster = cluster.unwrap();
        let interrupt = Interrupt::new();
        let (sender, ends) = mpsc::channel();
        let mut pushed = Vec::new();
        let mut trainers = Vec::new();
        for index in 0..2 {
            let counter = Arc::new(AtomicU64::new(0));
            pushed.push(counter.clone());
            let config = TrainingConfig::new(cluster.worker_config(index))
                .variables(["a", "b"].map(|name| VariableSpec::f32(name, [64]).unwrap()))
                .interrupt(&interrupt);
            let sender = sender.clone();
            let trainer = thread::Builder::new().name(format!("{name}-{index}"));
            let run = move || sender.send(train(config, &counter)).unwrap();
            trainers.push(trainer.spawn(run).unwrap());
        }
        Training { cluster, interrupt, pushed, trainers, ends }
    }

    /// Waits until both workers have pushed.
    fn await_steps(&self) {
        let deadline = Instant::now() + GUARD;
        while self.pushed.iter().any(|pushed| pushed.load(Ordering::Relaxed) == 0) {
            assert!(Instant::now() < deadline, "no worker makes a step");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the training, and returns how both workers ended and the servers' cluster.
    fn end_by(
        self,
        name: &str,
        end: impl FnOnce(&[PsHandle], &Interrupt),
    ) -> (Vec<Ended>, Cluster) {
        let start = Instant::now();
        end(&self.cluster.handles(), &self.interrupt);
        let ends = (0..2).map(|_| self.ends.recv_timeout(GUARD).expect("the worker does not end"));
        let ends: Vec<Ended> = ends.collect();
        self.trainers.into_iter().for_each(|trainer| trainer.join().unwrap());
        println!("{name}: both workers ended after {:?}", start.elapsed());
        (ends, self.cluster)
    }
}

/// Trains with gradients of ones until the session ends.
fn train(config: TrainingConfig, pushed: &AtomicU64) -> Ended {
    let mut session = TrainingSession::start(config)?;
    while let Some(mut step) = session.step()? {
        let (_, gradients) = step.parts();
        for view in gradients.views_mut::<f32, 2>(["a", "b"]).unwrap() {
            view.fill(1.0);
        }
        step.push()?;
        pushed.fetch_add(1, Ordering::Relaxed);
    }
    session.close()
}

/// Both workers have ended without an error, for this reason. Returns how.
fn assert_ended(ends: Vec<Ended>, reason: &StopReason) -> Vec<TrainingEnd> {
    let ends: Vec<TrainingEnd> = ends.into_iter().map(Result::unwrap).collect();
    assert!(ends.iter().all(|end| end.reason == *reason), "{ends:?}");
    ends
}

/// Returns all values.
fn values(params: &Params) -> [&[f32]; 2] {
    params.views(["a", "b"]).unwrap()
}

/// Both workers have the final values. Returns those.
fn final_values(ends: &[TrainingEnd]) -> &Params {
    assert!(ends.iter().all(|end| end.is_final), "{ends:?}");
    let [one, other] = [0, 1].map(|index| ends[index].params.as_ref().unwrap());
    assert_eq!((one.step(), values(one)), (other.step(), values(other)));
    one
}

/// Stops the servers, and waits until they have ended.
fn stop(name: &str, cluster: Cluster) {
    let start = Instant::now();
    let (done, stopped) = mpsc::channel();
    let stopping = thread::spawn(move || done.send(cluster.stop()).unwrap());
    stopped.recv_timeout(GUARD).expect("the servers do not end").unwrap();
    stopping.join().unwrap();
    println!("{name}: the servers ended after {:?}", start.elapsed());
}

/// The names of the threads of this process, in order.
fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.map(|task| fs::read_to_string(task.path().join("comm")));
    let mut names: Vec<String> = names.flatten().collect();
    names.sort();
    names
}

/// Waits until these are the only threads.
fn await_threads(expected: &[String]) {
    // The kernel lists a thread for a moment after it was joined.
    let deadline = Instant::now() + GUARD;
    while threads() != expected {
        assert!(Instant::now() < deadline, "threads are left: {:?}", threads());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn three_trainings_of_a_service_end_each_in_its_way() {
    let before = threads();
    // The workers of the third wait for a replica that never comes.
    let straggling = Synchronous::new(3).total_num_replicas(3).join_timeout(GUARD * 60);
    let finished = Training::start("finished", |config| config);
    let stopped = Training::start("stopped", |config| config);
    let cancelled = Training::start("cancelled", move |config| config.mode(straggling));
    for training in [&finished, &stopped, &cancelled] {
        training.await_steps();
    }

    let (ends, cluster) = cancelled.end_by("interrupt", |_, interrupt| interrupt.raise());
    assert_ended(ends, &StopReason::Interrupted);
    stop("interrupt", cluster);

    let (ends, cluster) = finished.end_by("finish", |servers, _| {
        servers.iter().for_each(|server| server.finish(GUARD * 60));
    });
    final_values(&assert_ended(ends, &StopReason::Finished));
    // Both workers have left, so the servers end by themselves.
    let start = Instant::now();
    let (done, served) = mpsc::channel();
    let serving = thread::spawn(move || done.send(cluster.serve()).unwrap());
    served.recv_timeout(GUARD).expect("the servers do not end").unwrap();
    serving.join().unwrap();
    println!("finish: the servers ended after {:?}", start.elapsed());

    let (ends, cluster) = stopped.end_by("stop", |servers, _| {
        servers.iter().for_each(PsHandle::stop);
    });
    for end in ends {
        let Err(TrainingError::Worker(Error::ServerStopped { shard })) = end else {
            panic!("{end:?}")
        };
        assert!(shard.task < 2, "{shard}");
    }
    stop("stop", cluster);
    await_threads(&before);

    let fourth = Training::start("fourth", |config| config.last_step(20));
    let (ends, cluster) = fourth.end_by("last step", |_, _| ());
    let ends = assert_ended(ends, &StopReason::LastStep);
    let of_workers = final_values(&ends);
    let mut reader = Reader::connect(cluster.worker_config(0)).unwrap();
    let mut of_servers = reader.params();
    assert_eq!(reader.pull(&mut of_servers).unwrap(), 20);
    assert_eq!((of_workers.step(), values(of_workers)), (20, values(&of_servers)));
    drop(reader);
    stop("last step", cluster);
    await_threads(&before);
}
