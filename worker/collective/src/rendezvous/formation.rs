//! The formation of rings, and what those hear that wait for one.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{Refused, RingFormed, RingJoin, RingJoiners, RingMember};

use super::Rendezvous;
use super::endings::Loss;
use super::gathering::{Decision, Gathering};
use super::lineage::Voter;
use super::places::Claim;
use super::ring::{Ring, Seat};

impl Rendezvous {
    /// Forms the next ring, or notes whom it waits for.
    pub(super) fn decide(&mut self, now: Instant) {
        if !self.changed && self.decision_at.is_none_or(|at| at > now) {
            return;
        }
        self.changed = false;
        self.decision_at = None;
        let waits = loop {
            if self.is_stopping {
                self.refuse_waiting();
            }
            if self.waiting.len() == 0 {
                self.window_opened = None;
                self.forget_run();
                break None;
            }
            let gathering = Gathering {
                config: &self.config,
                connections: &self.connections,
                waiting: &self.waiting,
                places: &self.places,
                ring: self.ring.as_ref(),
                lineage: &self.lineage,
                first_size: self.first_size,
            };
            let opened = self.window_opened.unwrap_or(now);
            self.window_opened = gathering.has_window().then_some(opened);
            match gathering.decide(now, self.window_opened) {
                Decision::Wait { waits, until } => {
                    self.decision_at = until;
                    break Some(waits);
                }
                Decision::Form => self.form(now),
                Decision::RefuseFormer(refusal) => self.refuse_former(now, &refusal),
            }
        };
        if self.waits != waits {
            self.waits = waits;
            self.waits_pacing.change();
        }
    }

    /// Sends those that wait to another rendezvous.
    fn refuse_waiting(&mut self) {
        for (connection, _) in self.waiting.take_all() {
            self.connections.remove(connection);
            self.ring.as_mut().and_then(|ring| ring.vacate(connection));
            self.outputs.send(connection, Refused { refusal: Refusal::Stopping {} });
            self.outputs.close(connection);
        }
    }

    /// Refuses those that were in a ring of another rendezvous.
    fn refuse_former(&mut self, now: Instant, refusal: &Refusal) {
        let waiting = self.waiting.iter().filter(|(_, candidate)| candidate.join.epoch > 0);
        let former: Vec<u64> = waiting.map(|(connection, _)| connection).collect();
        for connection in former {
            self.lose(now, connection, Loss::Refused { refusal: refusal.clone() });
        }
    }

    /// Forms a ring of all that wait.
    fn form(&mut self, now: Instant) {
        // Does not saturate: members name no epoch above half of all numbers.
        let epoch = self.newest_epoch.saturating_add(1);
        if self.ring.is_none()
            && let Some(former) = self.waiting.former_ring()
        {
            self.lineage.adopt(&former, &self.waiting);
        }
        let candidates = self.waiting.take_all();
        let claims: Vec<Claim<'_>> = candidates.iter().map(|(_, of)| of.claim()).collect();
        let indices = self.places.assign(&claims);
        let mut members: Vec<_> = indices.into_iter().zip(candidates).collect();
        members.sort_by_key(|(index, _)| *index);
        let mut seats = Vec::with_capacity(members.len());
        let mut roster = Vec::with_capacity(members.len());
        let mut voters = Vec::with_capacity(members.len());
        let mut serving = None;
        for (rank, (index, (connection, candidate))) in members.into_iter().enumerate() {
            if self.config.serving == Some(candidate.incarnation) {
                serving = Some(rank as u32);
            }
            let RingJoin { id, host, addresses, .. } = candidate.join;
            self.places.settle(id.as_str(), index, candidate.incarnation);
            voters.push(Voter::new(id.as_str(), candidate.incarnation, addresses.clone()));
            let id = id.as_str().to_owned();
            let connection = Some(connection);
            seats.push(Seat { id, index, host: host.clone(), connection });
            let process = candidate.incarnation;
            roster.push(RingMember { rank: rank as u32, index, process, host, addresses });
        }
        let size = roster.len() as u32;
        let roster: Arc<[RingMember]> = roster.into();
        let lease_ms = u32::try_from(self.config.lease.as_millis()).unwrap_or(u32::MAX);
        let rendezvous = self.config.rendezvous;
        let connections = seats.iter().filter_map(|seat| seat.connection);
        for (rank, connection) in connections.enumerate() {
            let rank = rank as u32;
            let formed = RingFormed { rendezvous, epoch, rank, size, lease_ms, serving };
            self.outputs.send_roster(connection, Arc::clone(&roster), formed);
        }
        self.ring = Some(Ring::new(now, epoch, seats));
        self.lineage.form(epoch, voters);
        self.newest_epoch = epoch;
        self.joiners_told = 0;
    }

    /// Forgets what the members of a run have agreed on, once none of them is here.
    fn forget_run(&mut self) {
        if self.members() == 0 {
            self.facts = None;
            self.first_size = None;
        }
    }

    /// Tells those that wait whom they wait for, and a ring how many wait for its end.
    pub(super) fn announce(&mut self, now: Instant) {
        let newcomers = std::mem::take(&mut self.newcomers);
        if let Some(waits) = &self.waits {
            match self.waits_pacing.take(now) {
                true => {
                    self.waiting.iter().for_each(|(to, _)| self.outputs.send(to, waits.clone()));
                }
                false => {
                    let newcomers = newcomers.into_iter().filter(|to| self.waiting.contains(*to));
                    newcomers.for_each(|to| self.outputs.send(to, waits.clone()));
                }
            }
        }
        if self.has_joiners_to_tell() {
            self.joiners_pacing.change();
            if self.joiners_pacing.take(now)
                && let Some(ring) = &self.ring
            {
                let count = self.waiting.len() as u32;
                self.joiners_told = count;
                ring.live().for_each(|(to, _)| self.outputs.send(to, RingJoiners { count }));
            }
        }
    }
}
