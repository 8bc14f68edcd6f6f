//! The end of the training on all workers: final values, and readers that learn of it.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::cluster::ShardId;
use pushpull::server::Event;
use pushpull::training::{StopReason, TrainingConfig, TrainingSession};
use pushpull::worker::EndReason;
use pushpull::{
    Asynchronous, Params, Ps, PsConfig, Sgd, Storage, Synchronous, TaskId, Token, WorkerConfig,
};

use super::cluster::{LONG, TestCluster, block_on, spec, vector};
use super::proxy::Proxy;

/// Variables on both servers.
const NAMES: [&str; 2] = ["a", "b"];

/// Joins with both variables.
fn join(worker: &mut Worker) -> Params {
    worker.join(&NAMES.map(|name| vector(name, 100)), |_| ()).unwrap()
}

fn push(worker: &mut Worker, token: Token) {
    let mut gradients = worker.gradients();
    for name in NAMES {
        gradients.view_mut::<f32>(name).unwrap().fill(1.0);
    }
    worker.push(token, gradients).unwrap();
}

fn is_all(values: &Params, expected: f32) -> bool {
    NAMES.iter().all(|name| values.view::<f32>(name).unwrap().iter().all(|&w| w == expected))
}

#[test]
fn final_values_wait_for_the_pushes_of_all_workers() {
    for synchronous in [false, true] {
        let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| match synchronous {
            true => config.mode(Synchronous::new(2).total_num_replicas(2)),
            false => config.mode(Asynchronous::default()),
        });
        let mut chief = cluster.worker(0);
        let mut slow = cluster.worker(1);
        let mut values = join(&mut chief);
        let mut of_slow = join(&mut slow);
        let (token, late) = (chief.token().unwrap().unwrap(), slow.token().unwrap().unwrap());
        let mut reader = Reader::connect(cluster.config(0)).unwrap();
        let mut seen = reader.params();
        assert_eq!(reader.training_end(Duration::ZERO).unwrap(), None, "it goes on");
        push(&mut chief, token);
        chief.finish().unwrap();
        let waiting = thread::spawn(move || {
            let step = chief.pull_final(&mut values).unwrap();
            (chief, step, values)
        });
        assert_eq!(reader.training_end(Duration::from_millis(100)).unwrap(), None);
        assert!(!waiting.is_finished(), "the other holds a token");
        push(&mut slow, late);
        assert_eq!(reader.training_end(Duration::from_millis(100)).unwrap(), None);
        assert!(!waiting.is_finished(), "the other has not ended");
        // One step of two gradients, or two of one. Both take 1 from the values in the mean or
        // each.
        let (steps, expected) = if synchronous { (1, -1.0) } else { (2, -2.0) };
        assert_eq!(slow.pull_final(&mut of_slow).unwrap(), steps);
        let (chief, step, values) = waiting.join().unwrap();
        let finished = Some(EndReason::Finished {});
        assert_eq!(reader.training_end(Duration::from_secs(60)).unwrap(), finished);
        assert_eq!((step, reader.pull(&mut seen).unwrap()), (steps, steps));
        for of_one in [&values, &of_slow, &seen] {
            assert!(is_all(of_one, expected), "{synchronous}");
        }
        chief.leave().unwrap();
        slow.leave().unwrap();
        cluster.stop();
    }
}

#[test]
fn a_worker_that_has_not_ended_is_named_and_one_that_left_is_not_waited_for() {
    let cluster = TestCluster::sgd(3, |config| config);
    let short = cluster.config(0).timeout(Duration::from_millis(300));
    let mut chief = Worker::connect(short).unwrap();
    let mut busy = cluster.worker(1);
    let mut gone = cluster.worker(2);
    let mut values = join(&mut chief);
    for worker in [&mut busy, &mut gone] {
        join(worker);
    }
    let token = busy.token().unwrap().unwrap();
    drop(gone.token().unwrap());
    let error = chief.pull_final(&mut values).unwrap_err().to_string();
    assert!(error.contains("the end of the training"), "{error}");
    chief.finish().unwrap();
    gone.leave().unwrap();
    let error = chief.pull_final(&mut values).unwrap_err().to_string();
    assert!(error.contains("have not ended: /job:worker/task:1"), "{error}");
    assert_eq!(values.step(), 0, "unchanged");
    push(&mut busy, token);
    busy.leave().unwrap();
    assert_eq!(chief.pull_final(&mut values).unwrap(), 1);
    assert!(is_all(&values, -1.0));
    cluster.stop();
}

#[test]
fn a_restarted_step_owner_still_ends_the_training_for_all() {
    let directory = tempfile::tempdir().unwrap();
    let storage = || Storage::directory(directory.path().join("state"));
    let configure = |config: PsConfig| config.storage(storage()).last_step(2);
    let cluster = TestCluster::sgd(2, configure);
    let mut chief = cluster.worker(0);
    let mut other = cluster.worker(1);
    let mut values = join(&mut chief);
    let mut of_other = join(&mut other);
    let (token, last) = (chief.token().unwrap().unwrap(), other.token().unwrap().unwrap());
    push(&mut chief, token);
    let waiting = thread::spawn(move || chief.pull_final(&mut values).map(|step| (step, values)));
    push(&mut other, last);
    thread::sleep(Duration::from_millis(50));
    let spec = cluster.spec.clone();
    let address = cluster.handle().address().to_owned();
    cluster.suspend();
    let listener = block_on(Ps::listen(&address)).unwrap();
    let config = PsConfig::new(spec, TaskId::ps(0), Sgd::new(1.0));
    let again = listener.start(configure(config)).unwrap();
    assert_eq!(other.pull_final(&mut of_other).unwrap(), 2);
    let (step, values) = waiting.join().unwrap().unwrap();
    assert!(step == 2 && is_all(&values, -2.0) && is_all(&of_other, -2.0), "{step}");
    again.handle().stop();
}

#[test]
fn sessions_that_are_finished_by_a_server_have_its_final_values() {
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| config);
    let handle = cluster.handle();
    let train = |worker| {
        let config = TrainingConfig::new(cluster.config(worker))
            .variables(NAMES.map(|name| vector(name, 100)));
        block_on(async {
            let mut session = TrainingSession::start(config).await.unwrap();
            while let Some(mut step) = session.step().await.unwrap() {
                let ended = step.step() == 50;
                for name in NAMES {
                    step.parts().1.view_mut::<f32>(name).unwrap().fill(1.0);
                }
                step.push().await.unwrap();
                if ended {
                    handle.finish(Duration::from_secs(60));
                }
            }
            session.close().await.unwrap()
        })
    };
    let ends = thread::scope(|scope| {
        [0, 1].map(|worker| scope.spawn(move || train(worker))).map(|it| it.join().unwrap())
    });
    let steps = ends.each_ref().map(|end| end.params.as_ref().unwrap().step());
    assert!(steps[0] == steps[1] && steps[0] > 50, "{steps:?}");
    for end in ends {
        assert_eq!((&end.reason, end.is_final), (&StopReason::Finished, true));
        assert!(is_all(&end.params.unwrap(), -(steps[0] as f32)));
    }
}

/// Waits until a condition holds.
fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < LONG, "{what}");
        thread::yield_now();
    }
}

/// A worker dies when one of two servers has its gradient, and the other nothing of it.
#[test]
fn a_gradient_on_one_server_alone_is_reported_and_the_values_are_not_final() {
    let events: Arc<Mutex<Vec<Event>>> = Arc::default();
    let cluster = TestCluster::sgd_of(2, 2, |config| {
        let events = events.clone();
        config.last_step(2).on_event(move |event| events.lock().unwrap().push(event.clone()))
    });
    let handle = cluster.handle();
    let config = TrainingConfig::new(cluster.config(0)).variables(NAMES.map(|it| vector(it, 100)));
    let mut session = pushpull::blocking::TrainingSession::start(config).unwrap();
    // The way from the worker to the second server.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let hidden = listener.local_addr().unwrap().to_string();
    let second = cluster.servers[1].handle().address().to_owned();
    let proxy = Proxy::start(listener, second, 0, 0);
    let hosts = spec([handle.address().to_owned(), hidden], 2);
    block_on(async {
        let config = WorkerConfig::new(hosts, TaskId::worker(1));
        let mut dying = pushpull::Worker::connect(config).await.unwrap();
        dying.join(&NAMES.map(|name| vector(name, 100)), |_| ()).await.unwrap();
        let token = dying.token().await.unwrap().unwrap();
        let mut gradients = dying.gradients();
        for name in NAMES {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0);
        }
        proxy.pause();
        let pushing = dying.push(token, gradients);
        let counted = tokio::task::spawn_blocking({
            let handle = handle.clone();
            move || wait_until("no gradient arrives", || handle.metrics().global_step == 1)
        });
        tokio::select! {
            pushed = pushing => panic!("{pushed:?}"),
            counted = counted => counted.unwrap(),
        }
    });
    proxy.cut_all();
    // The next run of the task ends the last one on both servers.
    let mut again = cluster.worker(1);
    join(&mut again);
    again.leave().unwrap();
    let reported = |event: &Event| matches!(event, Event::PartlyApplied { .. });
    wait_until("nothing is reported", || events.lock().unwrap().iter().any(reported));
    let events: Vec<Event> =
        events.lock().unwrap().iter().filter(|it| reported(it)).cloned().collect();
    let [Event::PartlyApplied { task, applied, missing, unknown, .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((task, events[0].kind()), (&TaskId::worker(1), "partly-applied"));
    let shards = [0, 1].map(|task| vec![ShardId { task, shard: 0 }]);
    assert_eq!([applied, missing, unknown], [&shards[0], &shards[1], &vec![]]);
    assert_eq!(handle.metrics().gradients_partly_applied, 1);
    while let Some(mut step) = session.step().unwrap() {
        step.parts().1.view_mut::<f32>("a").unwrap().fill(1.0);
        step.push().unwrap();
    }
    let end = session.close().unwrap();
    assert_eq!((&end.reason, end.step, end.is_final), (&StopReason::LastStep, 2, false));
    cluster.stop();
}
