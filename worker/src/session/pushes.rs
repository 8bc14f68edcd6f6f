//! Pushes: parts to every shard they touch under one sequence number, until each has settled it.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{RequestId, Sequence, ShardId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::{Operation, OutcomeQuery, Reserve, Withdraw};
use pushpull_common::protocol::{Envelope, Grant, Outcome, Refusal};

use super::link::{Pending, Status};
use super::{PushOrder, Read, Session};
use crate::error::Error;
use crate::parts::{Body, InPushBuffer, Part, Scattered};
use crate::staging::StagedParts;

/// How far a push is on one shard.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Phase {
    /// It needs room there.
    #[default]
    Roomless,
    /// It has asked for room.
    Reserving,
    /// It has room, and sends what there is.
    Sending,
    /// All has been sent; what became of it is open.
    Sent,
    /// The step owner has it whole, and has not decided while somebody waited (synchronous mode). It
    /// is asked about again with the next command.
    Undecided,
    /// The connection was lost after something had been sent: what does the shard know of it?
    InDoubt,
    /// That has been asked.
    Asking,
    /// The shard has settled it.
    Settled(Result<Outcome, Refusal>),
}

/// One shard's share of a push.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) link: usize,
    pub(super) parts: Vec<Part>,
    /// What of them lies in a tray of the shard.
    pub(super) in_push_buffer: Option<InPushBuffer>,
    /// Whether that is named, and not sent: the tray is of the present connection.
    pub(super) names: bool,
    /// How many of the parts have been sent over the present connection.
    pub(super) sent: usize,
    pub(super) push_slot: u32,
    pub(super) request: Option<RequestId>,
    /// When the last part was sent, with the deadlines of those who waited then.
    pub(super) asked: Option<Instant>,
    /// The last part has been sent, and the shard has not denied having got it.
    pub(super) whole: bool,
    pub(super) phase: Phase,
}

/// A push under way.
#[derive(Debug)]
pub(super) struct Push {
    pub(super) operation: Operation,
    /// A gradient in synchronous mode: the step owner decides for all shards.
    pub(super) synchronous: bool,
    /// A gradient in asynchronous mode: what the step owner does not apply, no shard may apply.
    follows_owner: bool,
    pub(super) grant: Option<Grant>,
    pub(super) read: Read,
    pub(super) shares: Vec<Share>,
    /// No more parts will come.
    pub(super) complete: bool,
}

impl Push {
    pub(super) fn unsettled(&self) -> impl Iterator<Item = usize> + '_ {
        let open = self.shares.iter().filter(|share| !matches!(share.phase, Phase::Settled(_)));
        open.map(|share| share.link)
    }

    /// Whether the step owner has applied it; nothing while it has said nothing.
    fn is_applied_by(&self, owner: Option<usize>) -> Option<bool> {
        self.shares.iter().find_map(|share| match &share.phase {
            Phase::Settled(word) if Some(share.link) == owner => {
                Some(matches!(word, Ok(Outcome::Applied { .. })))
            }
            _ => None,
        })
    }

    /// Whether the step owner does not take it: then no shard does.
    pub(super) fn is_not_taken_by(&self, owner: Option<usize>) -> bool {
        self.follows_owner && self.is_applied_by(owner) == Some(false)
    }

    /// Whether some shard may hold all of its share and has not said what became of it.
    pub(super) fn is_whole_somewhere(&self) -> bool {
        self.shares.iter().any(|share| share.whole && !matches!(share.phase, Phase::Settled(_)))
    }

    /// Whether some shard may have counted it, so that the others must.
    pub(super) fn must_go_on(&self) -> bool {
        !self.synchronous && self.may_be_whole()
    }

    /// Whether some shard may hold all of its share: then it can no longer be withdrawn.
    fn may_be_whole(&self) -> bool {
        self.shares.iter().any(|share| match share.phase {
            Phase::Settled(Err(_)) => false,
            Phase::Settled(Ok(_)) => true,
            _ => share.whole,
        })
    }
}

impl Session {
    /// Gives a push its number and keeps it until it is settled.
    pub(super) fn begin_push(
        &mut self,
        now: Instant,
        order: PushOrder,
        complete: bool,
    ) -> Result<Sequence, Error> {
        let oldest = self.pushes.first_key_value().map_or(self.next_sequence, |(first, _)| first.0);
        if self.next_sequence - oldest >= WINDOW {
            if let Some(grant) = order.grant {
                self.return_token(now, grant);
            }
            return Err(Error::Window { limit: WINDOW });
        }
        let sequence = Sequence(self.next_sequence);
        self.next_sequence += 1;
        let PushOrder { operation, grant, read, scattered, own, parts } = order;
        let synchronous = self.synchronous && operation == (Operation::Gradient {});
        let follows_owner = !self.synchronous && operation == (Operation::Gradient {});
        let shares = Vec::new();
        let mut push =
            Push { operation, synchronous, follows_owner, grant, read, shares, complete };
        self.add_parts(now, &mut push, own, parts);
        if let Some(scattered) = scattered {
            self.add_scattered(now, &mut push, &scattered);
        }
        if operation == (Operation::Gradient {}) {
            // The owner counts the step when it has applied its share, empty or not.
            self.share(now, &mut push, self.start.owner);
        }
        if synchronous && let Some(plan) = self.plan.clone() {
            // A step is taken when every shard holds all of its pushes.
            plan.shards().iter().for_each(|&shard| _ = self.share(now, &mut push, shard));
        }
        self.pushes.insert(sequence, push);
        Ok(sequence)
    }

    fn add_parts(
        &mut self,
        now: Instant,
        push: &mut Push,
        own: Option<Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<Part>)>,
    ) {
        for (shard, part) in own.iter().flat_map(StagedParts::parts) {
            self.share(now, push, shard).parts.push(part);
        }
        for (shard, parts) in parts {
            self.share(now, push, shard).parts.extend(parts);
        }
    }

    fn add_scattered(&mut self, now: Instant, push: &mut Push, scattered: &Scattered) {
        for (index, shard) in scattered.shards().enumerate() {
            let share = self.share(now, push, shard);
            share.in_push_buffer = scattered.in_push_buffer(index, share.parts.len());
            share.parts.extend(scattered.parts(index));
        }
    }

    fn share<'a>(&mut self, now: Instant, push: &'a mut Push, shard: ShardId) -> &'a mut Share {
        let link = self.link_to(now, shard);
        if let Some(index) = push.shares.iter().position(|share| share.link == link) {
            return &mut push.shares[index];
        }
        push.shares.push(Share { link, ..Share::default() });
        let last = push.shares.len() - 1;
        &mut push.shares[last]
    }

    pub(super) fn more_parts(
        &mut self,
        now: Instant,
        sequence: Sequence,
        own: Option<Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<Part>)>,
    ) {
        let Some(mut push) = self.pushes.remove(&sequence) else {
            return;
        };
        self.add_parts(now, &mut push, own, parts);
        self.pushes.insert(sequence, push);
        self.drive_push(now, sequence);
    }

    pub(super) fn end_push(&mut self, sequence: Sequence) {
        if let Some(push) = self.pushes.get_mut(&sequence) {
            push.complete = true;
        }
    }

    /// Sends of a push what can be sent now.
    pub(super) fn drive_push(&mut self, now: Instant, sequence: Sequence) {
        let Some(mut push) = self.pushes.remove(&sequence) else {
            return;
        };
        for index in 0..push.shares.len() {
            self.drive_share(now, sequence, &mut push, index);
        }
        self.pushes.insert(sequence, push);
        self.settle_if_done(now, sequence);
    }

    fn drive_share(&mut self, now: Instant, sequence: Sequence, push: &mut Push, index: usize) {
        let share = &mut push.shares[index];
        let link = share.link;
        if self.links[link].status != Status::Up {
            return;
        }
        let envelope = Envelope { sequence, ..Envelope::default() };
        let begins = matches!(share.phase, Phase::Roomless | Phase::Sending) && !share.whole;
        if begins && push.is_not_taken_by(self.owner_link()) {
            return;
        }
        let share = &mut push.shares[index];
        match share.phase {
            Phase::InDoubt => {
                share.phase = Phase::Asking;
                let pending = Pending::PushState(sequence);
                self.send(now, link, pending, envelope, OutcomeQuery {}, Body::Empty);
            }
            Phase::Roomless if push.complete || !share.parts.is_empty() => {
                let push_buffer = self.links[link].push_buffer;
                let there = share
                    .in_push_buffer
                    .as_ref()
                    .filter(|there| Some(there.push_buffer) == push_buffer);
                share.names = there.is_some();
                share.push_slot = match there {
                    Some(there) => there.push_slot,
                    None => std::mem::take(&mut self.links[link].push_slot),
                };
                if share.push_slot != 0 {
                    share.phase = Phase::Sending;
                    self.send_parts(now, sequence, push, index);
                } else {
                    share.phase = Phase::Reserving;
                    self.send(
                        now,
                        link,
                        Pending::Reserve(sequence),
                        envelope,
                        Reserve {},
                        Body::Empty,
                    );
                }
            }
            Phase::Sending => self.send_parts(now, sequence, push, index),
            _ => {}
        }
    }

    /// Whether a shard may be told that a push is whole, and so may apply it.
    ///
    /// A gradient goes to all shards at once where its token was granted after the shard had welcomed
    /// this session: before the owner takes such a token back it has the shard close the connection.
    /// Over a connection that is newer than the token, the owner's word comes first; and always where
    /// the owner may find a gradient too old.
    pub(super) fn may_end_on(&self, push: &Push, link: usize) -> bool {
        let owner = self.owner_link();
        if !push.follows_owner || Some(link) == owner {
            return true;
        }
        // What it has whole it may have applied. To say so again asks for the answer.
        if push.shares.iter().any(|share| share.link == link && share.whole) {
            return true;
        }
        push.is_applied_by(owner).unwrap_or_else(|| {
            let granted_since = self.links[link].granted_since;
            let granted = push.grant.zip(granted_since);
            !self.owner_first && granted.is_some_and(|(grant, since)| grant.token >= since)
        })
    }

    /// The shards whose answers a push waits for now.
    pub(super) fn awaited_by(&self, push: &Push) -> Vec<usize> {
        push.unsettled().filter(|&link| self.may_end_on(push, link)).collect()
    }

    /// The caller has given a push up. If no shard can hold it whole it is withdrawn; if one may,
    /// it goes on, because what one shard has counted the others must count.
    pub(super) fn withdraw(&mut self, now: Instant, sequence: Sequence) {
        let Some(push) = self.pushes.get(&sequence) else {
            return;
        };
        if push.may_be_whole() {
            return;
        }
        let Some(push) = self.pushes.remove(&sequence) else {
            return;
        };
        self.withdraw_shares(now, sequence, &push);
        let grant = push.grant;
        drop(push);
        if let Some(grant) = grant {
            self.return_token(now, grant);
        }
    }

    /// Withdraws what shards have been sent of a push that has ended, and may not hold whole.
    pub(super) fn withdraw_shares(&mut self, now: Instant, sequence: Sequence, push: &Push) {
        for share in push.shares.iter().filter(|share| share.sent > 0 && !share.whole) {
            let settled = matches!(share.phase, Phase::Settled(_));
            if !settled && self.links[share.link].status == Status::Up {
                let envelope = Envelope { sequence, ..Envelope::default() };
                let pending = Pending::Withdraw(share.request);
                self.send(now, share.link, pending, envelope, Withdraw {}, Body::Empty);
            }
        }
    }
}

impl Share {
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(Part::bytes).sum()
    }

    /// Whether this can be the answer now: that its step has passed may be said of a push that is
    /// not whole.
    pub(super) fn awaits(&self, outcome: Outcome) -> bool {
        match self.phase {
            Phase::Sent => true,
            Phase::Sending => self.sent > 0 && matches!(outcome, Outcome::Stale { .. }),
            _ => false,
        }
    }

    /// The shard has nothing of it: room is needed, and all parts are sent again.
    pub(super) fn start_over(&mut self) {
        (self.sent, self.request, self.whole, self.phase) = (0, None, false, Phase::Roomless);
        self.names = false;
    }
}
