//! Hostile bytes on the wire end their connection, never the server.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};

use pushpull::cluster::ShardId;
use pushpull::server::Network;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, Incarnation, RestoreEpoch, Sequence, TokenId};
use pushpull_common::protocol::message::{self, BodyCrc, Hello, Operation, PushPart, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, Envelope, FrameReader, Message, Poll, Refusal, encode, version,
};

use super::cluster::{LONG, TestCluster, vector};
use crate::secured::leaves_out_plain_frames;

/// A client that speaks the protocol itself and may send any message.
struct RawClient {
    stream: TcpStream,
    reader: FrameReader,
}

impl RawClient {
    /// Says hello to the only shard of a server. Returns the client and the answer.
    fn greet(
        address: &str,
        role: Role,
        job: &str,
        task: u32,
        incarnation: u64,
        epoch: u64,
    ) -> (RawClient, Message) {
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role,
            job: Text::clipped(job),
            task,
            shard: ShardId { task: 0, shard: 0 },
            incarnation: Incarnation(incarnation),
            client_epoch: ClientEpoch(epoch),
            seen_epoch: RestoreEpoch(0),
            seen_arena: 0,
            seen_step: 0.into(),
            catalogue: None,
            body_crc: BodyCrc::Off {},
            identity: Identity::new().to_wire(),
            auth: None,
            features: Default::default(),
        };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut client = RawClient { stream, reader: FrameReader::new() };
        let answer = client.ask(hello.into(), &[]);
        (client, answer)
    }

    /// Sends a message with a body and returns the answer.
    fn ask(&mut self, message: Message, body: &[u8]) -> Message {
        let mut frame = Vec::new();
        let envelope = Envelope { sequence: Sequence(1), ..Envelope::default() };
        encode(&mut frame, &envelope, &message, BodyStamp::plain(body.len() as u64));
        self.stream.write_all(&frame).unwrap();
        self.stream.write_all(body).unwrap();
        let stream = &mut self.stream;
        let mut source = |slices: &mut [IoSliceMut<'_>]| stream.read_vectored(slices);
        match self.reader.poll(&mut source).unwrap() {
            Poll::Frame(header, message) => {
                if header.body_bytes > 0 {
                    assert_eq!(self.reader.skip_body(&mut source).unwrap(), BodyPoll::Done);
                }
                message
            }
            other => panic!("{other:?}"),
        }
    }

    fn ask_refused(&mut self, message: Message, body: &[u8]) -> Refusal {
        refusal(self.ask(message, body))
    }
}

fn refusal(message: Message) -> Refusal {
    match message {
        Message::Refused(refused) => refused.refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// Returns the client epoch that a welcome assigns.
fn epoch(message: &Message) -> u64 {
    match message {
        Message::Welcome(welcome) => welcome.client_epoch.0,
        other => panic!("expected a welcome, got {other:?}"),
    }
}

#[test]
fn a_second_chief_cannot_assign_initialize_or_finish() {
    if leaves_out_plain_frames() {
        return;
    }
    let cluster = TestCluster::sgd(3, |config| config);
    let address = cluster.handle().address().to_owned();
    let mut chief = cluster.worker(0);
    let variables = [vector("w", 4)];
    let mut params = chief.join(&variables, |_| ()).unwrap();
    let mut worker = cluster.worker(1);
    worker.join(&variables, |_| ()).unwrap();
    let as_chief = Role::Chief {};
    // The client says hello as a worker, and is accepted.
    let (mut client, welcome) = RawClient::greet(&address, Role::Worker {}, "worker", 2, 7, 0);
    let own = epoch(&welcome);
    for named in [own, 0] {
        let (_, answer) = RawClient::greet(&address, as_chief, "worker", 2, 7, named);
        assert_eq!(refusal(answer), Refusal::Role { role: as_chief.code(), kind: 1 });
    }
    // Another incarnation, without an epoch or with one that was never assigned.
    let (_, answer) = RawClient::greet(&address, as_chief, "worker", 2, 8, 0);
    assert!(matches!(refusal(answer), Refusal::Busy { limit: 1, .. }));
    for named in [own + 1, 1 << 62, (1 << 63) - 1, u64::MAX] {
        let (_, answer) = RawClient::greet(&address, as_chief, "worker", 2, 8, named);
        let refusal = refusal(answer);
        let kept = matches!(refusal, Refusal::Busy { .. } | Refusal::UnknownEpoch { .. });
        assert!(kept, "{named}: {refusal}");
    }
    // On the worker's own session, messages of a chief are refused.
    for message in [
        Message::from(message::Initialize { epoch: RestoreEpoch(9) }),
        message::Finish {}.into(),
        message::Declare { digest: [0; 32] }.into(),
    ] {
        let name = message.name();
        let refusal = client.ask_refused(message, &[]);
        assert!(matches!(refusal, Refusal::Role { role: 1, .. }), "{name}: {refusal}");
    }
    // Any client may assign, except before the first values, which only a chief may assign. But no
    // part may end beyond the last address.
    let Message::Reserved(push_slot) = client.ask(message::Reserve {}.into(), &[]) else {
        panic!()
    };
    let part = PushPart {
        operation: Operation::AssignAdd {},
        token: TokenId(0),
        generation: 0,
        push_slot: push_slot.push_slot,
        offset: u64::MAX,
        whole: Some(8),
        next: false,
        read: None,
    };
    let refusal = client.ask_refused(part.into(), &[1; 8]);
    assert!(matches!(refusal, Refusal::Range { offset: u64::MAX, bytes: 8, .. }), "{refusal}");
    // Training continues, and the values are still the chief's.
    let token = chief.token().unwrap().unwrap();
    chief.pull(&token, &mut params).unwrap();
    assert_eq!(params.view::<f32>("w").unwrap(), [0.0; 4]);
    let mut gradients = chief.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    chief.push(token, gradients).unwrap();
    assert!(worker.token().unwrap().is_some());
    cluster.stop();
}

#[test]
fn unknown_tasks_are_refused_with_a_detail() {
    if leaves_out_plain_frames() {
        return;
    }
    let cluster = TestCluster::sgd(2, |config| config);
    let address = cluster.handle().address().to_owned();
    let worker = Role::Worker {};
    let peer = Role::Peer {};
    for (role, job, task) in [
        (worker, "worker", 2),
        (Role::Chief {}, "worker", u32::MAX),
        (worker, "nobody", 0),
        (worker, "ps", 0),
        (peer, "ps", 1),
        (peer, "worker", 0),
    ] {
        let (_, answer) = RawClient::greet(&address, role, job, task, 1, 0);
        let Refusal::UnknownTask { job: named, task: index, detail } = refusal(answer) else {
            panic!("{role:?} {job} {task}")
        };
        assert_eq!((named.as_str(), index), (job, task));
        assert!(!detail.as_str().is_empty());
    }
    let (_, answer) = RawClient::greet(&address, worker, "worker", 1, 1, 0);
    epoch(&answer);
    cluster.stop();
    let cluster = TestCluster::sgd(2, |config| config.elastic_workers(true));
    let address = cluster.handle().address().to_owned();
    let (_, answer) = RawClient::greet(&address, worker, "worker", 9, 1, 0);
    epoch(&answer);
    cluster.stop();
}

/// Sends bytes and waits until the server closes the connection.
fn send(address: &str, bytes: &[u8], name: &str) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // The server may close the connection before all bytes are sent.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{name}: {error}"),
    }
    assert!(answer.len() < 4096, "{name}: the answer is too long");
}

#[test]
fn a_hostile_frame_ends_only_its_own_connection() {
    let cluster = TestCluster::sgd(1, |config| config);
    let address = cluster.handle().address().to_owned();
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&[vector("w", 10)], |_| ()).unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/common/tests/hostile");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "bin") {
            let bytes = std::fs::read(&path).unwrap();
            send(&address, &bytes, &path.display().to_string());
            count += 1;
        }
    }
    assert!(count >= 20, "only {count} hostile frames in {folder}");
    // The existing worker continues on its connection.
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    worker.push(token, gradients).unwrap();
    assert_eq!(cluster.handle().metrics().global_step, 1);
    cluster.stop();
}

#[test]
fn silent_connections_do_not_keep_a_worker_out() {
    let cluster =
        TestCluster::sgd(1, |config| config.network(Network::default().waiting_connections_max(8)));
    let address = cluster.handle().address().to_owned();
    let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    drop(silent);
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 1)], |_| ()).unwrap();
    cluster.stop();
}
