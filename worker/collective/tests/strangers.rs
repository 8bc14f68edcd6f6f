//! Strangers at a rendezvous: connections that say nothing, garbage, a hello of another role, or half
//! a request. A ring forms beside them and works, and the rank that serves keeps its memory and its
//! descriptors.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pushpull_collective::{Launch, Reduction, RingConfig, Transport, blocking};
use pushpull_common::protocol::message::{RankAddresses, RingJoin, Role};
use pushpull_common::protocol::wire::{List, Text};

use self::support::{frame, hello};

const RANKS: u32 = 3;
const OPERATIONS: usize = 300;
/// The sum of the results: each is one for each rank.
const SUM: f64 = OPERATIONS as f64 * RANKS as f64;

/// The strangers of each kind that stay at once.
const SILENT: usize = 150;
const GARBLED: usize = 50;
const OF_OTHER_ROLE: usize = 50;
const HALF: usize = 500;

/// The connections that come before the ring may form.
const CONNECTIONS: usize = 1500;

/// Descriptors of the serving rank, once those that it turns away are closed: 256 peers without a
/// request, and about 20 of its own. Without a limit it would keep all strangers.
const DESCRIPTORS_MAX: usize = 300;

/// Memory of the serving rank.
const MEMORY_MAX: u64 = 64 << 20;

fn config(rank: u32, address: &str) -> RingConfig {
    RingConfig::new(Launch::new(rank, RANKS).unwrap())
        .rendezvous(address)
        .transport(Transport::Tcp)
        .lease(Duration::from_secs(5))
        .join_timeout(Duration::from_secs(60))
}

/// Joins and performs operations. Returns the sum of their results.
fn reduce(config: RingConfig) -> f64 {
    let mut ring = blocking::Ring::join(config).unwrap();
    let mut values = vec![0.0_f32; 30_000];
    let mut sum = 0.0;
    for _ in 0..OPERATIONS {
        values.fill(1.0);
        ring.all_reduce(&mut values, Reduction::Sum).unwrap();
        sum += f64::from(values[29_999]);
    }
    ring.leave();
    sum
}

#[test]
#[ignore = "a process of the test below"]
fn serving_rank() {
    let address = std::env::var("PUSHPULL_TEST_RENDEZVOUS").unwrap();
    assert_eq!(reduce(config(0, &address)), SUM);
}

/// The process of the rank that serves.
struct ServingRank(Child);

impl ServingRank {
    fn start(address: &str) -> ServingRank {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["serving_rank", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("PUSHPULL_TEST_RENDEZVOUS", address)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        ServingRank(child.unwrap())
    }

    fn descriptors(&self) -> usize {
        // It may have ended.
        std::fs::read_dir(format!("/proc/{}/fd", self.0.id())).map_or(0, Iterator::count)
    }

    /// Returns the most memory that it has had resident, in bytes.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

impl Drop for ServingRank {
    fn drop(&mut self) {
        // It has ended, or the test has failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Says hello as a rank, and half of the request for a place.
fn half_a_join() -> Vec<u8> {
    let join = frame(RingJoin {
        id: Text::clipped("stranger"),
        index: Some(1),
        size: RANKS,
        host: Text::clipped("elsewhere"),
        addresses: RankAddresses::default(),
        epoch: 0,
        gone: List::default(),
    });
    [&*frame(hello(Role::Rank {})), &join[..join.len() / 2]].concat()
}

/// Strangers that come again whenever they are turned away.
struct Strangers<'a> {
    address: &'a str,
    connections: &'a AtomicUsize,
    /// Whether those that are there stay, and no others come.
    is_paused: &'a AtomicBool,
    is_over: &'a AtomicBool,
}

impl Strangers<'_> {
    fn come(&self, words: &[u8], most: usize) {
        let mut open: Vec<TcpStream> = Vec::new();
        while !self.is_over.load(Ordering::Relaxed) {
            if open.len() < most
                && !self.is_paused.load(Ordering::Relaxed)
                && let Ok(mut stream) = TcpStream::connect(self.address)
            {
                self.connections.fetch_add(1, Ordering::Relaxed);
                // The rank may have closed it.
                let _ = stream.write_all(words);
                stream.set_nonblocking(true).unwrap();
                open.push(stream);
            } else {
                std::thread::sleep(Duration::from_millis(5));
            }
            open.retain_mut(|stream| {
                let read = stream.read(&mut [0; 1024]);
                read.map_or_else(|error| error.kind() == std::io::ErrorKind::WouldBlock, |n| n > 0)
            });
        }
    }
}

#[test]
fn a_ring_forms_and_works_beside_strangers() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut serving = ServingRank::start(&address);
    let kinds = [
        (Vec::new(), SILENT),
        (vec![0x5a; 4096], GARBLED),
        (frame(hello(Role::Reader {})), OF_OTHER_ROLE),
        (half_a_join(), HALF),
    ];
    let connections = AtomicUsize::new(0);
    let is_paused = AtomicBool::new(false);
    let is_over = AtomicBool::new(false);
    let strangers = Strangers {
        address: &address,
        connections: &connections,
        is_paused: &is_paused,
        is_over: &is_over,
    };
    std::thread::scope(|scope| {
        for (words, most) in &kinds {
            scope.spawn(|| strangers.come(words, *most));
        }
        let until = |limit: Duration, reached: &dyn Fn() -> bool| {
            let begin = Instant::now();
            while begin.elapsed() < limit {
                if reached() {
                    return true;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            false
        };
        let come = || connections.load(Ordering::Relaxed) >= CONNECTIONS;
        let all_came = until(Duration::from_secs(60), &come);
        is_paused.store(true, Ordering::Relaxed);
        let descriptors = std::cell::Cell::new(0);
        let few = || {
            descriptors.set(serving.descriptors());
            (1..DESCRIPTORS_MAX).contains(&descriptors.get())
        };
        // Less than the time after which a peer without a request is closed anyway.
        let is_bounded = until(Duration::from_secs(5), &few);
        let descriptors = descriptors.get();
        is_paused.store(false, Ordering::Relaxed);
        let join = |rank: u32| {
            let config = config(rank, &address);
            scope.spawn(move || reduce(config))
        };
        let ranks = [join(1), join(2)];
        let mut memory = 0;
        while !ranks.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            memory = memory.max(serving.memory());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Strangers go, whatever has become of the ranks.
        is_over.store(true, Ordering::Relaxed);
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), SUM);
        }
        println!("{connections:?} connections, {descriptors} descriptors, {memory} bytes");
        assert!(all_came, "{connections:?} connections");
        assert!(is_bounded, "{descriptors} descriptors");
        assert!(memory < MEMORY_MAX, "{memory} bytes of memory");
    });
    assert!(serving.0.wait().unwrap().success());
}
