//! Starts and stops many servers in one process, each in the middle of a push, and checks that
//! nothing is left behind. This is a test binary of its own because it counts the threads and
//! descriptors of the process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pushpull::blocking::Worker;
use pushpull::{ClusterSpec, Ps, PsConfig, Sgd, Storage, TaskId, VariableSpec, WorkerConfig};

/// How many servers are started; `PUSHPULL_START_STOPS` overrides it.
const STARTS: usize = 200;

#[test]
fn stopped_servers_leave_nothing_behind() {
    let starts = std::env::var("PUSHPULL_START_STOPS");
    let starts = starts.map_or(STARTS, |starts| starts.parse().expect("a number"));
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let threads = count("task");
    // The first start creates everything that is created once per process.
    start_and_stop(&runtime, directory.path(), 0);
    wait_for_threads(threads);
    let descriptors = count("fd");
    for index in 1..=starts {
        start_and_stop(&runtime, directory.path(), index);
    }
    println!("{starts} starts and stops, each during a push");
    wait_for_threads(threads);
    assert_eq!(count("fd"), descriptors, "descriptors are left behind");
    let left: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
    assert!(left.is_empty(), "files are left behind: {left:?}");
}

/// Waits until the process has `threads` threads. The kernel lists a joined thread for a moment
/// longer.
fn wait_for_threads(threads: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while count("task") != threads && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(count("task"), threads, "threads are left behind");
}

/// Counts the entries of a folder in /proc/self.
fn count(folder: &str) -> usize {
    fs::read_dir(format!("/proc/self/{folder}")).unwrap().count()
}

/// Starts a server, and stops it while a client is in the middle of a push.
fn start_and_stop(runtime: &tokio::runtime::Runtime, directory: &Path, index: usize) {
    let state = directory.join(format!("state-{index}"));
    // TCP and Unix sockets alternate, and so do memory and files.
    let address = match index % 2 {
        0 => "127.0.0.1:0".to_owned(),
        _ => format!("unix:{}", directory.join(format!("{index}.sock")).display()),
    };
    let listener = runtime.block_on(Ps::listen(&address)).unwrap();
    let cluster = ClusterSpec::builder()
        .job("ps", [listener.address()])
        .job("worker", ["127.0.0.1:1"])
        .build()
        .unwrap();
    let bytes_max = 1 << 24;
    let storage = match index % 4 {
        0 | 1 => Storage::memory().bytes_max(bytes_max),
        _ => Storage::directory(state.clone()).bytes_max(bytes_max),
    };
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0)).storage(storage);
    let ps = listener.start(config).unwrap();
    let handle = ps.handle();
    let pushing = AtomicBool::new(false);
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let config = WorkerConfig::new(cluster, TaskId::worker(0));
            let mut worker = Worker::connect(config).unwrap();
            worker.join(&[VariableSpec::f32("w", [100_000]).unwrap()], |_| ()).unwrap();
            push_until_stopped(&mut worker, &pushing, &stopped, &handle);
        });
        wait_for(|| pushing.load(Ordering::Acquire));
        handle.stop();
        runtime.block_on(ps.serve(std::future::pending())).unwrap();
        stopped.store(true, Ordering::Release);
    });
    assert_eq!(handle.metrics().gradients_applied, 0);
    if state.exists() {
        // The state is kept until the user removes it.
        assert!(state.join("shard-0/control").exists());
        fs::remove_dir_all(&state).unwrap();
    }
}

/// Sends a push without finishing it, and holds it until the server has stopped.
fn push_until_stopped(
    worker: &mut Worker,
    pushing: &AtomicBool,
    stopped: &AtomicBool,
    handle: &pushpull::PsHandle,
) {
    let token = worker.token().unwrap().unwrap();
    let mut push = worker.begin(token).unwrap();
    push.variable("w", &vec![1.0_f32; 100_000]).unwrap();
    wait_for(|| handle.metrics().push_bytes == 400_000);
    pushing.store(true, Ordering::Release);
    wait_for(|| stopped.load(Ordering::Acquire));
    // Dropping a push and a worker whose server is gone must not wait for it.
    drop(push);
}

fn wait_for(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::yield_now();
    }
}
