//! A slow reader delays its own answers and no others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use pushpull::Push;
use pushpull::blocking::Reader;
use pushpull::cluster::ShardId;
use pushpull::server::Network;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RequestId, RestoreEpoch};
use pushpull_common::protocol::message::{BodyCrc, Hello, Pull, Role, Selection};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode, version};

use super::cluster::{LONG, TestCluster, vector};
use crate::secured::leaves_out_plain_frames;

/// Encodes a reader's hello, followed by `pulls` pulls.
fn hello_and_pulls(pulls: u64) -> Vec<u8> {
    let hello = Hello {
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
    };
    let mut bytes = Vec::new();
    let mut add = |request, message: Message| {
        let envelope = Envelope { request: RequestId(request), ..Envelope::default() };
        encode(&mut bytes, &envelope, &message, BodyStamp::NONE);
    };
    add(1, hello.into());
    for pull in 0..pulls {
        add(2 + pull, Pull { selection: Selection::All {} }.into());
    }
    bytes
}

#[test]
fn a_slow_reader_delays_others_no_longer_than_the_stall_timeout() {
    if leaves_out_plain_frames() {
        return;
    }
    let elements = 4_000_000;
    let cluster = TestCluster::sgd(1, |config| {
        config.network(Network::default().stall_timeout(Duration::from_millis(500)))
    });
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", elements)], |_| ()).unwrap();

    let mut slow = TcpStream::connect(cluster.handle().address()).unwrap();
    slow.write_all(&hello_and_pulls(8)).unwrap();
    slow.set_read_timeout(Some(LONG)).unwrap();
    let trickle = std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        let mut total = 0;
        // Each read would satisfy a timeout between reads.
        while let Ok(count @ 1..) = slow.read(&mut buffer) {
            total += count;
            std::thread::sleep(Duration::from_millis(20));
        }
        total
    });
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut values = reader.params();
    for step in 1..=6 {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        let applied = worker.push(token, gradients).unwrap();
        assert!(matches!(applied, Push::Applied { step: s, .. } if s == step));
        reader.pull(&mut values).unwrap();
        let expected = -(step as f32);
        assert!(values.view::<f32>("w").unwrap().iter().all(|value| *value == expected));
    }
    // The server closed the connection before it had sent all values.
    assert!(trickle.join().unwrap() < 8 * 4 * elements as usize);
    assert_eq!(cluster.handle().metrics().connections_faulted, 1);
    cluster.stop();
}
