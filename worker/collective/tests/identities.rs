//! Ranks that prove who they are by access tokens: each has the index that its token names, and leaves
//! the ring when its token is taken back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use pushpull_collective::{Launch, Reduction, RingConfig, RingError, Transport, blocking};
use pushpull_common::access::AccessEvent;
use pushpull_common::error::Chain;
use pushpull_common::identity::Identity;
use pushpull_common::protocol::message::{Heartbeat, Hello, RankAddresses, RingJoin, Role};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Envelope, FrameReader, Message, Refusal};
use pushpull_net::auth::{CredentialFiles, Credentials, say_hello};
use pushpull_net::{Connector, FrameStream};

use self::support::{frame, hello};

const LEASE: Duration = Duration::from_secs(10);
const WAIT: Duration = Duration::from_secs(60);

/// Returns the entry of a rank: the token that lets it have this index.
fn entry(rank: u32) -> String {
    format!("token rank-{rank} {:032x} roles=rank tasks=/job:ring/task:{rank}\n", rank + 1)
}

/// Writes a file of tokens, in place of the one that is there.
fn write(path: &Path, text: &str) {
    let draft = path.with_extension("new");
    fs::write(&draft, text).unwrap();
    fs::set_permissions(&draft, PermissionsExt::from_mode(0o600)).unwrap();
    fs::rename(&draft, path).unwrap();
}

/// The file of each rank, with the tokens of all.
struct Keys(tempfile::TempDir);

impl Keys {
    fn new(ranks: u32) -> Keys {
        let keys = Keys(tempfile::tempdir().unwrap());
        let all: String = (0..ranks).map(entry).collect();
        (0..ranks).for_each(|rank| write(&keys.path(rank), &all));
        keys
    }

    fn path(&self, rank: u32) -> PathBuf {
        self.0.path().join(format!("rank-{rank}"))
    }

    fn open(&self, rank: u32) -> Credentials {
        CredentialFiles::new().tokens(self.path(rank)).open().unwrap()
    }
}

/// Returns an address at which nobody listens.
fn address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn config(rank: u32, ranks: u32, address: &str, keys: &Keys) -> RingConfig {
    RingConfig::new(Launch::new(rank, ranks).unwrap())
        .rendezvous(address)
        .transport(Transport::Tcp)
        .credentials(keys.open(rank))
        .lease(LEASE)
        .join_timeout(WAIT)
}

/// Returns a request for an index.
fn join(index: Option<u32>) -> RingJoin {
    RingJoin {
        id: Text::clipped("forged"),
        index,
        size: 3,
        host: Text::clipped("elsewhere"),
        addresses: RankAddresses::default(),
        epoch: 0,
        gone: List::default(),
    }
}

/// Says hello as one task and asks for these indices. Returns whether that ends the connection.
fn is_denied(address: &str, own: &Credentials, task: u32, indices: &[Option<u32>]) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let connected = loop {
            match Connector::new(address).connect(WAIT).await {
                Ok(connected) => break connected,
                // The rank that serves does not listen yet.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        let mut frames = FrameStream::new(connected.stream, FrameReader::new());
        // The facts on which all ranks agree.
        let facts = Identity::new().with_protocol();
        let facts = facts.with("lease", format!("{} ms", LEASE.as_millis()));
        let identity = facts.with("crate", env!("CARGO_PKG_VERSION")).to_wire();
        let hello = Hello { task, identity, ..hello(Role::Rank {}) };
        say_hello(&mut frames, Some(own), Envelope::default(), hello).await.unwrap();
        let requests = indices.iter().flat_map(|&index| frame(join(index)));
        let requests: Vec<u8> = requests.chain(frame(Heartbeat {})).collect();
        frames.send(&requests).await.unwrap();
        loop {
            match frames.next().await.map(|(_, message)| message) {
                Ok(Message::Refused(refused)) => {
                    assert_eq!(refused.refusal, Refusal::Denied {}, "{indices:?}");
                    return true;
                }
                Ok(Message::HeartbeatAnswer(_)) => return false,
                Ok(_) => {}
                Err(_) => return true,
            }
        }
    })
}

#[test]
fn a_rank_has_no_other_index_than_that_of_its_token() {
    let keys = Keys::new(3);
    let address = address();
    let reduce = |rank| {
        let mut ring = blocking::Ring::join(config(rank, 3, &address, &keys)).unwrap();
        let mut values = [1.0_f32];
        ring.all_reduce(&mut values, Reduction::Sum).unwrap();
        assert_eq!((ring.rank(), values), (rank, [3.0]));
        ring.leave();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| reduce(0));
        for (indices, denied) in [
            (&[Some(0)][..], true),
            (&[None], true),
            (&[Some(1), Some(0)], true),
            (&[Some(1)], false),
        ] {
            let found = is_denied(&address, &keys.open(1), 1, indices);
            assert_eq!(found, denied, "the indices {indices:?} by the token of task 1");
        }
        // Neither is a rank whose own file says that its token is another one's.
        let forger = Keys::new(1);
        write(&forger.path(0), &entry(1).replace("/task:1", "/task:0"));
        let forged = config(0, 3, &address, &forger).join_timeout(Duration::from_secs(1));
        let error = Chain(&blocking::Ring::join(forged).unwrap_err()).to_string();
        assert!(error.contains("denied"), "{error}");
        scope.spawn(|| reduce(1));
        reduce(2);
    });
}

#[test]
fn a_rank_whose_token_is_taken_back_leaves_the_ring() {
    let keys = Keys::new(2);
    let address = address();
    let (sender, told) = mpsc::channel();
    let join_ring = |rank| {
        let sender = sender.clone();
        let report = move |event: &AccessEvent| _ = sender.send(event.clone());
        blocking::Ring::join(config(rank, 2, &address, &keys).on_access(report)).unwrap()
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            let mut ring = join_ring(1);
            loop {
                if let Err(error) = ring.barrier() {
                    return error;
                }
            }
        });
        let mut ring = join_ring(0);
        ring.barrier().unwrap();
        // Either of them may serve the rendezvous.
        (0..2).for_each(|rank| write(&keys.path(rank), &entry(0)));
        let lost = loop {
            if let Err(error) = ring.barrier() {
                break error;
            }
        };
        assert!(matches!(lost, RingError::Lost { rank: 1, .. }), "{lost:?}");
        let error = second.join().unwrap();
        let is_out = matches!(
            error,
            RingError::Fenced { .. } | RingError::Left { .. } | RingError::Lost { .. }
        );
        assert!(is_out, "{error:?}");
        let event = told.recv_timeout(WAIT).unwrap();
        assert!(matches!(&event, AccessEvent::Revoked { .. }), "{event:?}");
        ring.leave();
    });
}
