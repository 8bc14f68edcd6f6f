//! Adversary test of a rendezvous and its peers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{
    BodyCrc, FeatureOffer, Finish, Heartbeat, Hello, Leave, RankAddresses, RingEnd, RingJoin,
    RingOver, Role,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Features, Message, version};

use super::choices::RingChoices;
use super::frames::{framed, framed_hello, ring_end};
use crate::rendezvous::{Rendezvous, RendezvousConfig, RendezvousInput, RendezvousOutput};

const LEASE: Duration = Duration::from_secs(4);

/// The most actions that one input plays.
const ACTIONS_MAX: usize = 400;

/// The members of the first ring.
const SIZE: u32 = 3;

/// A peer, as the messages to it tell.
#[derive(Debug, Default)]
struct Peer {
    /// The epoch of its last ring, and its rank there.
    ring: Option<(u64, u32)>,
    is_over: bool,
    /// The members that were named since the last ring.
    named: Vec<u32>,
}

/// A rendezvous and its peers.
pub(super) struct RendezvousPlay<'a> {
    choices: RingChoices<'a>,
    rendezvous: Rendezvous,
    now: Instant,
    next: u64,
    /// The open connections.
    peers: BTreeMap<u64, Peer>,
    /// The rings that have formed, with the end of each.
    rings: BTreeMap<u64, Option<RingEnd>>,
}

impl<'a> RendezvousPlay<'a> {
    pub(super) fn new(now: Instant, mut choices: RingChoices<'a>) -> RendezvousPlay<'a> {
        let rendezvous = Rendezvous::new(RendezvousConfig {
            rendezvous: 77,
            job: "ring".to_owned(),
            identity: Identity::new().with("dtype", "f32"),
            lease: LEASE,
            join_window: choices.time(LEASE),
            succession_window: choices.time(LEASE),
            first_size_min: 1 + choices.below(SIZE as usize) as u32,
            size_min: 1 + choices.below(2) as u32,
            serving: choices.one_in(2).then_some(Incarnation(1)),
        });
        RendezvousPlay {
            choices,
            rendezvous,
            now,
            next: 0,
            peers: BTreeMap::new(),
            rings: BTreeMap::new(),
        }
    }

    /// Plays all choices. Returns how many rings have formed.
    pub(super) fn run(mut self) -> usize {
        for _ in 0..ACTIONS_MAX {
            if self.choices.is_empty() {
                break;
            }
            self.act();
        }
        // Silent peers are lost, so nothing is due any more after some leases.
        for _ in 0..64 {
            let Some(due) = self.rendezvous.wake_at() else { break };
            self.now = self.now.max(due);
            self.handle(RendezvousInput::Tick);
        }
        assert!(self.peers.is_empty(), "{:?} are silent for ever", self.peers);
        assert_eq!(self.rendezvous.wake_at(), None, "a timer without peers");
        self.rings.len()
    }

    fn act(&mut self) {
        match self.choices.below(12) {
            0..2 => self.arrive(),
            2..7 => self.join(),
            7 => self.send_any(),
            8 => self.report(),
            9 => {
                if let Some(connection) = self.connection() {
                    self.peers.remove(&connection);
                    let reason = self.choices.of(&["", "reset"]).to_owned();
                    self.handle(RendezvousInput::Closed { connection, reason });
                }
            }
            10 => {
                self.now += self.choices.time(LEASE);
                self.handle(RendezvousInput::Tick);
            }
            _ => {
                let due = self.rendezvous.wake_at();
                self.now = self.now.max(due.unwrap_or(self.now));
                self.handle(RendezvousInput::Tick);
            }
        }
    }

    /// Returns one of the open connections, or now and then one that is closed.
    fn connection(&mut self) -> Option<u64> {
        if self.choices.one_in(16) {
            return Some(self.choices.around(self.next));
        }
        let at = self.choices.below(self.peers.len());
        self.peers.keys().nth(at).copied()
    }

    fn arrive(&mut self) {
        let dtype = if self.choices.one_in(12) { "f64" } else { "f32" };
        let identity = Identity::new().with("dtype", dtype);
        let seed = self.choices.below(5) as u64;
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: if self.choices.one_in(16) { Role::Reader {} } else { Role::Rank {} },
            job: Text::clipped(if self.choices.one_in(16) { "other" } else { "ring" }),
            task: self.choices.around(0) as u32,
            shard: ShardId { task: 0, shard: 0 },
            incarnation: Incarnation(self.choices.around(seed)),
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_step: GlobalStep(0),
            seen_arena: 0,
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: identity.to_wire(),
            auth: None,
            features: FeatureOffer::of(Features::ALL),
        };
        let Some(hello) = framed_hello(hello) else { return };
        self.next += 1;
        self.peers.insert(self.next, Peer::default());
        self.handle(RendezvousInput::Arrived { connection: self.next, hello });
    }

    fn join(&mut self) {
        let Some(connection) = self.connection() else { return };
        let epoch = self.peers.get(&connection).and_then(|peer| peer.ring).map_or(0, |of| of.0);
        let id = self.choices.below(5);
        let index = self.choices.one_in(4).then(|| self.choices.around(id as u64) as u32);
        let gone = (0..self.choices.below(3)).map(|at| self.choices.around(at as u64) as u32);
        let gone: Vec<u32> = gone.collect();
        let join = RingJoin {
            id: Text::clipped(if id == 4 { String::new() } else { format!("m{id}") }),
            index,
            size: self.choices.around(SIZE.into()) as u32,
            host: Text::clipped("host"),
            addresses: RankAddresses::of([Text::clipped("host:1")]).unwrap_or_default(),
            epoch: self.choices.around(epoch),
            gone: List::of(gone).unwrap_or_default(),
        };
        self.send(connection, join.into());
    }

    fn send_any(&mut self) {
        let Some(connection) = self.connection() else { return };
        let message = match self.choices.below(8) {
            0 => Finish {}.into(),
            1 | 2 => Leave {}.into(),
            _ => Heartbeat {}.into(),
        };
        self.send(connection, message);
    }

    fn report(&mut self) {
        let Some(connection) = self.connection() else { return };
        let ring = self.peers.get(&connection).and_then(|peer| peer.ring);
        let (epoch, rank) = ring.unwrap_or_default();
        let end = ring_end(&mut self.choices, rank.into());
        let epoch = self.choices.around(epoch);
        self.send(connection, RingOver { epoch, end }.into());
    }

    fn send(&mut self, connection: u64, message: Message) {
        if let Some(message) = framed(&message) {
            self.handle(RendezvousInput::Message { connection, message });
        }
    }

    fn handle(&mut self, input: RendezvousInput) {
        self.rendezvous.handle(self.now, input);
        let mut probed = Vec::new();
        while let Some(output) = self.rendezvous.poll_output() {
            match output {
                RendezvousOutput::Send { connection, message } => self.sent(connection, message),
                RendezvousOutput::Close { connection } => {
                    assert!(self.peers.remove(&connection).is_some(), "{connection} is closed");
                }
                RendezvousOutput::Probe { incarnation, .. } => probed.push(incarnation),
            }
        }
        for incarnation in probed {
            let gone = self.choices.one_in(2);
            self.handle(RendezvousInput::Probed { incarnation, gone });
        }
        self.rendezvous.check_invariants();
        for (connection, peer) in &self.peers {
            // the end of a ring reaches all its members.
            let ends = peer.ring.map(|(epoch, _)| self.rings[&epoch].is_some());
            assert_eq!(ends.unwrap_or(peer.is_over), peer.is_over, "{connection}: {peer:?}");
        }
    }

    fn sent(&mut self, connection: u64, message: Message) {
        assert_eq!(framed(&message).as_ref(), Some(&message), "a message that nobody can read");
        let Some(peer) = self.peers.get_mut(&connection) else {
            panic!("{message:?} for {connection}, which is closed");
        };
        match message {
            Message::RingMember(member) => {
                assert_eq!(member.rank as usize, peer.named.len(), "the order of ranks");
                peer.named.push(member.index);
            }
            Message::RingFormed(formed) => {
                let named = std::mem::take(&mut peer.named);
                //
                assert_eq!(named.len(), formed.size as usize, "{formed:?}");
                assert!(named.is_sorted_by(|a, b| a < b), "{named:?}");
                assert!(formed.rank < formed.size, "{formed:?}");
                //
                let last = peer.ring.map_or(0, |(epoch, _)| epoch);
                assert!(formed.epoch > last && (peer.is_over || last == 0), "{formed:?}");
                let newest = self.rings.keys().last().copied().unwrap_or_default();
                assert!(formed.epoch >= newest, "{formed:?}");
                peer.ring = Some((formed.epoch, formed.rank));
                peer.is_over = false;
                self.rings.entry(formed.epoch).or_default();
            }
            Message::RingOver(over) => {
                //
                assert_eq!(peer.ring.map(|(epoch, _)| epoch), Some(over.epoch), "{over:?}");
                assert!(!peer.is_over, "{over:?} again");
                peer.is_over = true;
                let end = self.rings.entry(over.epoch).or_default();
                assert_eq!(end.get_or_insert_with(|| over.end.clone()), &over.end);
            }
            _ => {}
        }
    }
}
