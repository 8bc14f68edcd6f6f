//! A table that cannot grow: training waits, the cause is reported to the worker and by an event,
//! and training continues without a restart.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushpull::blocking::Worker;
use pushpull::server::Event;
use pushpull::variable::{DType, Partitioner, TableSpec};
use pushpull::{Push, Sgd, Storage, VariableSpec, WorkerConfig};

use super::cluster::{LONG, TestCluster};

/// Polls `found` until it returns a value, and panics after [`LONG`].
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(since.elapsed() < LONG, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_push_waits_with_a_reported_cause_until_its_table_can_grow() {
    let folder = tempfile::tempdir().unwrap();
    let events = Arc::new(Mutex::new(Vec::new()));
    let index = Cell::new(0);
    let cluster = TestCluster::start(2, 1, Sgd::new(1.0), |config| {
        let state = folder.path().join(format!("state-{}", index.replace(index.get() + 1)));
        let events = events.clone();
        config
            .storage(Storage::directory(state).bytes_max(1 << 28))
            .lease(Duration::from_millis(500))
            .on_event(move |event| events.lock().unwrap().push(event.clone()))
    });
    let reported = Arc::new(Mutex::new(String::new()));
    let report = reported.clone();
    let config: WorkerConfig =
        cluster.config(0).on_progress(Duration::from_millis(100), move |silent| {
            *report.lock().unwrap() = silent.to_string();
        });
    let mut worker = Worker::connect(config).unwrap();
    let table = VariableSpec::table("table", DType::F32, [3], TableSpec::new(1 << 20)).unwrap();
    worker.join(&[table.partitioner(Partitioner::Fixed { shards: 2 })], |_| ()).unwrap();
    // Filling a file system needs root. A directory with the name of the table's next file stops
    // the table from growing as well.
    let blocked = folder.path().join("state-1/shard-0/rows-1-0-0");
    assert!(!blocked.exists(), "the file must be created only with the first row");
    std::fs::create_dir(&blocked).unwrap();

    let ids: Vec<u64> = (1..=64).collect();
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    gradients.set_rows("table", &ids, &[1.0_f32; 192]).unwrap();
    let pushing = std::thread::spawn(move || {
        let pushed = worker.push(token, gradients);
        (worker, pushed)
    });
    let path = blocked.display().to_string();
    wait_for("the worker's progress", || reported.lock().unwrap().contains(&path).then_some(()));
    let cause = wait_for("the event GrowthFailed", || {
        events.lock().unwrap().iter().find_map(|event| match event {
            Event::GrowthFailed { shard, cause, .. } => Some((shard.task, cause.clone())),
            _ => None,
        })
    });
    assert!(cause.0 == 1 && cause.1.contains(&path), "{cause:?}");
    let metrics = |task: usize| cluster.servers[task].handle().metrics();
    assert_eq!(metrics(1).shards_waiting_to_grow, 1);
    assert!(!pushing.is_finished(), "the push must wait");

    std::fs::remove_dir(&blocked).unwrap();
    let (worker, pushed) = pushing.join().unwrap();
    assert!(matches!(pushed, Ok(Push::Applied { .. })), "{pushed:?}");
    assert_eq!((metrics(0).gradients_applied, metrics(1).gradients_applied), (1, 1));
    assert_eq!(metrics(0).table_rows + metrics(1).table_rows, 64);
    assert_eq!((metrics(1).shards_waiting_to_grow, metrics(0).growths_failed), (0, 0));
    wait_for("the event GrowthResumed", || {
        let events = events.lock().unwrap();
        let resumed = |event: &Event| matches!(event, Event::GrowthResumed { .. });
        events.iter().any(resumed).then_some(())
    });
    worker.leave().unwrap();
    cluster.stop();
}
