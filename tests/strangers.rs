//! Strangers beside a training: readers that are silent, elastic workers and coordinators with ever
//! new names, and connections for which no descriptor is left. The training loses nothing, and
//! newcomers get in once the strangers are gone.
//!
//! `PUSHPULL_STRANGERS_SECONDS=N` makes them come, for N seconds at least.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "support/test_process.rs"]
mod test_process;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::services::{ClientConfig, Coordinator, CoordinatorConfig, blocking::Client};
use pushpull::{ClusterSpec, TaskId, VariableSpec, WorkerConfig};
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{BodyCrc, Hello, Role};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, encode, version};
use rustix::process::Signal;
use test_process::{LONG, TestProcess, free_addresses};

/// Descriptors of the daemon: enough for it and the training, too few for the strangers.
const DESCRIPTORS: usize = 96;
/// Coordinators that a shard remembers.
const COORDINATORS: usize = 64;

/// The time for which the strangers stay, if they are to come.
fn seconds() -> Option<Duration> {
    let seconds = std::env::var("PUSHPULL_STRANGERS_SECONDS").ok()?;
    Some(Duration::from_secs(seconds.parse().expect("a number of seconds")))
}

/// The strangers, and how often each kind got in.
struct Strangers {
    address: String,
    cluster: ClusterSpec,
    is_over: AtomicBool,
    readers: AtomicUsize,
    workers: AtomicUsize,
    coordinators: AtomicUsize,
}

impl Strangers {
    fn go_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// A config that gives up soon: strangers are refused most of the time.
    fn config(&self, task: TaskId) -> WorkerConfig {
        let soon = Duration::from_millis(500);
        WorkerConfig::new(self.cluster.clone(), task).connect_timeout(soon).timeout(soon)
    }

    /// Says hello as a reader, again and again, and nothing else. Holds many connections at once.
    fn silent_readers(&self) {
        let mut hello = Vec::new();
        encode(&mut hello, &Envelope::default(), &reader_hello().into(), BodyStamp::plain(0));
        let mut open: Vec<TcpStream> = Vec::new();
        while self.go_on() {
            if open.len() < 2 * DESCRIPTORS
                && let Ok(mut stream) = TcpStream::connect(&self.address)
            {
                // The server may have closed it.
                let _ = stream.write_all(&hello);
                stream.set_nonblocking(true).unwrap();
                open.push(stream);
            }
            // What the server has closed makes room for the next.
            open.retain_mut(|stream| {
                let mut bytes = [0; 4096];
                loop {
                    match stream.read(&mut bytes) {
                        Ok(0) => break false,
                        Ok(_) => {
                            self.readers.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => break error.kind() == std::io::ErrorKind::WouldBlock,
                    }
                }
            });
        }
    }

    /// Joins under ever new names, and goes without a word.
    fn elastic_workers(&self) {
        for task in 1000.. {
            if !self.go_on() {
                return;
            }
            if let Ok(worker) = Worker::connect(self.config(TaskId::worker(task))) {
                self.workers.fetch_add(1, Ordering::Relaxed);
                drop(worker);
            }
        }
    }

    /// Opens calls under ever new names, and goes without a word.
    fn coordinators(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for index in 0.. {
            if !self.go_on() {
                return;
            }
            let opened = runtime.block_on(async {
                let config = ClientConfig::new(&self.address);
                let config = config.connect_timeout(Duration::from_millis(500));
                let client = pushpull::services::Client::with(config).await?;
                let config = CoordinatorConfig::new().job("ps");
                Coordinator::resume(client, &format!("stranger {index}"), config).await
            });
            if opened.is_ok() {
                self.coordinators.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

fn reader_hello() -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Reader {},
        job: Text::clipped("stranger"),
        task: 0,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        seen_arena: 0,
        catalogue: None,
        body_crc: BodyCrc::Auto {},
        identity: List::default(),
        auth: List::default(),
        features: Default::default(),
    }
}

#[test]
fn a_training_is_exact_beside_strangers_that_take_every_place() {
    let Some(seconds) = seconds() else {
        println!("SKIPPED: no strangers come, PUSHPULL_STRANGERS_SECONDS is not set");
        return;
    };
    let address = free_addresses(1).remove(0);
    let limited = format!("ulimit -n {DESCRIPTORS}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limited, env!("CARGO_BIN_EXE_pushpull-ps")]);
    command.args(["--ps-hosts", &address, "--worker-hosts", "a:1", "--elastic-workers"]);
    command.args(["--shards", "2", "--lease-ms", "300", "--bytes-max", "67108864"]);
    command.args(["--learning-rate", "1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut daemon = TestProcess::start("daemon", &mut command);

    let cluster = ClusterSpec::builder().job("ps", [&address]).workers(1).build().unwrap();
    let config = || WorkerConfig::new(cluster.clone(), TaskId::worker(0)).timeout(LONG);
    let mut worker = Worker::connect(config().connect_timeout(LONG)).unwrap();
    let variables = ["u", "v", "w"].map(|name| VariableSpec::f32(name, [300]).unwrap());
    let mut params = worker.join(&variables, |_| ()).unwrap();
    let strangers = Strangers {
        address: address.clone(),
        cluster: cluster.clone(),
        is_over: AtomicBool::new(false),
        readers: AtomicUsize::new(0),
        workers: AtomicUsize::new(0),
        coordinators: AtomicUsize::new(0),
    };
    let mut steps = 0_u32;
    std::thread::scope(|scope| {
        // A panic of the training ends the strangers as well.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _over = Over(&strangers.is_over);
        scope.spawn(|| strangers.elastic_workers());
        scope.spawn(|| strangers.coordinators());
        let begun = Instant::now();
        let mut readers_begun = false;
        // The training goes on until each kind of stranger was there, for the time at least.
        let all_were_there = || {
            let [readers, workers, coordinators] =
                [&strangers.readers, &strangers.workers, &strangers.coordinators]
                    .map(|count| count.load(Ordering::Relaxed));
            readers > DESCRIPTORS && workers > 0 && coordinators > COORDINATORS
        };
        while begun.elapsed() < seconds || !all_were_there() {
            assert!(begun.elapsed() < seconds + LONG, "the strangers do not get in");
            // Names come first: readers leave no descriptor to anybody.
            let named = strangers.coordinators.load(Ordering::Relaxed) > COORDINATORS;
            if named && !std::mem::replace(&mut readers_begun, true) {
                scope.spawn(|| strangers.silent_readers());
            }
            let token = worker.token().unwrap().unwrap();
            worker.pull(&token, &mut params).unwrap();
            for name in ["u", "v", "w"] {
                assert_eq!(params.view::<f32>(name).unwrap(), [-(steps as f32); 300]);
            }
            let mut gradients = worker.gradients();
            for name in ["u", "v", "w"] {
                gradients.view_mut::<f32>(name).unwrap().fill(1.0);
            }
            worker.push(token, gradients).unwrap();
            steps += 1;
        }
    });
    println!(
        "{steps} steps beside {} silent readers, {} workers and {} coordinators",
        strangers.readers.load(Ordering::Relaxed),
        strangers.workers.load(Ordering::Relaxed),
        strangers.coordinators.load(Ordering::Relaxed)
    );
    // Newcomers get in once the strangers are gone.
    let mut reader = Reader::connect(config().connect_timeout(LONG)).unwrap();
    let mut values = reader.params();
    assert_eq!(reader.pull(&mut values).unwrap(), u64::from(steps));
    for name in ["u", "v", "w"] {
        assert_eq!(values.view::<f32>(name).unwrap(), [-(steps as f32); 300]);
    }
    drop(Client::with(ClientConfig::new(&address).connect_timeout(LONG)).unwrap());
    worker.leave().unwrap();
    daemon.signal(Signal::TERM);
    let (status, output, errors) = daemon.finish();
    assert!(status.success() && output.contains("is done"), "{status}: {output}{errors}");
    let named = format!("this process may have {DESCRIPTORS} files open");
    assert!(errors.contains(&named), "the operator is told: {errors}");
}
