//! The way of a member from its request for a place to the waiting list.

use std::time::Instant;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::message::{RingEnd, RingJoin};

use super::Rendezvous;
use super::admission::fenced;
use super::endings::Loss;
use super::places::Claim;
use super::ring::Ring;
use super::waiting_list::Candidate;

impl Rendezvous {
    pub(super) fn on_join(&mut self, now: Instant, connection: u64, join: RingJoin) {
        let ring = self.ring.as_ref().filter(|ring| ring.seat(connection).is_some());
        if ring.is_some_and(|ring| join.epoch < ring.epoch()) {
            // A member that waits may repeat its request, and this one has crossed the ring.
            return;
        }
        let asks_early = ring.is_some_and(Ring::is_running);
        if let Err(refusal) = self.check_join(connection, &join) {
            self.lose(now, connection, Loss::Refused { refusal });
            return;
        }
        let Some(peer) = self.connections.get_mut(connection) else { return };
        peer.computes_after = None;
        let incarnation = peer.incarnation;
        self.facts.get_or_insert_with(|| peer.identity.clone());
        if asks_early {
            self.end_ring(RingEnd::Regrouped {});
        }
        self.replace_older(now, connection, &join, incarnation);
        if let Some(index) = join.index {
            // The launcher's index is not kept for an id that is away.
            let is_own = self.places.own(Claim { id: join.id.as_str(), index: None });
            if is_own != Some(index) {
                self.places.release_index(index);
            }
        }
        self.lineage.enter(join.epoch, join.id.as_str(), incarnation);
        self.newest_epoch = self.newest_epoch.max(join.epoch);
        if join.epoch == 0 {
            self.first_size = Some(join.size);
        }
        self.waiting.insert(now, connection, Candidate { incarnation, join });
        self.newcomers.push(connection);
        self.changed = true;
    }

    /// Fences the processes that have had the id of a member, and closes the connection of one
    /// that still has it.
    fn replace_older(
        &mut self,
        now: Instant,
        connection: u64,
        join: &RingJoin,
        incarnation: Incarnation,
    ) {
        let id = join.id.as_str();
        let holder = self.holder_of_id(id).filter(|&holder| holder != connection);
        let holding = holder.and_then(|holder| self.connections.get(holder));
        let older = [holding.map(|peer| peer.incarnation), self.places.incarnation(id)];
        for older in older.into_iter().flatten().filter(|&older| older != incarnation) {
            self.fences.add(id, older);
        }
        if let Some((holder, peer)) = holder.zip(holding) {
            let refusal = fenced(peer.incarnation, incarnation);
            self.lose(now, holder, Loss::Replaced { refusal });
        }
    }
}
