use std::io::{IoSliceMut, Read, Write};
use std::net::TcpStream;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, Incarnation, RequestId, RestoreEpoch, ShardId, TaskId,
};
use pushpull_common::protocol::message::{BodyCrc, Heartbeat, Hello, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{BodyStamp, Header, Poll, Refusal, encode, version};
use pushpull_optim::optimizer::Sgd;
use tokio::net::UnixStream;

use super::*;
use crate::config::{Network, PsConfig};
use crate::runtime::Ps;

/// A connection of this job panics once it is registered with the shard.
const PANICS: &str = "panics";

/// Limit on every wait.
const WAIT_LIMIT: Duration = Duration::from_secs(30);

pub(super) fn panic_if_asked(hello: &Hello) {
    assert_ne!(hello.job.as_str(), PANICS, "the test requests a panic");
}

/// Sends a hello of this job and returns the answer; `None` if the connection is closed.
fn greet(address: &str, job: &str) -> Option<Message> {
    let hello = Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Reader {},
        job: Text::clipped(job),
        task: 0,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_arena: 0,
        seen_step: GlobalStep(0),
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: Identity::new().to_wire(),
        auth: None,
        features: Default::default(),
    };
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
    let mut frame = Vec::new();
    encode(&mut frame, &Envelope::default(), &hello.into(), BodyStamp::NONE);
    stream.write_all(&frame).unwrap();
    let mut reader = FrameReader::new();
    let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read_vectored(slices);
    match reader.poll(&mut source) {
        Ok(Poll::Frame(_, message)) => Some(message),
        Ok(Poll::Closed) | Err(ReadError::Io(_)) => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_panicking_connection_task_frees_its_slot() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(Ps::listen("127.0.0.1:0")).unwrap();
    let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build().unwrap();
    let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0))
        .network(Network::default().connections_max(1));
    let ps = listener.start(config).unwrap();
    let handle = ps.handle();
    let address = handle.address().to_owned();
    for _ in 0..3 {
        assert_eq!(greet(&address, PANICS), None);
        // The socket is closed a moment before the slot is free.
        let begun = Instant::now();
        loop {
            match greet(&address, "worker") {
                Some(Message::Welcome(_)) => break,
                Some(Message::Refused(refused)) => {
                    let busy = matches!(refused.refusal, Refusal::Busy { .. });
                    assert!(busy && begun.elapsed() < WAIT_LIMIT, "{}", refused.refusal);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(handle.metrics().connections_faulted, 3);
    handle.stop();
    runtime.block_on(ps.serve(std::future::pending())).unwrap();
}

#[tokio::test]
async fn a_corked_frame_is_sent_with_the_next_one_or_once_it_is_due() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stream = Stream::unix(ours).unwrap();
    let mut peer = theirs.into_std().unwrap();
    let outbox = Outbox::default();
    let frame = |request| {
        let envelope = Envelope { request: RequestId(request), ..Envelope::default() };
        (envelope, Message::from(Heartbeat {}))
    };
    let put = |request| {
        let (envelope, message) = frame(request);
        outbox.put(&envelope, &message, None, AnswerBody::EMPTY);
    };
    let mut whole = Vec::new();
    let (envelope, message) = frame(0);
    encode(&mut whole, &envelope, &message, BodyStamp::NONE);
    // Returns the requests of the frames that are sent.
    let mut sent = || -> Vec<u64> {
        outbox.flush(&stream, |_| ()).unwrap();
        let mut bytes = [0; 1024];
        let count = peer.read(&mut bytes).unwrap_or_default();
        let frames = bytes[..count].chunks(whole.len());
        let headers = frames.map(|frame| Header::take(frame.first_chunk().unwrap()).unwrap());
        headers.map(|header| header.request.0).collect()
    };
    put(1);
    assert!(sent().is_empty() && outbox.is_idle(), "a corked frame waits");
    put(2);
    outbox.send_all();
    assert!(!outbox.is_idle());
    assert_eq!(sent(), [1, 2]);
    put(3);
    assert!(sent().is_empty() && outbox.is_idle(), "the queue is no longer due once it is empty");
    outbox.send_all();
    assert_eq!(sent(), [3]);
    // The frame may have been sent with another in the meantime.
    outbox.send_all();
    assert!(sent().is_empty());
    put(4);
    assert!(sent().is_empty(), "a due queue without frames does not stay due");
    outbox.close();
    assert_eq!(sent(), [4]);
    assert!(outbox.is_idle());
}

/// Queues a frame with a body of this many bytes, which is due.
fn put_bytes(outbox: &Outbox, bytes: usize) {
    let body = AnswerBody::Rows(vec![0; bytes]);
    outbox.put(&Envelope::default(), &Heartbeat {}.into(), None, body);
    outbox.send_all();
}

#[test]
fn a_connection_with_a_full_queue_is_not_read_from() {
    let frames = Outbox::default();
    for _ in 1..QUEUE_MAX {
        put_bytes(&frames, 0);
        assert_eq!((frames.is_full(), frames.phase()), (false, ConnectionPhase::Open));
    }
    put_bytes(&frames, 0);
    assert_eq!((frames.is_full(), frames.phase()), (true, ConnectionPhase::WriteOnly));
    let bytes = Outbox::default();
    put_bytes(&bytes, BODIES_MAX - 1);
    assert_eq!((bytes.is_full(), bytes.phase()), (false, ConnectionPhase::Open));
    put_bytes(&bytes, 1);
    assert_eq!((bytes.is_full(), bytes.phase()), (true, ConnectionPhase::WriteOnly));
}

#[tokio::test]
async fn a_peer_that_reads_nothing_is_not_read_from_and_stalls() {
    const BODY: usize = 1 << 20;
    const LIMIT: Duration = Duration::from_secs(30);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stream = Stream::unix(ours).unwrap();
    let mut peer = theirs.into_std().unwrap();
    let outboxes = Outboxes::default();
    let (_, outbox) = outboxes.add(None);
    let (_, idle) = outboxes.add(None);
    assert!(!idle.flush(&stream, |_| ()).unwrap());
    // The socket takes some bytes, and the queue the others.
    while outbox.phase() == ConnectionPhase::Open {
        put_bytes(&outbox, BODY);
        outbox.flush(&stream, |_| ()).unwrap();
    }
    assert_eq!(outbox.phase(), ConnectionPhase::WriteOnly);
    assert!(outbox.bodies.get() < BODIES_MAX + BODY);
    // Nothing is read, so another write leaves the stall as it is.
    let since = outbox.stuck_since.get().expect("frames are left");
    assert!(outbox.flush(&stream, |_| ()).unwrap());
    assert_eq!(outbox.stuck_since.get(), Some(since));
    assert!(outboxes.stalled(since + LIMIT - Duration::from_nanos(1), LIMIT).is_empty());
    let stalled = outboxes.stalled(since + LIMIT, LIMIT);
    assert!(stalled.len() == 1 && Rc::ptr_eq(&stalled[0], &outbox), "only it has stalled");
    // The peer reads a part, and its time begins again.
    let mut buffer = vec![0; BODY];
    assert!(peer.read(&mut buffer).unwrap() > 0);
    assert!(outbox.flush(&stream, |_| ()).unwrap());
    assert!(outboxes.stalled(since + LIMIT, LIMIT).is_empty());
    // The peer reads everything.
    while outbox.flush(&stream, |_| ()).unwrap() {
        assert!(peer.read(&mut buffer).unwrap() > 0);
    }
    assert_eq!((outbox.bodies.get(), outbox.stuck_since.get()), (0, None));
    assert_eq!(outbox.phase(), ConnectionPhase::Open);
    assert!(outboxes.stalled(since + 1000 * LIMIT, LIMIT).is_empty());
}
