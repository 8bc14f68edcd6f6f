//! Many connections at once: silent connections keep no client out, and no client that says hello
//! is lost.

use std::io::{IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pushpull::cluster::ShardId;
use pushpull::server::Network;
use pushpull::worker::GlobalStep;
use pushpull::{ClusterSpec, Ps, PsConfig, PsHandle, Sgd, TaskId};
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, Incarnation, RestoreEpoch};
use pushpull_common::protocol::message::{BodyCrc, Hello, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, Poll, encode, version};

use super::cluster::{LONG, TestCluster, block_on, listen, spec, vector, wait_for_end};
use crate::secured::leaves_out_plain_frames;

/// Longer than any test: a silent connection ends only by eviction.
const NEVER: Duration = Duration::from_secs(600);

/// Sends a reader's hello on a connection and returns the connection.
fn greet<S: Write>(mut stream: S, spec: &ClusterSpec, task: u32) -> S {
    let hello = Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Reader {},
        job: Text::clipped("crowd"),
        task,
        shard: ShardId::default(),
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_arena: 0,
        seen_step: GlobalStep(0),
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: Identity::new().with("ps", spec.ps_identity()).to_wire(),
        auth: None,
        features: Default::default(),
    };
    let mut frame = Vec::new();
    encode(&mut frame, &Envelope::default(), &hello.into(), BodyStamp::NONE);
    stream.write_all(&frame).unwrap();
    stream
}

/// Whether the server answers with a welcome.
fn is_welcome(mut stream: impl Read) -> bool {
    let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read_vectored(slices);
    matches!(FrameReader::new().poll(&mut source), Ok(Poll::Frame(_, Message::Welcome(_))))
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Waits until `count` connections have been evicted.
fn await_evicted(handle: &PsHandle, count: u64) {
    let began = Instant::now();
    while handle.metrics().waiting_evicted < count {
        assert!(began.elapsed() < LONG, "{} of {count}", handle.metrics().waiting_evicted);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_worker_joins_beside_500_silent_connections() {
    let cluster = TestCluster::sgd(1, |config| {
        config.network(Network::default().waiting_connections_max(64).handshake_timeout(NEVER))
    });
    let address = cluster.handle().address().to_owned();
    let silent: Vec<TcpStream> = (0..500).map(|_| connect(&address)).collect();
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 1)], |_| ()).unwrap();
    // The worker's own connection evicts one more.
    await_evicted(&cluster.handle(), 500 - 64 + 1);
    let metrics = cluster.handle().metrics();
    assert_eq!((metrics.waiting_evicted, metrics.waiting_timed_out), (437, 0));
    // The oldest connections are evicted, the newest are open.
    assert_eq!((&silent[0]).read(&mut [0]).unwrap_or(0), 0);
    let newest = silent.last().unwrap();
    newest.set_nonblocking(true).unwrap();
    assert!(newest.peek(&mut [0]).is_err(), "the newest connection must be open and silent");
    drop(silent);
    cluster.stop();
}

#[test]
fn a_burst_of_300_hellos_loses_no_client() {
    if leaves_out_plain_frames() {
        return;
    }
    let cluster = TestCluster::sgd(1, |config| config);
    let address = cluster.handle().address().to_owned();
    let connected: Vec<TcpStream> = (0..300).map(|_| connect(&address)).collect();
    let greeted: Vec<TcpStream> =
        (0..).zip(connected).map(|(task, stream)| greet(stream, &cluster.spec, task)).collect();
    for (index, stream) in greeted.into_iter().enumerate() {
        assert!(is_welcome(stream), "{index}");
    }
    let metrics = cluster.handle().metrics();
    assert_eq!((metrics.waiting_evicted, metrics.waiting_faulted), (0, 0));
    cluster.stop();
}

#[test]
fn clients_that_said_hello_before_the_server_started_are_not_evicted() {
    if leaves_out_plain_frames() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let unix = folder.path().join("ps.sock");
    let listener =
        listen().also(block_on(Ps::listen(&format!("unix:{}", unix.display()))).unwrap());
    let spec = spec([listener.address()], 1);
    let address = listener.address();
    // All connections wait in the listen backlogs until the server starts; every third is silent.
    let mut silent = Vec::new();
    let mut remote = Vec::new();
    let mut local = Vec::new();
    for task in 0..100 {
        silent.push(connect(&address));
        remote.push(greet(connect(&address), &spec, task));
        let stream = UnixStream::connect(&unix).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        local.push(greet(stream, &spec, 1000 + task));
    }
    let config = PsConfig::new(spec, TaskId::ps(0), Sgd::new(1.0));
    let ps = listener
        .start(
            config.network(Network::default().waiting_connections_max(2).handshake_timeout(NEVER)),
        )
        .unwrap();
    let handle = ps.handle();
    for (index, stream) in remote.into_iter().enumerate() {
        assert!(is_welcome(stream), "{index}");
    }
    for (index, stream) in local.into_iter().enumerate() {
        assert!(is_welcome(stream), "{index}");
    }
    await_evicted(&handle, 98);
    handle.stop();
    wait_for_end(ps).unwrap();
}

/// Waits until the counts of connections that timed out, and of those whose first bytes were no
/// hello, are `expected`.
fn await_counted(handle: &PsHandle, expected: (u64, u64)) {
    let began = Instant::now();
    loop {
        let metrics = handle.metrics();
        let counted = (metrics.waiting_timed_out, metrics.waiting_faulted);
        if counted == expected {
            return assert_eq!(metrics.waiting_evicted, 0);
        }
        assert!(began.elapsed() < LONG, "{counted:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn silent_and_malformed_connections_are_counted() {
    if leaves_out_plain_frames() {
        return;
    }
    let soon = Duration::from_millis(100);
    let cluster =
        TestCluster::sgd(1, |config| config.network(Network::default().handshake_timeout(soon)));
    let mut silent = connect(cluster.handle().address());
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    await_counted(&cluster.handle(), (1, 0));
    cluster.stop();
    let cluster =
        TestCluster::sgd(1, |config| config.network(Network::default().handshake_timeout(NEVER)));
    let mut wrong = connect(cluster.handle().address());
    let mut bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    bytes.resize(100, 0);
    wrong.write_all(&bytes).unwrap();
    await_counted(&cluster.handle(), (0, 1));
    cluster.stop();
}
