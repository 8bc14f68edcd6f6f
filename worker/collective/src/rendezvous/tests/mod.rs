//! Tests of the rendezvous, on a clock that they move themselves.

mod endings;
mod formation;
mod refusals;
mod successor;
mod walk;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{
    BodyCrc, FeatureOffer, Heartbeat, Hello, Refused, RingEnd, RingFormed, RingJoin, RingMember,
    RingOver, RingWaits, Role,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Features, Message, Refusal, version};

use super::{Rendezvous, RendezvousConfig, RendezvousInput, RendezvousOutput};

const LEASE: Duration = Duration::from_secs(4);
const WINDOW: Duration = Duration::from_secs(3);

/// A rendezvous with its peers, and all that these have received.
struct Meeting {
    machine: Rendezvous,
    now: Instant,
    next: u64,
    /// The open connections, as the rendezvous sees them.
    open: BTreeSet<u64>,
    /// The peers that send no heartbeats.
    mute: BTreeSet<u64>,
    /// The process of each connection.
    processes: BTreeMap<u64, Incarnation>,
    /// The processes that have ended.
    dead: BTreeSet<Incarnation>,
    received: BTreeMap<u64, Vec<Message>>,
}

/// A member of a ring, as its `RingFormed` and its `RingMember`s tell it.
#[derive(Debug, PartialEq, Eq)]
struct Formed {
    epoch: u64,
    rank: u32,
    indices: Vec<u32>,
}

/// The incarnation of the member in whose process the rendezvous is.
const SERVING: u64 = u64::MAX;

fn config(size_min: u32) -> RendezvousConfig {
    RendezvousConfig {
        rendezvous: 77,
        job: "ring".to_owned(),
        identity: Identity::new().with("dtype", "f32"),
        lease: LEASE,
        join_window: WINDOW,
        succession_window: WINDOW,
        first_size_min: size_min,
        size_min,
        serving: Some(Incarnation(SERVING)),
    }
}

fn hello(incarnation: u64) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Rank {},
        job: Text::clipped("ring"),
        task: 0,
        shard: ShardId::default(),
        incarnation: Incarnation(incarnation),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        seen_arena: 0,
        catalogue: None,
        body_crc: BodyCrc::Auto {},
        identity: Identity::new().with("dtype", "f32").to_wire(),
        auth: None,
        features: FeatureOffer::of(Features::ALL),
    }
}

/// A request for a place in a first ring of four.
fn join(id: &str) -> RingJoin {
    RingJoin {
        id: Text::clipped(id),
        index: None,
        size: 4,
        host: Text::clipped(format!("host-{id}")),
        addresses: List::of([Text::clipped(format!("{id}:1"))]).unwrap(),
        epoch: 0,
        gone: List::default(),
    }
}

fn indexed(id: &str, index: u32) -> RingJoin {
    RingJoin { index: Some(index), ..join(id) }
}

/// A request of a member of this ring for the next.
fn again(id: &str, epoch: u64) -> RingJoin {
    RingJoin { epoch, ..join(id) }
}

impl Meeting {
    fn new(size_min: u32) -> Meeting {
        Meeting::with(config(size_min))
    }

    fn with(config: RendezvousConfig) -> Meeting {
        Meeting {
            machine: Rendezvous::new(config),
            now: Instant::now(),
            next: 0,
            open: BTreeSet::new(),
            mute: BTreeSet::new(),
            processes: BTreeMap::new(),
            dead: BTreeSet::new(),
            received: BTreeMap::new(),
        }
    }

    fn handle(&mut self, input: RendezvousInput) {
        self.machine.handle(self.now, input);
        let mut probed = Vec::new();
        while let Some(output) = self.machine.poll_output() {
            match output {
                RendezvousOutput::Send { connection, message } => {
                    assert!(self.open.contains(&connection), "{message:?} for {connection}");
                    self.received.entry(connection).or_default().push(message);
                }
                RendezvousOutput::Close { connection } => {
                    assert!(self.open.remove(&connection), "{connection} is closed twice");
                }
                RendezvousOutput::Probe { incarnation, .. } => probed.push(incarnation),
            }
        }
        for incarnation in probed {
            let gone = self.dead.contains(&incarnation);
            self.handle(RendezvousInput::Probed { incarnation, gone });
        }
        // The checks of a large ring take longer than all else.
        if self.open.len() < 100 || self.open.len().is_multiple_of(97) {
            self.machine.check_invariants();
        }
    }

    fn arrive(&mut self, hello: Hello) -> u64 {
        self.next += 1;
        let connection = self.next;
        self.open.insert(connection);
        self.processes.insert(connection, hello.incarnation);
        self.handle(RendezvousInput::Arrived { connection, hello: Box::new(hello) });
        connection
    }

    fn send(&mut self, connection: u64, message: impl Into<Message>) {
        self.handle(RendezvousInput::Message { connection, message: message.into() });
    }

    /// Ends the process of a peer.
    fn close(&mut self, connection: u64) {
        self.dead.extend(self.processes.get(&connection));
        self.cut(connection);
    }

    /// Breaks a connection.
    fn cut(&mut self, connection: u64) {
        self.open.remove(&connection);
        let reason = "connection reset".to_owned();
        self.handle(RendezvousInput::Closed { connection, reason });
    }

    /// Has a new process ask for a place.
    fn join(&mut self, join: RingJoin) -> u64 {
        let connection = self.arrive(hello(1_000 + self.next));
        self.send(connection, join);
        connection
    }

    /// Forms the first ring of four.
    fn four(&mut self) -> [u64; 4] {
        let members = ["a", "b", "c", "d"].map(|id| self.join(join(id)));
        for (rank, member) in members.into_iter().enumerate() {
            let formed = self.formed(member);
            assert_eq!(formed, Formed { epoch: 1, rank: rank as u32, indices: vec![0, 1, 2, 3] });
        }
        members
    }

    /// Lets time pass, in which peers that are not mute send heartbeats.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        let mut beat = self.now;
        loop {
            let wake = self.machine.wake_at().map_or(end, |at| at.max(self.now));
            self.now = wake.min(beat).min(end);
            if self.now >= beat {
                beat += LEASE / 4;
                for connection in self.open.clone().difference(&self.mute.clone()) {
                    self.send(*connection, Heartbeat {});
                }
            }
            self.handle(RendezvousInput::Tick);
            if self.now >= end {
                return;
            }
        }
    }

    /// Takes what a peer has received, without answers to heartbeats.
    fn take(&mut self, connection: u64) -> Vec<Message> {
        let messages = self.received.remove(&connection).unwrap_or_default();
        messages.into_iter().filter(|m| !matches!(m, Message::HeartbeatAnswer(_))).collect()
    }

    /// Takes the ring that a peer was told last.
    fn formed(&mut self, connection: u64) -> Formed {
        let messages = self.take(connection);
        let formed = messages.iter().find_map(|message| match message {
            Message::RingFormed(formed) => Some(formed),
            _ => None,
        });
        let &RingFormed { rendezvous, epoch, rank, size, lease_ms, serving } =
            formed.unwrap_or_else(|| panic!("no ring for {connection}: {messages:?}"));
        assert_eq!(u64::from(lease_ms), LEASE.as_millis() as u64);
        assert_eq!((rendezvous, serving), (77, None));
        let members: Vec<&RingMember> = messages.iter().filter_map(member).collect();
        assert_eq!(members.len(), size as usize);
        assert!(members.iter().enumerate().all(|(rank, member)| member.rank as usize == rank));
        Formed { epoch, rank, indices: members.iter().map(|member| member.index).collect() }
    }

    /// Takes what a peer was told of the wait last.
    fn waits(&mut self, connection: u64) -> (u32, u32, Vec<u32>) {
        let messages = self.take(connection);
        match messages.last() {
            Some(Message::RingWaits(RingWaits { came, size, missing })) => {
                (*came, *size, missing.items().to_vec())
            }
            other => panic!("{connection} does not wait: {other:?}"),
        }
    }

    /// Takes the end that a peer was told, and checks that it is one.
    fn end(&mut self, connection: u64) -> RingOver {
        let messages = self.take(connection);
        let mut ends = messages.iter().filter_map(|message| match message {
            Message::RingOver(over) => Some(over.clone()),
            _ => None,
        });
        let end = ends.next().unwrap_or_else(|| panic!("{connection} has no end: {messages:?}"));
        assert_eq!(ends.next(), None);
        end
    }

    /// Takes the refusal of a peer, which is closed.
    fn refusal(&mut self, connection: u64) -> Refusal {
        assert!(!self.open.contains(&connection), "{connection} is open");
        match self.take(connection).pop() {
            Some(Message::Refused(Refused { refusal })) => refusal,
            other => panic!("{connection} is not refused: {other:?}"),
        }
    }

    fn is_silent(&mut self, connection: u64) -> bool {
        self.take(connection).is_empty()
    }
}

fn member(message: &Message) -> Option<&RingMember> {
    match message {
        Message::RingMember(member) => Some(member),
        _ => None,
    }
}

fn lost(rank: u32, id: &str, silent: Duration, detail: &str) -> RingEnd {
    RingEnd::Lost {
        rank,
        host: Text::clipped(format!("host-{id}")),
        silent_ms: silent.as_millis() as u64,
        detail: Text::clipped(detail),
    }
}
