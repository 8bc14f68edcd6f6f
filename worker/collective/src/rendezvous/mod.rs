//! [`Rendezvous`]: the one authority for the members of rings, as a state machine.

mod admission;
mod connections;
mod endings;
mod fences;
mod formation;
mod gathering;
#[cfg(any(test, feature = "simulation"))]
mod invariants;
mod io;
mod joining;
mod lineage;
mod outputs;
mod pacing;
mod places;
mod probes;
mod ring;
#[cfg(test)]
mod tests;
mod waiting_list;

use std::time::Instant;

use pushpull_common::identity::Identity;
use pushpull_common::protocol::message::{HeartbeatAnswer, Hello, Refused, RingWaits, Role};
use pushpull_common::protocol::{Message, Refusal};

use self::connections::{Connections, Peer};
use self::endings::Loss;
use self::fences::Fences;
pub(crate) use self::io::{RendezvousConfig, RendezvousInput, RendezvousOutput};
use self::lineage::Lineage;
use self::outputs::Outputs;
use self::pacing::Pacing;
use self::places::Places;
use self::probes::Probes;
use self::ring::Ring;
use self::waiting_list::WaitingList;

/// The rendezvous of one job, as a state machine.
///
/// **In**: hellos, messages and ends of connections, and the time. **Out**: messages, and
/// connections to close. **Time**: a peer that is silent for a lease is lost; a ring may form
/// without members that do not come within a window; members that wait hear so again and again.
///
/// A peer says hello and asks for a place by `RingJoin`. It waits, is in the ring that forms, and
/// once that is over, asks again on the same connection or leaves. Members that have asked while a
/// ring runs are in the next one.
///
/// **What may never happen.** Tests cite these by their numbers.
///
/// - No two members of a ring have one rank, one index or one id. The ranks are the positions
///   in order of the indices.
/// - No epoch is lower than that of a ring before, or than one that a member has named.
/// - No ring ends in two ways: each of its members that is connected hears the same end, once.
/// - No member is in two rings: the next one forms once every live member of the last has
///   asked for it.
/// - No member that was lost loses its index, unless a launcher gives that to another id, or
///   every index is taken.
/// - No member waits in silence: it hears of the wait at least every quarter of a lease, and
///   the ring forms as soon as its rule is met.
/// - Nothing that a peer sends panics, or takes memory beyond the limits.
/// - No successor forms a ring of half of the last one or fewer, unless it knows that all other
///   members are gone.
/// - No process comes back whose id a newer process has taken.
/// - No rendezvous in a member forms a ring while more than half of its last one may be at a
///   successor. That holds for every ring that the last one has not replaced: see [`Lineage`].
#[derive(Debug)]
pub(crate) struct Rendezvous {
    config: RendezvousConfig,
    /// The facts of the first member of this run; `None` while there is no member.
    facts: Option<Identity>,
    connections: Connections,
    waiting: WaitingList,
    places: Places,
    fences: Fences,
    /// The present ring, or the last one.
    ring: Option<Ring>,
    /// The rings that the next one replaces.
    lineage: Lineage,
    /// The processes that this rendezvous has asked whether they run.
    probes: Probes,
    /// The newest epoch that a ring here has had, or a member has named; 0 for none.
    newest_epoch: u64,
    /// The number of members of the first ring, as its members name it.
    first_size: Option<u32>,
    /// Whether the member in whose process this is has left.
    is_stopping: bool,
    /// The time of the last input.
    handled_at: Option<Instant>,
    /// Whether the members or their requests have changed since the last decision.
    changed: bool,
    /// The time at which the decision about the waiting members changes by itself.
    decision_at: Option<Instant>,
    /// The time since which the window for more members has been running.
    window_opened: Option<Instant>,
    /// The state of the wait; `None` while nobody waits.
    waits: Option<RingWaits>,
    waits_pacing: Pacing,
    /// Those that wait and have not heard so yet.
    newcomers: Vec<u64>,
    /// The number of joiners that the present ring was told of.
    joiners_told: u32,
    joiners_pacing: Pacing,
    outputs: Outputs,
}

impl Rendezvous {
    pub(crate) fn new(config: RendezvousConfig) -> Rendezvous {
        let pause = config.lease / PAUSES_PER_LEASE;
        let interval = config.lease / WAITS_PER_LEASE;
        Rendezvous {
            config,
            facts: None,
            connections: Connections::default(),
            waiting: WaitingList::default(),
            places: Places::default(),
            fences: Fences::default(),
            ring: None,
            lineage: Lineage::default(),
            probes: Probes::new(pause),
            newest_epoch: 0,
            first_size: None,
            is_stopping: false,
            handled_at: None,
            changed: false,
            decision_at: None,
            window_opened: None,
            waits: None,
            waits_pacing: Pacing::new(pause, Some(interval)),
            newcomers: Vec::new(),
            joiners_told: 0,
            joiners_pacing: Pacing::new(pause, None),
            outputs: Outputs::default(),
        }
    }

    /// Returns the next action.
    pub(crate) fn poll_output(&mut self) -> Option<RendezvousOutput> {
        self.outputs.poll()
    }

    /// Returns when a [`RendezvousInput::Tick`] is due; `None` while nothing depends on the time.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let waits = self.waits.as_ref().and_then(|_| self.waits_pacing.due());
        let joiners = self.has_joiners_to_tell().then(|| self.joiners_pacing.due()).flatten();
        let lease = self.connections.lease_ends(self.config.lease);
        let probe = self.probes.next();
        [lease, self.decision_at, waits, joiners, probe, self.pulse()].into_iter().flatten().min()
    }

    /// Handles an input and queues the outputs that follow from it.
    pub(crate) fn handle(&mut self, now: Instant, input: RendezvousInput) {
        self.excuse_silence(now);
        match input {
            RendezvousInput::Arrived { connection, hello } => {
                self.on_arrival(now, connection, &hello);
            }
            RendezvousInput::Message { connection, message } => {
                if self.connections.hear(connection, now) {
                    self.on_message(now, connection, message);
                }
            }
            RendezvousInput::Closed { connection, reason } => {
                self.lose(now, connection, Loss::Broken { reason });
            }
            RendezvousInput::Probed { incarnation, gone } => {
                if self.probes.end(now, incarnation, gone) {
                    self.lineage.end(incarnation);
                    self.changed = true;
                }
            }
            RendezvousInput::Tick => {}
        }
        for silent in self.connections.silent(now, self.config.lease) {
            self.lose(now, silent, Loss::Silent);
        }
        self.decide(now);
        self.announce(now);
        while let Some((incarnation, addresses)) = self.probes.begin(now) {
            self.outputs.probe(incarnation, addresses);
        }
    }

    /// Returns when this side is to run next, so that it notices a stop of its own.
    fn pulse(&self) -> Option<Instant> {
        let has_peers = self.connections.len() > 0;
        self.handled_at.filter(|_| has_peers)?.checked_add(self.config.lease / WAITS_PER_LEASE)
    }

    /// Leaves every peer half a lease if this side is late itself: their messages may lie in
    /// buffers that it has not read.
    fn excuse_silence(&mut self, now: Instant) {
        let lease = self.config.lease;
        let late = self.wake_at().map(|due| now.saturating_duration_since(due));
        if late.is_some_and(|late| late >= lease / LATENESSES_PER_LEASE)
            && let Some(heard) = now.checked_sub(lease / 2)
        {
            self.connections.excuse(heard);
        }
        self.handled_at = Some(now);
    }

    fn on_arrival(&mut self, now: Instant, connection: u64, hello: &Hello) {
        if self.connections.get(connection).is_some() {
            return;
        }
        let identity = Identity::from_wire(&hello.identity);
        match self.check_hello(hello, &identity) {
            Ok(()) => {
                let peer = Peer::new(now, hello.incarnation, identity);
                self.connections.insert(connection, peer);
            }
            Err(refusal) => {
                self.outputs.send(connection, Refused { refusal });
                self.outputs.close(connection);
            }
        }
    }

    fn on_message(&mut self, now: Instant, connection: u64, message: Message) {
        match message {
            Message::Heartbeat(_) => {
                if let Some(peer) = self.connections.get_mut(connection) {
                    peer.answer(now);
                }
                self.outputs.send(connection, HeartbeatAnswer {});
            }
            Message::RingJoin(join) => self.on_join(now, connection, join),
            Message::RingEntered(entered) => self.on_entered(connection, entered.epoch),
            Message::RingOver(over) => self.on_over(now, connection, over),
            Message::Leave(_) => self.on_leave(now, connection),
            other => {
                let refusal = Refusal::Role { role: Role::Rank {}.code(), kind: other.kind() };
                self.lose(now, connection, Loss::Refused { refusal });
            }
        }
    }

    fn on_entered(&mut self, connection: u64, epoch: u64) {
        let Some(peer) = self.connections.get_mut(connection) else { return };
        let Some(ring) = &self.ring else {
            // A member of another rendezvous, which is lost.
            if !self.waiting.contains(connection) {
                peer.computes_after = Some(epoch);
                self.changed = true;
            }
            return;
        };
        if let Some(seat) = ring.seat(connection).filter(|_| ring.epoch() == epoch) {
            peer.confirm(ring.formed_at());
            self.lineage.enter(epoch, &seat.id, peer.incarnation);
        }
    }

    /// Returns whether the present ring does not know how many members wait.
    fn has_joiners_to_tell(&self) -> bool {
        let is_running = self.ring.as_ref().is_some_and(Ring::is_running);
        is_running && self.waiting.len() as u32 != self.joiners_told
    }

    /// Returns the number of members: those that wait, and those of the ring that do not.
    fn members(&self) -> usize {
        let seats = self.ring.iter().flat_map(Ring::live);
        let absent = seats.filter(|(connection, _)| !self.waiting.contains(*connection)).count();
        self.waiting.len() + absent
    }

    /// Returns the id under which a connection has asked for a place.
    fn id_of(&self, connection: u64) -> Option<&str> {
        let waiting = self.waiting.get(connection).map(|candidate| candidate.join.id.as_str());
        let seat = || self.ring.as_ref()?.seat(connection).map(|seat| seat.id.as_str());
        waiting.or_else(seat)
    }

    /// Returns the connection of the member that has an id.
    fn holder_of_id(&self, id: &str) -> Option<u64> {
        let mut waiting = self.waiting.iter().filter(|(_, of)| of.join.id.as_str() == id);
        let mut seats = self.ring.iter().flat_map(Ring::live).filter(|(_, seat)| seat.id == id);
        let of_seat = || seats.next().map(|(connection, _)| connection);
        waiting.next().map(|(connection, _)| connection).or_else(of_seat)
    }
}

/// The reports of a wait within a lease, by which a member knows that the rendezvous is alive.
const WAITS_PER_LEASE: u32 = 4;

/// The lateness of this side that excuses the silence of others, as a part of a lease. A shorter one
/// makes no peer late, because they send heartbeats every quarter of a lease.
const LATENESSES_PER_LEASE: u32 = 8;

/// The most announcements of one kind within a lease.
const PAUSES_PER_LEASE: u32 = 16;
