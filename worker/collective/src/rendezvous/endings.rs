//! The ends of connections, and of the rings that their members were in.

use std::time::Instant;

use pushpull_common::protocol::message::{Left, Refused, RingEnd, RingOver};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, Refusal};

use super::Rendezvous;
use super::connections::Peer;
use super::ring::Ring;

/// The way in which a connection ends.
pub(super) enum Loss {
    /// The peer or the network has closed it.
    Broken { reason: String },
    /// The peer was silent for a lease.
    Silent,
    /// A newer process has the id of the peer.
    Replaced { refusal: Refusal },
    /// The peer is refused.
    Refused { refusal: Refusal },
}

impl Rendezvous {
    pub(super) fn on_over(&mut self, now: Instant, connection: u64, over: RingOver) {
        let Some(ring) = &self.ring else { return };
        let Some(rank) = ring.rank(connection) else { return };
        if over.epoch != ring.epoch() {
            return;
        }
        if let Some(fault) = ring.fault_of(rank, &over.end) {
            let kind = Message::from(over).kind();
            let refusal = Refusal::Unsupported { kind, detail: Detail::shortened(fault) };
            self.lose(now, connection, Loss::Refused { refusal });
            return;
        }
        self.end_ring(over.end);
    }

    /// A member that leaves gives its index up.
    pub(super) fn on_leave(&mut self, now: Instant, connection: u64) {
        if let Some(id) = self.id_of(connection).map(str::to_owned) {
            self.places.release(&id);
        }
        self.outputs.send(connection, Left {});
        self.outputs.close(connection);
        let peer = self.connections.remove(connection);
        // A process with another connection stays.
        let ending = peer.map(|peer| peer.incarnation);
        if let Some(process) = ending.filter(|process| !self.connections.has_process(*process)) {
            self.lineage.end(process);
            // The process ends soon. The members that are left meet at a successor.
            self.is_stopping |= self.config.serving == Some(process);
        }
        self.waiting.remove(connection);
        self.changed = true;
        let seat = self.ring.as_mut().and_then(|ring| ring.vacate(connection));
        if let Some((rank, _)) = seat {
            self.end_ring(RingEnd::Left { rank });
        }
        if self.is_stopping {
            // Members that ask after this are refused. Those that wait would form a ring without
            // them.
            let waiting: Vec<u64> = self.waiting.iter().map(|(waiting, _)| waiting).collect();
            for waiting in waiting {
                self.lose(now, waiting, Loss::Refused { refusal: Refusal::Stopping {} });
            }
        }
    }

    /// Removes a connection, and ends the ring that its member was in.
    pub(super) fn lose(&mut self, now: Instant, connection: u64, loss: Loss) {
        let Some(peer) = self.connections.remove(connection) else { return };
        self.waiting.remove(connection);
        self.changed = true;
        // A rendezvous without its member forms no ring: members meet at a successor.
        self.is_stopping |= self.config.serving == Some(peer.incarnation)
            && !self.connections.has_process(peer.incarnation);
        if let Loss::Broken { .. } | Loss::Replaced { .. } = &loss {
            self.ask_for_end(now, &peer);
        }
        let silent = now.saturating_duration_since(peer.heard);
        let silent_ms = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
        let detail = match &loss {
            Loss::Broken { reason } if reason.is_empty() => "the connection has ended".to_owned(),
            Loss::Broken { reason } => reason.clone(),
            Loss::Silent => String::new(),
            Loss::Replaced { .. } => "another process has taken its id".to_owned(),
            Loss::Refused { refusal } => format!("it was refused: {refusal}"),
        };
        let running = self.ring.as_ref().filter(|ring| ring.is_running()).map(Ring::epoch);
        let seat = self.ring.as_mut().and_then(|ring| ring.vacate(connection));
        let detail = Detail::shortened(detail);
        let end = seat.map(|(rank, host)| RingEnd::Lost { rank, host, silent_ms, detail });
        let over = running.zip(end).map(|(epoch, end)| RingOver { epoch, end });
        let last_word = match loss {
            Loss::Broken { .. } => None,
            Loss::Refused { refusal } => Some(Refused { refusal }.into()),
            // The process may live, and shall not take the rendezvous for lost.
            Loss::Silent | Loss::Replaced { .. } => Some(match (&over, loss) {
                (Some(over), _) => over.clone().into(),
                (None, Loss::Replaced { refusal }) => Refused { refusal }.into(),
                (None, _) => {
                    let awaited = Detail::clipped("a heartbeat of this member");
                    let refusal = Refusal::Deadline { waited_ms: silent_ms, awaited };
                    Message::from(Refused { refusal })
                }
            }),
        };
        if let Some(message) = last_word {
            self.outputs.send(connection, message);
            self.outputs.close(connection);
        }
        if let Some(over) = over {
            self.end_ring(over.end);
        }
    }

    /// Asks whether a process has ended whose connection has. If it has before it would take this
    /// rendezvous for lost, it is at no other.
    fn ask_for_end(&mut self, now: Instant, peer: &Peer) {
        let voter = self.lineage.voter(peer.incarnation);
        if let (Some(voter), Some(until)) = (voter, peer.bound_until(self.config.lease)) {
            self.probes.add(now, peer.incarnation, voter.addresses.clone(), until);
        }
    }

    /// Ends the present ring, unless it is over, and tells its members.
    pub(super) fn end_ring(&mut self, end: RingEnd) {
        let Some(ring) = &mut self.ring else { return };
        if !ring.end() {
            return;
        }
        self.changed = true;
        for (connection, _) in ring.live() {
            self.outputs.send(connection, RingOver { epoch: ring.epoch(), end: end.clone() });
        }
    }
}
