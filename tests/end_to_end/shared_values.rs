//! Shared values, read by a client that speaks the protocol itself and by workers.

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use pushpull::blocking::Worker;
use pushpull::cluster::ShardId;
use pushpull::server::Network;
use pushpull::{
    ClusterSpec, Params, Ps, PsConfig, Pulled, Push, Sgd, Storage, Synchronous, TaskId,
    VariableSpec, WorkerConfig,
};
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RequestId, RestoreEpoch};
use pushpull_common::protocol::message::{
    BodyCrc, Hello, Pull, Role, Selection, ShareValues, SharedValues,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameReader, Message, Poll, Refusal, encode, version,
};
use pushpull_common::shared_values::{
    AtomicWords, Geometry, PinError, SharedValuesReader, ValueCounts,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::cluster::{LONG, TestCluster, block_on, spec, vector};
use crate::secured::leaves_out_plain_frames;

/// Starts a server on loopback and on a Unix socket in `folder`.
fn cluster(folder: &Path, configure: impl Fn(PsConfig) -> PsConfig) -> (TestCluster, String) {
    let socket = format!("unix:{}", folder.join("ps").display());
    let listener = block_on(async {
        let unix = Ps::listen(&socket).await.unwrap();
        Ps::listen("127.0.0.1:0").await.unwrap().also(unix)
    });
    let spec = spec([listener.address()], 1);
    let config = PsConfig::new(spec.clone(), TaskId::ps(0), Sgd::new(1.0));
    let servers = vec![listener.start(configure(config)).unwrap()];
    (TestCluster { spec, servers }, socket)
}

/// A reader's connection, with the descriptors that it has received.
struct RawConnection<S> {
    stream: S,
    reader: FrameReader,
    descriptors: Vec<File>,
}

impl<S: AsFd + Write> RawConnection<S> {
    fn send(&mut self, message: Message) {
        let envelope = Envelope { request: RequestId(1), ..Envelope::default() };
        let mut frame = Vec::new();
        encode(&mut frame, &envelope, &message, BodyStamp::NONE);
        self.stream.write_all(&frame).unwrap();
    }

    fn receive(&mut self) -> Message {
        let stream = &self.stream;
        let descriptors = &mut self.descriptors;
        let mut source = |slices: &mut [IoSliceMut<'_>]| -> io::Result<usize> {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let read = recvmsg(stream, slices, &mut control, flags)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights.map(File::from));
                }
            }
            Ok(read.bytes)
        };
        match self.reader.poll(&mut source).unwrap() {
            Poll::Frame(_, message) => message,
            other => panic!("expected a frame, got {other:?}"),
        }
    }

    fn open(stream: S) -> (RawConnection<S>, String) {
        let mut connection =
            RawConnection { stream, reader: FrameReader::new(), descriptors: Vec::new() };
        connection.send(hello().into());
        let Message::Welcome(welcome) = connection.receive() else { panic!("expected a welcome") };
        connection.reader.open();
        (connection, welcome.unix_address.as_str().to_owned())
    }
}

fn hello() -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Reader {},
        job: Text::clipped("worker"),
        task: 9,
        shard: ShardId::default(),
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_arena: 0,
        seen_step: GlobalStep(0),
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: List::default(),
        auth: None,
        features: Default::default(),
    }
}

fn connect_unix(socket: &str) -> RawConnection<UnixStream> {
    let stream = UnixStream::connect(socket.strip_prefix("unix:").unwrap()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    RawConnection::open(stream).0
}

struct Mapped(MmapRaw);

impl Mapped {
    fn word(&self, word: usize) -> &AtomicU64 {
        assert!(word < self.0.len() / 8);
        // SAFETY: the assertion keeps the word inside the mapping. The mapping starts at a page, so
        // the word is aligned. This type accesses the word only as an atomic.
        unsafe { AtomicU64::from_ptr(self.0.as_mut_ptr().cast::<u64>().add(word)) }
    }
}

impl AtomicWords for Mapped {
    fn load(&self, word: usize) -> u64 {
        u64::from_le(self.word(word).load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        self.word(word).store(value.to_le(), Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// The values that a server shares over a connection.
struct SharedReader {
    reader: SharedValuesReader<Mapped>,
    logical_blocks: u32,
    blocks: Vec<u32>,
}

impl SharedReader {
    fn of(connection: &mut RawConnection<UnixStream>) -> SharedReader {
        connection.send(ShareValues { wants: 1 }.into());
        let Message::SharedValues(shared) = connection.receive() else {
            panic!("nothing is shared")
        };
        let SharedValues { offset, block_bytes, stride, blocks, logical_blocks, .. } = shared;
        let geometry = Geometry { offset, block_bytes, stride, blocks, logical_blocks };
        geometry.check(shared.values_bytes).unwrap();
        let [block_table, reader_slot, values] = &std::mem::take(&mut connection.descriptors)[..]
        else {
            panic!("expected three descriptors")
        };
        for file in [block_table, values] {
            assert!(MmapOptions::new().map_raw(file).is_err(), "it must be read-only");
        }
        let read = |file| Mapped(MmapOptions::new().map_raw_read_only(file).unwrap());
        let reader_slot = Mapped(MmapOptions::new().map_raw(reader_slot).unwrap());
        let reader = SharedValuesReader::new(
            read(block_table),
            reader_slot,
            read(values),
            geometry,
            shared.owner_generation,
        );
        SharedReader { reader, logical_blocks, blocks: Vec::new() }
    }

    fn pin(&mut self) -> Result<ValueCounts, PinError> {
        self.reader.pin(0..self.logical_blocks, &mut self.blocks)
    }

    /// Copies the first `elements` f32 values from the pinned blocks.
    fn copy(&self, elements: u64) -> Vec<f32> {
        let geometry = self.reader.geometry();
        let pieces = geometry.pieces(0..4 * elements).flat_map(|(logical, within)| {
            let start = geometry.start(self.blocks[logical as usize]);
            (start + within.start) / 8..(start + within.end) / 8
        });
        let words = pieces.map(|word| self.reader.values().load(word as usize));
        words.flat_map(|word| [word as u32, (word >> 32) as u32]).map(f32::from_bits).collect()
    }
}

const SMALL: u64 = 2;
const LARGE: u64 = 200_000;

/// Pushes a gradient of ones for `small`, and for `large` if `both` is set.
fn push(worker: &mut Worker, both: bool) {
    let token = worker.token().unwrap().unwrap();
    let mut push = worker.begin(token).unwrap();
    push.variable("small", &[1_f32; SMALL as usize]).unwrap();
    if both {
        push.variable("large", &[1_f32; LARGE as usize]).unwrap();
    }
    push.finish().unwrap();
}

#[test]
fn a_reader_of_shared_values_sees_whole_versions_during_updates() {
    let folder = tempfile::tempdir().unwrap();
    let (cluster, socket) = cluster(folder.path(), |config| config);
    let mut worker = cluster.worker(0);
    worker.join(&[vector("small", SMALL), vector("large", LARGE)], |_| ()).unwrap();
    let mut connection = connect_unix(&socket);
    let mut client = SharedReader::of(&mut connection);
    let reads = std::thread::spawn(move || {
        let mut versions = Vec::new();
        let mut pulls = 0;
        while versions.last() != Some(&200) {
            let Ok(counts) = client.pin() else {
                std::thread::yield_now();
                continue;
            };
            let values = client.copy(SMALL + LARGE);
            client.reader.unpin(4 * (SMALL + LARGE)).unwrap();
            pulls += 1;
            // Every fourth push updates both variables.
            let small = counts.version as f32;
            let large = counts.version.div_ceil(4) as f32;
            let (first, others) = values.split_at(SMALL as usize);
            assert_eq!(first, [-small; SMALL as usize]);
            assert!(others.iter().all(|&value| value == -large), "version {}", counts.version);
            versions.push(counts.version);
        }
        assert!(versions.is_sorted());
        drop(connection);
        pulls
    });
    (0..200).for_each(|version| push(&mut worker, version % 4 == 0));
    let pulls = reads.join().unwrap();
    // The server counts the last pulls when the connection ends.
    while cluster.handle().metrics().direct_pulls < pulls {
        std::thread::yield_now();
    }
    assert_eq!(cluster.handle().metrics().direct_pulls, pulls);
    cluster.stop();
}

#[test]
fn a_reader_that_pins_values_for_too_long_is_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let timeout = Duration::from_millis(200);
    let (cluster, socket) = cluster(folder.path(), |config| {
        // The least spare memory: a second push needs the blocks that the first one frees.
        config
            .network(Network::default().stall_timeout(timeout))
            .storage(Storage::memory().pin_bytes_max(1))
    });
    let mut worker = cluster.worker(0);
    worker.join(&[vector("small", SMALL), vector("large", LARGE)], |_| ()).unwrap();
    let mut connection = connect_unix(&socket);
    let mut client = SharedReader::of(&mut connection);
    client.pin().unwrap();
    (0..3).for_each(|_| push(&mut worker, true));
    assert_eq!(client.reader.unpin(0), Err(PinError::Closed));
    let mut rest = [0; 1];
    let closed = recvmsg_once(&connection.stream, &mut rest);
    assert_eq!(closed, 0, "the connection must be closed");
    assert_eq!(cluster.handle().metrics().connections_faulted, 1);

    // A reader that unpins in time delays no push.
    let mut connection = connect_unix(&socket);
    let mut client = SharedReader::of(&mut connection);
    for _ in 0..6 {
        client.pin().unwrap();
        push(&mut worker, true);
        assert_eq!(client.reader.unpin(0), Ok(()));
    }
    assert_eq!(cluster.handle().metrics().connections_faulted, 1);
    cluster.stop();
    assert_eq!(client.pin().unwrap_err(), PinError::Closed, "the server has stopped");
}

fn recvmsg_once(stream: &UnixStream, rest: &mut [u8]) -> usize {
    let mut slices = [IoSliceMut::new(rest)];
    recvmsg(stream, &mut slices, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())
        .unwrap()
        .bytes
}

#[test]
fn a_welcome_over_tcp_names_the_unix_socket_of_shared_values() {
    if leaves_out_plain_frames() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for shared in [true, false] {
        let (cluster, socket) = cluster(folder.path(), |config| {
            config.network(Network::default().shared_memory(shared))
        });
        let mut worker = cluster.worker(0);
        worker.join(&[vector("small", SMALL)], |_| ()).unwrap();
        let stream = TcpStream::connect(cluster.handle().address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let (mut connection, unix_address) = RawConnection::open(stream);
        assert_eq!(unix_address, if shared { &socket } else { "" });
        connection.send(ShareValues { wants: 1 }.into());
        let Message::Refused(refused) = connection.receive() else { panic!("expected a refusal") };
        assert!(matches!(refused.refusal, Refusal::Unsupported { kind: 6, .. }));
        connection.send(Pull { selection: Selection::All {} }.into());
        assert!(matches!(connection.receive(), Message::Pulled(_)), "pulls must still work");

        let mut connection = connect_unix(&socket);
        connection.send(ShareValues { wants: 1 }.into());
        assert_eq!(matches!(connection.receive(), Message::SharedValues(_)), shared);
        cluster.stop();
    }
}

/// Starts a server that listens only on a Unix socket.
pub(super) fn same_host_only(
    folder: &Path,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> TestCluster {
    let socket = format!("unix:{}", folder.join("ps").display());
    let listener = block_on(Ps::listen(&socket)).unwrap();
    let spec = spec([listener.address()], 2);
    let servers = vec![start(listener, &spec, configure)];
    TestCluster { spec, servers }
}

pub(super) fn start(
    listener: pushpull::server::PsListener,
    spec: &ClusterSpec,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> Ps {
    listener.start(configure(PsConfig::new(spec.clone(), TaskId::ps(0), Sgd::new(1.0)))).unwrap()
}

fn variables() -> Vec<VariableSpec> {
    let rows = VariableSpec::f32("rows", [100, 4]).unwrap().sparse();
    vec![vector("small", SMALL), rows, vector("large", LARGE)]
}

/// Trains one step of the only worker, and checks that the values include all earlier steps.
fn train(worker: &mut Worker, params: &mut Params, step: u64) {
    let token = worker.token().unwrap().unwrap();
    assert_eq!(worker.pull(&token, params).unwrap(), Pulled::Pulled { step });
    for name in ["small", "large"] {
        let values = params.view::<f32>(name).unwrap();
        assert!(values.iter().all(|&value| value == -(step as f32)), "{name} at {step}");
    }
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("small").unwrap().fill(1.0);
    gradients.view_mut::<f32>("large").unwrap().fill(1.0);
    let applied = worker.push(token, gradients).unwrap();
    assert!(matches!(applied, Push::Applied { step: now, staleness: 0 } if now == step + 1));
}

#[test]
fn a_worker_reads_shared_values_if_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&dyn Fn(WorkerConfig) -> WorkerConfig, bool); 3] = [
        (&|config| config, true),
        (&|config| config.shared_memory(false), false),
        (&|config| config.pull_codec(pushpull_common::codec::Codec::F16), false),
    ];
    for (configure, direct) in cases {
        let cluster = same_host_only(folder.path(), |config| config);
        let mut worker = Worker::connect(configure(cluster.config(0))).unwrap();
        let mut params = worker.join(&variables(), |_| ()).unwrap();
        let asked = cluster.handle().metrics().pulls;
        (0..20).for_each(|step| train(&mut worker, &mut params, step));
        worker.leave().unwrap();
        // The pull of the join may come before or after the values are shared.
        let expected = if direct { (21 - asked, 0) } else { (0, 20) };
        await_counts(&cluster, |metrics| (metrics.direct_pulls, metrics.pulls - asked) == expected);
        cluster.stop();
    }
}

/// Waits for the metrics: workers report direct pulls only now and then.
pub(super) fn await_counts(
    cluster: &TestCluster,
    counted: impl Fn(&pushpull::server::Metrics) -> bool,
) {
    let began = std::time::Instant::now();
    while !counted(&cluster.handle().metrics()) {
        assert!(began.elapsed() < LONG, "{:?}", cluster.handle().metrics());
        std::thread::yield_now();
    }
}

#[test]
fn a_restarted_server_shares_its_values_again() {
    let folder = tempfile::tempdir().unwrap();
    let state = tempfile::tempdir().unwrap();
    let stored = |config: PsConfig| {
        let state = state.path().to_owned();
        config.storage(Storage::directory(state).bytes_max(1 << 30))
    };
    let mut cluster = same_host_only(folder.path(), stored);
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&variables(), |_| ()).unwrap();
    for life in 0..3 {
        (0..5).for_each(|step| train(&mut worker, &mut params, 5 * life + step));
        await_counts(&cluster, |metrics| metrics.direct_pulls >= 4);
        let spec = cluster.spec.clone();
        cluster.suspend();
        let listener = block_on(Ps::listen(spec.task_address("ps", 0).unwrap())).unwrap();
        let servers = vec![start(listener, &spec, stored)];
        cluster = TestCluster { spec, servers };
    }
    drop(worker);
    cluster.stop();
}

#[test]
fn synchronous_replicas_read_the_values_of_their_tokens_step() {
    let folder = tempfile::tempdir().unwrap();
    let mode = Synchronous::new(2);
    let cluster = same_host_only(folder.path(), |config| config.mode(mode).shards(2));
    let replicas = [0, 1].map(|index| {
        let config = cluster.config(index);
        std::thread::spawn(move || {
            let mut worker = Worker::connect(config).unwrap();
            let variables = [vector("small", SMALL), vector("large", LARGE)];
            let mut params = worker.join(&variables, |_| ()).unwrap();
            let mut next = None;
            for step in 0..30 {
                let token = next.take().unwrap_or_else(|| {
                    let token = worker.token().unwrap().unwrap();
                    let pulled = worker.pull(&token, &mut params).unwrap();
                    assert_eq!(pulled, Pulled::Pulled { step });
                    token
                });
                for name in ["small", "large"] {
                    let values = params.view::<f32>(name).unwrap();
                    assert!(values.iter().all(|&value| value == -(step as f32)), "{name}");
                }
                let mut gradients = worker.gradients();
                gradients.view_mut::<f32>("small").unwrap().fill(1.0);
                gradients.view_mut::<f32>("large").unwrap().fill(1.0);
                let push = if step % 2 == 0 {
                    let stepped = worker.push_and_pull(token, gradients, &mut params).unwrap();
                    next = stepped.next.unwrap();
                    stepped.push
                } else {
                    worker.push(token, gradients).unwrap()
                };
                assert!(matches!(push, Push::Accepted { .. }));
            }
            worker.leave().unwrap();
        })
    });
    replicas.into_iter().for_each(|replica| replica.join().unwrap());
    await_counts(&cluster, |metrics| metrics.direct_pulls > 100);
    cluster.stop();
}

#[test]
fn shared_values_read_after_a_push_include_it() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = same_host_only(folder.path(), |config| config);
    let (mut worker, mut other) = (cluster.worker(0), cluster.worker(1));
    let variables = [vector("small", SMALL), vector("large", LARGE)];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    other.join(&variables, |_| ()).unwrap();
    let mut token = worker.token().unwrap().unwrap();
    for round in 1..=5 {
        // The other worker's pushes reach the step of the next token before this push.
        (0..3).for_each(|_| push(&mut other, true));
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("small").unwrap().fill(1.0);
        gradients.view_mut::<f32>("large").unwrap().fill(1.0);
        let stepped = worker.push_and_pull(token, gradients, &mut params).unwrap();
        token = stepped.next.unwrap().unwrap();
        for name in ["small", "large"] {
            let values = params.view::<f32>(name).unwrap();
            assert!(values.iter().all(|&value| value == -4.0 * round as f32), "{name}");
        }
    }
    drop(token);
    cluster.stop();
}
