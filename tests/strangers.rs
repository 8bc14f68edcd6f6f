//! Strangers beside a training: readers that are silent, elastic workers and coordinators with ever
//! new names, clients that fill the memory of functions, and connections for which no descriptor is
//! left. The training loses nothing, the server keeps its memory, and newcomers get in once the
//! strangers are gone. And attempts to connect that prove nothing, thousands a minute.
//!
//! `PUSHPULL_STRANGERS_SECONDS=N` keeps them for N seconds at least, instead of 3. The last line has
//! the figures: times of steps without strangers and beside them, and the memory of the server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "support/test_process.rs"]
mod test_process;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pushpull::blocking::{FunctionClient, Reader, Worker};
use pushpull::protocol::Refusal;
use pushpull::security::CredentialFiles;
use pushpull::services::{
    Call, Coordinator, CoordinatorConfig, FunctionClientConfig, ServiceError, Value,
};
use pushpull::{ClusterSpec, Params, TaskId, VariableSpec, WorkerConfig};
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{AuthOffer, BodyCrc, ChallengeAnswer, Hello, Role};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, encode, version};
use rustix::process::Signal;
use test_process::{LONG, TestProcess, free_addresses};

/// Descriptors of the daemon: enough for it and the training, too few for the strangers.
const DESCRIPTORS: usize = 96;
/// Coordinators that a shard remembers.
const COORDINATORS: usize = 64;
/// The memory of the variables and, a sixteenth of it, of the functions.
const BYTES_MAX: u64 = 64 << 20;
/// Names of workers that the strangers may take.
const STRANGERS: u32 = 50_000;
/// The memory of the server's code, threads and connections, beside that.
const OWN_BYTES: u64 = 64 << 20;
/// Steps before the strangers come.
const STEPS_ALONE: usize = 2000;

/// The time for which the strangers stay.
fn seconds() -> Duration {
    let seconds = std::env::var("PUSHPULL_STRANGERS_SECONDS");
    let seconds = seconds.map_or(3, |seconds| seconds.parse().expect("a number of seconds"));
    Duration::from_secs(seconds)
}

/// The strangers, and how often each kind got in.
struct Strangers {
    address: String,
    cluster: ClusterSpec,
    is_over: AtomicBool,
    readers: AtomicUsize,
    workers: AtomicUsize,
    coordinators: AtomicUsize,
    /// The number of refusals of clients of functions for want of memory.
    without_memory: AtomicUsize,
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
        for task in 1..STRANGERS {
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
                let client =
                    pushpull::services::FunctionClient::connect(self.client_config()).await?;
                let config = CoordinatorConfig::new().job("ps");
                Coordinator::resume(client, &format!("stranger {index}"), config).await
            });
            if opened.is_ok() {
                self.coordinators.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Strangers {
    fn client_config(&self) -> FunctionClientConfig {
        let soon = Duration::from_millis(500);
        FunctionClientConfig::new(&self.address).connect_timeout(soon).timeout(soon)
    }

    /// Keeps outputs of functions on the server until it has no memory for another, and forgets
    /// them without a word.
    fn clients(&self) {
        let value = Value::zeros::<f32>(&[64 << 10]).unwrap();
        while self.go_on() {
            let Ok(client) = FunctionClient::connect(self.client_config()) else { continue };
            let mut kept = Vec::new();
            let error = loop {
                match client.keep(Call::new("identity").feed("x", value.clone())) {
                    Ok(output) => kept.push(output),
                    Err(error) => break error,
                }
            };
            if let ServiceError::Refused { refusal: Refusal::Memory { .. }, .. } = error {
                self.without_memory.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn counts(&self) -> [usize; 4] {
        [&self.readers, &self.workers, &self.coordinators, &self.without_memory]
            .map(|count| count.load(Ordering::Relaxed))
    }
}

/// The times of steps.
#[derive(Default)]
struct StepTimes(Vec<Duration>);

impl StepTimes {
    /// The median and the 99th percentile.
    fn figures(&mut self) -> [Duration; 2] {
        self.0.sort_unstable();
        [0.5, 0.99].map(|part| self.0[((self.0.len() - 1) as f64 * part) as usize])
    }
}

/// A worker whose gradients are ones, and whose values are known after each step.
struct Trainer {
    worker: Worker,
    params: Params,
    steps: u32,
}

const NAMES: [&str; 3] = ["u", "v", "w"];

impl Trainer {
    fn join(config: WorkerConfig) -> Trainer {
        let mut worker = Worker::connect(config).unwrap();
        let variables = NAMES.map(|name| VariableSpec::f32(name, [300]).unwrap());
        let params = worker.join(&variables, |_| ()).unwrap();
        Trainer { worker, params, steps: 0 }
    }

    /// Trains a step, checks every value before it, and returns its time.
    fn step(&mut self) -> Duration {
        let begun = Instant::now();
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, &mut self.params).unwrap();
        for name in NAMES {
            assert_eq!(self.params.view::<f32>(name).unwrap(), [-(self.steps as f32); 300]);
        }
        let mut gradients = self.worker.gradients();
        for name in NAMES {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0);
        }
        self.worker.push(token, gradients).unwrap();
        self.steps += 1;
        begun.elapsed()
    }
}

/// The most memory that a process has had resident, in bytes.
fn resident_most(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
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
        auth: None,
        features: Default::default(),
    }
}

#[test]
fn a_training_is_exact_beside_strangers_that_take_every_place() {
    let seconds = seconds();
    let address = free_addresses(1).remove(0);
    let limited = format!("ulimit -n {DESCRIPTORS}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limited, env!("CARGO_BIN_EXE_pushpull-ps")]);
    command.args(["--ps-hosts", &address, "--worker-hosts", "a:1", "--elastic-workers"]);
    command.args(["--shards", "2", "--lease-ms", "2000", "--learning-rate", "1"]);
    command.args(["--bytes-max", &BYTES_MAX.to_string()]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut daemon = TestProcess::start("daemon", &mut command);

    let cluster = ClusterSpec::builder().job("ps", [&address]).workers(1).build().unwrap();
    let config = || WorkerConfig::new(cluster.clone(), TaskId::worker(0)).timeout(LONG);
    let mut trainer = Trainer::join(config().connect_timeout(LONG));
    let mut alone = StepTimes((0..STEPS_ALONE).map(|_| trainer.step()).collect());
    let mut beside = StepTimes::default();
    // The server's cluster has one worker. It admits others of their clusters.
    let theirs = ClusterSpec::builder().job("ps", [&address]).workers(STRANGERS);
    let strangers = Strangers {
        address: address.clone(),
        cluster: theirs.build().unwrap(),
        is_over: AtomicBool::new(false),
        readers: AtomicUsize::new(0),
        workers: AtomicUsize::new(0),
        coordinators: AtomicUsize::new(0),
        without_memory: AtomicUsize::new(0),
    };
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
        scope.spawn(|| strangers.clients());
        let begun = Instant::now();
        let mut readers_begun = false;
        // The training goes on until each kind of stranger was there, for the time at least.
        let all_were_there = || {
            let [readers, workers, coordinators, without_memory] = strangers.counts();
            let named = workers > 0 && coordinators > COORDINATORS;
            named && readers > DESCRIPTORS && without_memory > 0
        };
        while begun.elapsed() < seconds || !all_were_there() {
            let counts = strangers.counts();
            assert!(begun.elapsed() < seconds + LONG, "the strangers do not get in: {counts:?}");
            // The others come first: readers leave no descriptor to anybody.
            let [_, _, coordinators, without_memory] = counts;
            let others = coordinators > COORDINATORS && without_memory > 0;
            if others && !std::mem::replace(&mut readers_begun, true) {
                scope.spawn(|| strangers.silent_readers());
            }
            beside.0.push(trainer.step());
        }
    });
    let [readers, workers, coordinators, without_memory] = strangers.counts();
    let resident = resident_most(daemon.child.id());
    let [median, p99] = beside.figures();
    let [median_alone, p99_alone] = alone.figures();
    println!(
        "{{\"test\":\"strangers\",\"steps\":{},\"readers\":{readers},\"workers\":{workers},\
         \"coordinators\":{coordinators},\"without_memory\":{without_memory},\
         \"resident_mib\":{},\"median_us\":{},\"median_alone_us\":{},\"p99_us\":{},\
         \"p99_alone_us\":{}}}",
        trainer.steps,
        resident >> 20,
        median.as_micros(),
        median_alone.as_micros(),
        p99.as_micros(),
        p99_alone.as_micros(),
    );
    assert!(resident < BYTES_MAX + BYTES_MAX / 16 + OWN_BYTES, "{resident} bytes are resident");
    // Newcomers get in once the strangers are gone.
    let mut reader = Reader::connect(config().connect_timeout(LONG)).unwrap();
    let mut values = reader.params();
    assert_eq!(reader.pull(&mut values).unwrap(), u64::from(trainer.steps));
    for name in NAMES {
        assert_eq!(values.view::<f32>(name).unwrap(), [-(trainer.steps as f32); 300]);
    }
    drop(
        FunctionClient::connect(FunctionClientConfig::new(&address).connect_timeout(LONG)).unwrap(),
    );
    trainer.worker.leave().unwrap();
    daemon.signal(Signal::TERM);
    let (status, output, errors) = daemon.finish();
    assert!(status.success() && output.contains("is done"), "{status}: {output}{errors}");
    let named = format!("this process may have {DESCRIPTORS} files open");
    assert!(errors.contains(&named), "the operator is told: {errors}");
}

/// The secrets of the worker and of those who guess one.
const SECRETS: [&str; 2] = ["00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"];

/// The most connections of strangers that wait for their refusals.
const WAITING: usize = 512;

/// Tries to connect without a proof, again and again, each time in another of three ways. Returns the
/// number of attempts.
fn guess(address: &str, is_over: &AtomicBool) -> usize {
    let frame = |hello: Hello| {
        let mut frame = Vec::new();
        encode(&mut frame, &Envelope::default(), &hello.into(), BodyStamp::plain(0));
        frame
    };
    let offer = AuthOffer { token: Text::clipped("worker"), nonce: [3; 32] };
    let offering = Hello { auth: Some(offer.into()), role: Role::Worker {}, ..reader_hello() };
    let mut guessed = frame(offering);
    let answer = ChallengeAnswer { proof: [5; 32] };
    encode(&mut guessed, &Envelope::default(), &answer.into(), BodyStamp::plain(0));
    let ways = [frame(reader_hello()), guessed, vec![0xa5; 100]];
    let mut open = VecDeque::new();
    let mut attempts = 0;
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(mut stream) = TcpStream::connect(address) {
            // The server may have closed it.
            let _ = stream.write_all(&ways[attempts % ways.len()]);
            attempts += 1;
            open.push_back(stream);
        }
        if open.len() > WAITING {
            open.pop_front();
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    attempts
}

#[test]
fn a_training_is_exact_beside_thousands_of_attempts_that_fail() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = |name: &str, secret: &str| {
        let path = folder.path().join(name);
        let lines = format!("token worker {secret} roles=worker,chief,reader\n");
        std::fs::write(&path, lines).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).unwrap();
        path
    };
    let [own, guessed] = [tokens("own", SECRETS[0]), tokens("guessed", SECRETS[1])];
    let address = free_addresses(1).remove(0);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(["--ps-hosts", &address, "--worker-hosts", "a:1", "--learning-rate", "1"]);
    command.arg("--tokens").arg(&own).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut daemon = TestProcess::start("daemon", &mut command);
    let cluster = ClusterSpec::builder().job("ps", [&address]).workers(1).build().unwrap();
    let config = |tokens: &std::path::Path| {
        let credentials = CredentialFiles::new().tokens(tokens).open().unwrap();
        let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0)).timeout(LONG);
        config.credentials(credentials).connect_timeout(LONG)
    };
    let mut trainer = Trainer::join(config(&own));
    let mut alone = StepTimes((0..STEPS_ALONE).map(|_| trainer.step()).collect());
    let before = resident_most(daemon.child.id());
    let mut beside = StepTimes::default();
    let is_over = AtomicBool::new(false);
    let begun = Instant::now();
    let (attempts, readers) = std::thread::scope(|scope| {
        let strangers = scope.spawn(|| guess(&address, &is_over));
        // One of the same machine who proves who it is gets in all the time.
        let readers = scope.spawn(|| {
            let mut readers = 0;
            while !is_over.load(Ordering::Relaxed) {
                let mut reader = Reader::connect(config(&own)).unwrap();
                let mut values = reader.params();
                reader.pull(&mut values).unwrap();
                readers += 1;
            }
            readers
        });
        while begun.elapsed() < seconds() {
            beside.0.push(trainer.step());
        }
        is_over.store(true, Ordering::Relaxed);
        (strangers.join().unwrap(), readers.join().unwrap())
    });
    let a_minute = attempts as f64 / begun.elapsed().as_secs_f64() * 60.0;
    let error = Reader::connect(config(&guessed)).unwrap_err().to_string();
    let expected = "does not prove that it knows the access token worker";
    assert!(error.contains(expected), "{error}");
    let resident = resident_most(daemon.child.id());
    let [median, p99] = beside.figures();
    let [median_alone, p99_alone] = alone.figures();
    println!(
        "{{\"test\":\"strangers\",\"steps\":{},\"attempts\":{attempts},\"a_minute\":{a_minute:.0},\
         \"readers\":{readers},\"resident_mib\":{},\"median_us\":{},\"median_alone_us\":{},\
         \"p99_us\":{},\"p99_alone_us\":{}}}",
        trainer.steps,
        resident >> 20,
        median.as_micros(),
        median_alone.as_micros(),
        p99.as_micros(),
        p99_alone.as_micros(),
    );
    assert!(attempts > 100 && readers > 0, "{attempts} attempts, {readers} readers");
    // 8 KiB for each that waits, and what the system keeps for threads.
    assert!(resident - before < 32 << 20, "{before} bytes became {resident}");
    drop(trainer);
    daemon.signal(Signal::TERM);
    let (status, output, errors) = daemon.finish();
    assert!(status.success(), "{output}{errors}");
    assert!(errors.contains("may not connect"), "{errors}");
    assert!(!SECRETS.iter().any(|secret| errors.contains(secret)), "{errors}");
}
