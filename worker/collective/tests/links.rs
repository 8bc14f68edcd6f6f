//! Strangers that claim to be the predecessor of a rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use pushpull_collective::{Launch, Reduction, RingConfig, Transport, blocking};
use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::message::{Hello, RingLink, Role};

use self::support::{frame, hello};

const RANKS: u32 = 3;

/// More than the links that a rank keeps until it hears of their ring.
const STRANGERS: u64 = 40;

fn config(rank: u32, address: &str) -> RingConfig {
    RingConfig::new(Launch::new(rank, RANKS).unwrap())
        .rendezvous(address)
        .transport(Transport::Tcp)
        .join_timeout(Duration::from_secs(60))
}

/// The first words of a link to a process that the stranger does not know.
fn false_link(number: u64) -> Vec<u8> {
    let hello = Hello { task: 2, incarnation: Incarnation(number), ..hello(Role::Rank {}) };
    let link = RingLink { rendezvous: number, epoch: 1, rank: 2, to: Incarnation(number) };
    [frame(hello), frame(link)].concat()
}

#[test]
fn a_stranger_takes_no_place_of_a_predecessor() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let join = |rank| {
        let config = config(rank, &address);
        move || {
            let mut ring = blocking::Ring::join(config).unwrap();
            let mut values = vec![1.0_f32; 1000];
            ring.all_reduce(&mut values, Reduction::Sum).unwrap();
            ring.leave();
            values[999]
        }
    };
    std::thread::scope(|scope| {
        let serving = scope.spawn(join(0));
        let begin = Instant::now();
        while TcpStream::connect(&address).is_err() {
            assert!(begin.elapsed() < Duration::from_secs(20), "rank 0 does not listen");
            std::thread::yield_now();
        }
        for number in 0..STRANGERS {
            let mut stranger = TcpStream::connect(&address).unwrap();
            stranger.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stranger.write_all(&false_link(number)).unwrap();
            let mut answer = Vec::new();
            stranger.read_to_end(&mut answer).unwrap();
            let answer = String::from_utf8_lossy(&answer);
            assert!(answer.contains("the link leads to another process"), "{answer:?}");
        }
        let others = [1, 2].map(|rank| scope.spawn(join(rank)));
        assert_eq!(serving.join().unwrap(), 3.0);
        for other in others {
            assert_eq!(other.join().unwrap(), 3.0);
        }
    });
}
