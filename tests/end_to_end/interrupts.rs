//! Blocking calls that another thread cancels, in every kind of wait.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, TrainingSession, Worker};
use pushpull::training::{GradientOutcome, StopReason, TrainingConfig};
use pushpull::worker::{Interrupt, Sequence};
use pushpull::{ClusterSpec, Error, Params, Pulled, TaskId, Token, VariableSpec, WorkerConfig};

use super::cluster::{LONG, TestCluster, listen, spec, vector};
use super::proxy::Proxy;

/// The elements of `w` where a push is to be received in full by the network, and where not.
const SMALL: u64 = 4;
const LARGE: u64 = 8 << 20;

/// The most workers in a cluster of these tests. Each cancelled worker has an index of its own, so
/// that its thread can be found by name among those of other tests.
const WORKERS: usize = 1000;

fn variables(elements: u64) -> [VariableSpec; 5] {
    let plain = VariableSpec::f32("plain", [2]).unwrap().plain();
    let rows = VariableSpec::f32("rows", [8, 2]).unwrap().sparse();
    let local = vector("local", 2).local();
    let mean = vector("mean", 2).mean_every_steps(1);
    [vector("w", elements), plain, rows, local, mean]
}

/// Gradients of ones for `w`.
fn ones(worker: &mut Worker) -> pushpull::Gradients {
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    gradients
}

/// A call of a worker that waits for servers.
struct BlockingCall {
    name: &'static str,
    /// The operation that the error names.
    doing: &'static str,
    /// The worker that calls: the chief is 0.
    worker: u32,
    /// The elements of `w`.
    elements: u64,
    /// Whether an interrupt that was raised before refuses the call.
    is_refused: bool,
    call: fn(&mut Worker, Token, &mut Params) -> Result<(), Error>,
}

/// Returns a call of a worker other than the chief, on a small variable.
fn call(
    name: &'static str,
    doing: &'static str,
    call: fn(&mut Worker, Token, &mut Params) -> Result<(), Error>,
) -> BlockingCall {
    BlockingCall { name, doing, worker: 1, elements: SMALL, is_refused: true, call }
}

fn blocking_calls() -> Vec<BlockingCall> {
    let push = |worker: &mut Worker, token: Token, _: &mut Params| {
        let gradients = ones(worker);
        worker.push(token, gradients).map(|_| ())
    };
    let streamed = |worker: &mut Worker, token: Token, _: &mut Params| {
        let mut push = worker.begin(token)?;
        push.variable("w", &vec![1.0_f32; worker_elements(worker)])?;
        push.rows("rows", &[1], &[1.0_f32; 2])?;
        push.finish().map(|_| ())
    };
    vec![
        // The token that this worker holds is the only one.
        call("token", "take a token", |worker, token, _| {
            let next = worker.token().map(|_| ());
            drop(token);
            next
        }),
        call("pull", "pull", |worker, token, params| worker.pull(&token, params).map(|_| ())),
        call("pull_variable", "pull", |worker, token, _| {
            worker.pull_variable(&token, "w", &mut [0.0_f32; SMALL as usize]).map(|_| ())
        }),
        call("pull_rows", "pull rows", |worker, token, _| {
            worker.pull_rows(&token, "rows", &[3, 1], &mut [0.0_f32; 4]).map(|_| ())
        }),
        call("push", "push", push),
        BlockingCall { elements: LARGE, ..call("push of a large variable", "push", push) },
        call("push_and_pull", "push", |worker, token, params| {
            let gradients = ones(worker);
            worker.push_and_pull(token, gradients, params).map(|_| ())
        }),
        call("streamed push", "push", streamed),
        BlockingCall { elements: LARGE, ..call("streamed push, large", "push", streamed) },
        BlockingCall {
            is_refused: false,
            ..call("start_push", "push", |worker, token, _| {
                let gradients = ones(worker);
                worker.start_push(token, gradients).wait().map(|_| ())
            })
        },
        BlockingCall {
            is_refused: false,
            ..call("start_pull", "pull", |worker, token, params| {
                worker.start_pull(&token, params).wait().map(|_| ())
            })
        },
        BlockingCall {
            is_refused: false,
            ..call("start_pull_variable", "pull", |worker, token, _| {
                let mut values = [0.0_f32; SMALL as usize];
                worker.start_pull_variable(&token, "w", &mut values).wait().map(|_| ())
            })
        },
        call("resume", "push", |worker, token, _| {
            let gradients = ones(worker);
            let started = worker.start_push(token, gradients);
            let resumed = worker.resume(Sequence(1)).map(|_| ());
            drop(started);
            resumed
        }),
        call("assign", "assign", |worker, _, _| worker.assign("plain", &[1.0_f32; 2])),
        call("assign_add", "add", |worker, _, _| worker.assign_add("plain", &[1.0_f32; 2])),
        call("assign_rows", "assign rows", |worker, _, _| {
            worker.assign_rows("rows", &[2], &[1.0_f32; 2])
        }),
        call("average", "average", |worker, _, params| worker.average(params, 1)),
        BlockingCall {
            worker: 0,
            ..call("publish", "publish", |worker, _, params| worker.publish(params))
        },
        BlockingCall {
            worker: 0,
            ..call("save", "save a checkpoint", |worker, _, _| worker.save(b"").map(|_| ()))
        },
    ]
}

fn worker_elements(worker: &Worker) -> usize {
    let catalogue = worker.catalogue().unwrap();
    catalogue.variables()[0].shape().elements() as usize
}

/// A server with one step to make, and a proxy that can keep it from its clients.
struct HiddenServer {
    cluster: TestCluster,
    proxy: Proxy,
    /// The cluster with the proxy's address.
    spec: ClusterSpec,
}

impl HiddenServer {
    fn start() -> HiddenServer {
        let cluster = TestCluster::sgd(WORKERS, |config| config.last_step(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let spec = spec([listener.local_addr().unwrap().to_string()], WORKERS);
        let proxy = Proxy::start(listener, cluster.handle().address().to_owned(), 0, 0);
        HiddenServer { cluster, proxy, spec }
    }

    /// The configuration of a worker behind the proxy.
    fn config(&self, worker: u32) -> WorkerConfig {
        WorkerConfig::new(self.spec.clone(), TaskId::worker(worker))
    }
}

/// Makes a call in a thread, and raises the interrupt once that thread sleeps in it.
fn cancel<R: Send>(interrupt: &Interrupt, call: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| {
        let (sender, caller) = std::sync::mpsc::channel();
        let calling = scope.spawn(move || {
            sender.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
            call()
        });
        let status = std::path::Path::new("/proc").join(caller.recv().unwrap()).join("stat");
        let is_asleep = || {
            let status = std::fs::read_to_string(&status).unwrap_or_default();
            status.rsplit_once(')').is_some_and(|(_, state)| state.trim_start().starts_with('S'))
        };
        // The call may sleep for a moment on its way.
        let mut asleep = 0;
        while asleep < 5 && !calling.is_finished() {
            asleep = if is_asleep() { asleep + 1 } else { 0 };
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!calling.is_finished(), "the call does not wait");
        interrupt.raise();
        let deadline = Instant::now() + LONG;
        while !calling.is_finished() {
            assert!(Instant::now() < deadline, "the call goes on");
            thread::sleep(Duration::from_millis(1));
        }
        calling.join().unwrap()
    })
}

/// Waits until no thread of this process has this name.
fn await_end_of_thread(name: &str) {
    let has_thread = || {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = threads.map(|thread| std::fs::read_to_string(thread.path().join("comm")));
        names.flatten().any(|other| other.trim_end() == name)
    };
    // The kernel lists a thread for a moment after it was joined.
    let deadline = Instant::now() + LONG;
    while has_thread() {
        assert!(Instant::now() < deadline, "{name} is left");
        thread::sleep(Duration::from_millis(1));
    }
}

fn interrupted<T>(doing: &'static str) -> Result<T, Error> {
    Err(Error::Interrupted { doing })
}

/// A worker with the only token makes the call and is cancelled, in it or before it. Then the
/// other worker ends the training: the only step is made once, by either of both.
fn check(row: &BlockingCall, index: u32, is_raised_before: bool) {
    let name = row.name;
    let server = HiddenServer::start();
    let (caller, other) = if row.worker == 0 { (0, index) } else { (index, 0) };
    let mut worker = Worker::connect(server.config(caller)).unwrap();
    let mut other = server.cluster.worker(other);
    let [chief, follower] = match caller {
        0 => [&mut worker, &mut other],
        _ => [&mut other, &mut worker],
    };
    chief.join(&variables(row.elements), |_| ()).unwrap();
    let mut params = follower.join(&variables(row.elements), |_| ()).unwrap();
    let token = worker.token().unwrap().unwrap();
    let interrupt = worker.interrupt();
    let result = match is_raised_before {
        true => {
            interrupt.raise();
            (row.call)(&mut worker, token, &mut params)
        }
        false => {
            server.proxy.pause();
            let result = cancel(&interrupt, || (row.call)(&mut worker, token, &mut params));
            server.proxy.resume();
            result
        }
    };
    assert_eq!(result, interrupted(row.doing), "{name}");
    assert_eq!(worker.token().map(|_| ()), interrupted("take a token"), "{name}");
    assert_eq!(worker.outcome(Sequence(1)), interrupted("ask for an outcome"), "{name}");
    // A machine under load may not answer in the time that an interrupted worker has.
    let left = worker.leave();
    assert!(left.is_ok() || left == interrupted("leave"), "{name}: {left:?}");
    if caller != 0 {
        await_end_of_thread(&format!("worker-{caller}"));
    }
    if let Some(token) = other.token().unwrap() {
        let gradients = ones(&mut other);
        other.push(token, gradients).unwrap();
    }
    let mut reader = Reader::connect(server.cluster.config(0)).unwrap();
    let mut values = reader.params();
    reader.pull(&mut values).unwrap();
    assert_eq!(values.view::<f32>("w").unwrap()[0], -1.0, "{name}");
    server.cluster.stop();
}

#[test]
fn a_call_that_waits_for_a_server_is_cancelled() {
    for (row, index) in blocking_calls().iter().zip(100..) {
        check(row, index, false);
    }
}

#[test]
fn an_interrupt_that_was_raised_refuses_every_call() {
    let calls = blocking_calls();
    for (row, index) in calls.iter().filter(|row| row.is_refused).zip(200..) {
        check(row, index, true);
    }
}

#[test]
fn a_wait_for_a_token_is_cancelled() {
    let cluster = TestCluster::sgd(WORKERS, |config| config.last_step(1));
    let mut holder = cluster.worker(0);
    let mut waiter = cluster.worker(300);
    holder.join(&variables(SMALL), |_| ()).unwrap();
    waiter.join(&variables(SMALL), |_| ()).unwrap();
    let token = holder.token().unwrap().unwrap();
    let result = cancel(&waiter.interrupt(), || waiter.token().map(|_| ()));
    assert_eq!(result, interrupted("take a token"));
    drop(token);
    // It would go to the other worker, if that still waited.
    assert!(holder.token().unwrap().is_some());
    drop(waiter);
    await_end_of_thread("worker-300");
    cluster.stop();
}

#[test]
fn connecting_to_absent_servers_is_cancelled() {
    // One port is closed, the other accepts connections and does not answer.
    let closed = listen();
    let silent = listen();
    let addresses = [closed.address(), silent.address()];
    drop(closed);
    for (address, index) in addresses.into_iter().zip(400..) {
        let cluster = spec([address], WORKERS);
        for reads in [false, true] {
            let interrupt = Interrupt::new();
            let config = WorkerConfig::new(cluster.clone(), TaskId::worker(index));
            let config = config.interrupt(&interrupt);
            let connect = || match reads {
                true => Reader::connect(config).map(|_| ()),
                false => Worker::connect(config).map(|_| ()),
            };
            assert_eq!(cancel(&interrupt, connect), interrupted("connect"), "{reads}");
            await_end_of_thread(&format!("worker-{index}"));
        }
    }
}

#[test]
fn waits_for_a_chief_that_never_comes_are_cancelled() {
    let cluster = TestCluster::sgd(WORKERS, |config| config);
    let mut worker = cluster.worker(500);
    let result = cancel(&worker.interrupt(), || worker.join(&variables(SMALL), |_| ()).map(|_| ()));
    assert_eq!(result, interrupted("join"));
    assert_eq!(worker.join(&variables(SMALL), |_| ()).map(|_| ()), interrupted("join"), "again");
    drop(worker);
    await_end_of_thread("worker-500");
    let interrupt = Interrupt::new();
    let config = cluster.config(501).interrupt(&interrupt);
    let result = cancel(&interrupt, || Reader::connect(config).map(|_| ()));
    assert_eq!(result, interrupted("connect"));
    await_end_of_thread("worker-501");
    cluster.stop();
}

#[test]
fn a_readers_pulls_are_cancelled() {
    let server = HiddenServer::start();
    let mut chief = server.cluster.worker(0);
    chief.join(&variables(SMALL), |_| ()).unwrap();
    for (pulls_rows, index) in [(false, 600), (true, 601)] {
        let mut reader = Reader::connect(server.config(index)).unwrap();
        let mut params = reader.params();
        let interrupt = reader.interrupt();
        let mut pull = || match pulls_rows {
            true => reader.pull_rows("rows", &[1], &mut [0.0_f32; 2]).map(|_| ()),
            false => reader.pull(&mut params).map(|_| ()),
        };
        server.proxy.pause();
        let doing = if pulls_rows { "pull rows" } else { "pull" };
        assert_eq!(cancel(&interrupt, &mut pull), interrupted(doing));
        server.proxy.resume();
        assert_eq!(pull(), interrupted(doing), "a later call");
        drop(reader);
        await_end_of_thread(&format!("worker-{index}"));
    }
    server.cluster.stop();
}

#[test]
fn an_interrupted_worker_leaves_a_silent_server() {
    let server = HiddenServer::start();
    for is_raised_before in [true, false] {
        let mut chief = Worker::connect(server.config(0)).unwrap();
        chief.join(&variables(SMALL), |_| ()).unwrap();
        let interrupt = chief.interrupt();
        server.proxy.pause();
        if is_raised_before {
            interrupt.raise();
            assert_eq!(chief.finish(), interrupted("finish the training"));
            assert_eq!(chief.leave(), interrupted("leave"));
        } else {
            assert_eq!(cancel(&interrupt, || chief.leave()), interrupted("leave"));
        }
        server.proxy.resume();
    }
    server.cluster.stop();
}

#[test]
fn an_interrupted_chief_still_ends_the_training_for_all() {
    let cluster = TestCluster::sgd(2, |config| config);
    let mut chief = cluster.worker(0);
    let mut other = cluster.worker(1);
    chief.join(&variables(SMALL), |_| ()).unwrap();
    other.join(&variables(SMALL), |_| ()).unwrap();
    chief.interrupt().raise();
    assert_eq!(chief.token().map(|_| ()), interrupted("take a token"));
    let finished = chief.finish();
    assert!(finished.is_ok() || finished == interrupted("finish the training"), "{finished:?}");
    while let Some(token) = other.token().unwrap() {
        drop(token);
    }
    cluster.stop();
}

#[test]
fn a_session_ends_whatever_it_waits_for_and_leaves_a_silent_server() {
    for waits_for in ["rows", "push", "token"] {
        let server = HiddenServer::start();
        let interrupt = Interrupt::new();
        let config = TrainingConfig::new(server.config(0)).finish_for_all(true);
        let config = config.variables(variables(SMALL)).interrupt(&interrupt);
        let mut session = TrainingSession::start(config).unwrap();
        let mut step = session.step().unwrap().unwrap();
        step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
        server.proxy.pause();
        match waits_for {
            "rows" => {
                let pull = || step.pull_rows("rows", &[1], &mut [0.0_f32; 2]);
                assert_eq!(cancel(&interrupt, pull).unwrap(), Pulled::Stale);
            }
            "push" => {
                let lost = GradientOutcome::Lost(Error::Interrupted { doing: "push" });
                assert_eq!(cancel(&interrupt, || step.push()).unwrap(), lost);
            }
            _ => {
                drop(step);
                let next = || session.step().map(|step| step.is_some());
                assert!(!cancel(&interrupt, next).unwrap());
            }
        }
        // No answer of the server is needed to end.
        assert_eq!(session.close().unwrap().reason, StopReason::Interrupted, "{waits_for}");
        server.proxy.resume();
        server.cluster.stop();
    }
}
