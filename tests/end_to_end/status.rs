//! What a server tells about a training: its status, its events, and the metrics of its workers.

use std::time::{Duration, Instant};

use pushpull::blocking::Worker;
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::server::{Event, Events, Presence, Status, TrainingPhase};
use pushpull::{PsConfig, PsHandle, Push, Synchronous, TaskId, VariableSpec};

use crate::cluster::{LONG, TestCluster, vector};

const LEASE: Duration = Duration::from_millis(400);
const LAST_STEP: u64 = 3;

fn variables() -> [VariableSpec; 2] {
    [vector("w", 8), vector("b", 1)]
}

/// Trains until there are no more tokens, and returns the worker and its number of gradients.
fn train(mut worker: Worker) -> (Worker, u64) {
    let mut params = worker.join(&variables(), |_| ()).unwrap();
    let mut count = 0;
    while let Some(token) = worker.token().unwrap() {
        worker.pull(&token, &mut params).unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        gradients.view_mut::<f32>("b").unwrap().fill(1.0);
        let pushed = worker.push(token, gradients).unwrap();
        assert!(matches!(pushed, Push::Accepted { .. }), "{pushed:?}");
        count += 1;
    }
    (worker, count)
}

/// Waits until the status satisfies this.
fn wait_for(handle: &PsHandle, is_it: impl Fn(&Status) -> bool) -> Status {
    let start = Instant::now();
    loop {
        let status = handle.status();
        if is_it(&status) {
            return status;
        }
        assert!(start.elapsed() < LONG, "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads events up to one of this kind, which it returns.
fn next(events: &mut Events, kind: &str) -> Event {
    loop {
        let event = events.blocking_next(LONG).unwrap_or_else(|| panic!("no event {kind}"));
        if event.kind() == kind {
            return event;
        }
    }
}

#[test]
fn a_server_names_the_worker_that_a_training_waits_for_and_then_tells_its_life() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        TestCluster::sgd(2, |config: PsConfig| {
            let mode = Synchronous::new(2);
            let config = config.mode(mode).lease(LEASE).last_step(LAST_STEP).shards(2);
            let storage = LocalDirectory::create(folder.path().join("checkpoints")).unwrap();
            config.checkpoints(Checkpoints::new(storage))
        })
    };
    let cluster = start();
    let handle = cluster.handle();
    let mut events = handle.events();
    let absent = TaskId::worker(1);
    let chief = TaskId::worker(0);
    let before = handle.status();
    assert_eq!((before.phase, before.global_step), (TrainingPhase::NoVariables, 0));
    assert_eq!(before.never_joined, [chief.clone(), absent.clone()]);

    std::thread::scope(|scope| {
        let first = cluster.worker(0);
        let first = scope.spawn(|| train(first));
        let status = wait_for(&handle, |status| {
            let waiting = status.waiting.as_ref();
            waiting.is_some_and(|waiting| waiting.reason.contains("1 of 2 gradients"))
        });
        let waiting = status.waiting.unwrap();
        assert_eq!((status.phase, status.global_step), (TrainingPhase::Training, 0));
        assert_eq!(
            (&waiting.workers, &status.never_joined),
            (&vec![absent.clone()], &waiting.workers)
        );
        let [member] = &status.members[..] else { panic!("{:?}", status.members) };
        assert_eq!((&member.task, member.presence), (&chief, Presence::Present));

        let joined = next(&mut events, "worker-joined");
        assert_eq!(joined.to_string(), "/job:worker/task:0 joined at step 0");
        let began = next(&mut events, "wait-began").to_string();
        assert!(began.starts_with("step 0 has waited ") && began.contains("task:1"), "{began}");

        let (second, count) = train(cluster.worker(1));
        let (mut first, others) = first.join().unwrap();
        assert_eq!((count, others), (LAST_STEP, LAST_STEP));
        let metrics = first.metrics();
        let counts = [metrics.tokens, metrics.pulls, metrics.pushes];
        assert_eq!(counts, [LAST_STEP; 3], "{metrics:?}");
        let failures = [metrics.pulls_stale, metrics.pushes_stale, metrics.errors];
        assert_eq!((failures, metrics.reconnects), ([0; 3], 0), "{metrics:?}");
        // It waited for the other worker in `token`.
        assert!(metrics.token_time >= LEASE, "{metrics:?}");
        assert!(metrics.push_time > Duration::ZERO && metrics.compute_time > Duration::ZERO);
        first.save(b"").unwrap();
        second.leave().unwrap();
        // The chief goes without a word.
        drop(first);
    });
    let mut told = Vec::new();
    let (task, silent) = loop {
        match events.blocking_next(LONG).expect("the chief is lost") {
            Event::WorkerLost { task, silent, .. } => break (task, silent),
            event => told.push(event),
        }
    };
    assert!(task == chief && silent >= LEASE, "{task} after {silent:?}");
    let is_end = |event: &Event| match event {
        Event::WaitEnded { workers, waited, .. } => {
            *workers == [absent.clone()] && *waited >= LEASE
        }
        _ => false,
    };
    assert_eq!(told.iter().filter(|event| is_end(event)).count(), 1, "{told:?}");
    let told: Vec<String> = told.iter().map(Event::to_string).collect();
    for text in [
        "the training is over at step 3: ended at the last step",
        "saved ckpt-1-3 of step 3",
        "/job:worker/task:1 left at step 3",
    ] {
        assert_eq!(told.iter().filter(|told| *told == text).count(), 1, "{text} in {told:?}");
    }
    let status = wait_for(&handle, |status| status.members[0].presence == Presence::Lost);
    assert_eq!((status.phase, status.global_step), (TrainingPhase::LastStep, LAST_STEP));
    assert_eq!((status.waiting, status.never_joined), (None, vec![]));
    let step_times = status.members.iter().map(|member| member.step_time);
    assert!(step_times.into_iter().all(|time| time.is_some()), "{:?}", status.members);
    cluster.stop();
    assert_eq!((events.blocking_next(LONG), events.has_ended()), (None, true));
    assert_eq!(handle.status().global_step, LAST_STEP, "the last status stays");
    assert!(handle.events().has_ended());

    let cluster = start();
    let mut events = cluster.handle().events();
    let mut worker = cluster.worker(0);
    worker.join(&variables(), |_| panic!("a checkpoint is restored")).unwrap();
    let restored = next(&mut events, "checkpoint-restored").to_string();
    assert_eq!(restored, "restored ckpt-1-3: resumes at step 3 in restore epoch 2");
    worker.leave().unwrap();
    cluster.stop();
}

#[test]
fn a_reader_that_does_not_read_delays_nobody_and_learns_how_many_events_it_lost() {
    const ROUNDS: usize = 150;
    let cluster = TestCluster::sgd(1, |config| config);
    let mut slow = cluster.handle().events();
    let mut fast = cluster.handle().events();
    for round in 0..ROUNDS {
        cluster.worker(0).leave().unwrap();
        for kind in ["worker-joined", "worker-left"] {
            let event = fast.blocking_next(LONG).expect("each worker joins and leaves");
            assert_eq!(event.kind(), kind, "round {round}");
        }
    }
    let lost = (2 * ROUNDS - Events::QUEUED_MAX) as u64;
    assert_eq!(
        slow.try_next().map(|event| event.to_string()),
        Some(format!("this reader was too slow and lost {lost} events"))
    );
    for _ in 0..Events::QUEUED_MAX {
        assert!(slow.try_next().is_some_and(|event| event.kind() != "events-lost"));
    }
    assert_eq!(slow.try_next(), None);
    cluster.stop();
    assert!(slow.has_ended() && fast.has_ended());
}
