//! Pushes: parts sent to every shard they touch, under one sequence number, until all have settled.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{RequestId, Sequence, ShardId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::{Operation, OutcomeQuery, Reserve, Withdraw};
use pushpull_common::protocol::{Envelope, Grant, Outcome, Refusal};

use super::link::{LinkStatus, PendingRequest};
use super::{PushOrder, ReadPoint, Session};
use crate::error::Error;
use crate::gradients::parts::{FrameBody, OutgoingPart};
use crate::gradients::scatter::{PushBufferParts, ScatteredGradients};
use crate::gradients::staged_parts::StagedParts;

/// The state of a push on one shard.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum SharePhase {
    /// Needs a push slot.
    #[default]
    NoSlot,
    /// Has requested a push slot.
    Reserving,
    /// Has a push slot; parts are sent as they come.
    Sending,
    /// All parts are sent; the outcome is unknown.
    Sent,
    /// The step owner holds the share and did not decide while an operation waited (synchronous
    /// mode). The next command asks again.
    Undecided,
    /// The connection was lost after parts had been sent. The shard must be asked what it received.
    InDoubt,
    /// The shard has been asked.
    Querying,
    /// The shard has settled its share.
    Settled(Result<Outcome, Refusal>),
}

/// One shard's share of a push.
#[derive(Debug, Default)]
pub(super) struct PushShare {
    pub(super) link: usize,
    pub(super) parts: Vec<OutgoingPart>,
    /// The parts that are stored in a push buffer of the shard.
    pub(super) in_push_buffer: Option<PushBufferParts>,
    /// Whether those parts are referenced instead of sent: the push buffer belongs to the current
    /// connection.
    pub(super) uses_push_buffer: bool,
    /// How many parts have been sent over the current connection.
    pub(super) sent: usize,
    pub(super) push_slot: u32,
    pub(super) request: Option<RequestId>,
    /// When the last part was sent. The deadline in it covers the operations that waited then.
    pub(super) completed_at: Option<Instant>,
    /// The last part has been sent, and the shard has not denied having it.
    pub(super) whole: bool,
    pub(super) phase: SharePhase,
}

/// A pending push.
#[derive(Debug)]
pub(super) struct PendingPush {
    pub(super) operation: Operation,
    /// A gradient in synchronous mode: the step owner decides for all shards.
    pub(super) synchronous: bool,
    /// A gradient in asynchronous mode: no shard may apply it unless the step owner does.
    follows_owner: bool,
    pub(super) grant: Option<Grant>,
    pub(super) read: ReadPoint,
    pub(super) shares: Vec<PushShare>,
    /// No more parts will come.
    pub(super) complete: bool,
}

impl PendingPush {
    pub(super) fn unsettled(&self) -> impl Iterator<Item = usize> + '_ {
        let open =
            self.shares.iter().filter(|share| !matches!(share.phase, SharePhase::Settled(_)));
        open.map(|share| share.link)
    }

    /// Returns whether the step owner has applied the push; `None` without its outcome.
    fn is_applied_by(&self, owner: Option<usize>) -> Option<bool> {
        self.shares.iter().find_map(|share| match &share.phase {
            SharePhase::Settled(result) if Some(share.link) == owner => {
                Some(matches!(result, Ok(Outcome::Applied { .. })))
            }
            _ => None,
        })
    }

    /// Returns whether the step owner has rejected the push, so that no shard may apply it.
    pub(super) fn is_rejected_by(&self, owner: Option<usize>) -> bool {
        self.follows_owner && self.is_applied_by(owner) == Some(false)
    }

    /// Returns whether a shard may hold its whole share and has not settled it.
    pub(super) fn is_whole_somewhere(&self) -> bool {
        self.shares
            .iter()
            .any(|share| share.whole && !matches!(share.phase, SharePhase::Settled(_)))
    }

    /// Returns whether a shard may have counted the push, so that the others must count it too.
    pub(super) fn must_complete(&self) -> bool {
        !self.synchronous && self.may_be_whole()
    }

    /// Returns whether a shard may hold its whole share, so that it is too late to withdraw.
    fn may_be_whole(&self) -> bool {
        self.shares.iter().any(|share| match share.phase {
            SharePhase::Settled(Err(_)) => false,
            SharePhase::Settled(Ok(_)) => true,
            _ => share.whole,
        })
    }
}

impl Session {
    /// Gives a push its sequence number and keeps it until it is settled.
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
        let PushOrder { operation, grant, read, scattered, staged, parts } = order;
        let synchronous = self.synchronous && operation == (Operation::Gradient {});
        let follows_owner = !self.synchronous && operation == (Operation::Gradient {});
        let shares = Vec::new();
        let mut push =
            PendingPush { operation, synchronous, follows_owner, grant, read, shares, complete };
        self.add_parts(now, &mut push, staged, parts);
        if let Some(scattered) = scattered {
            self.add_scattered(now, &mut push, &scattered);
        }
        if operation == (Operation::Gradient {}) {
            // The owner counts the step when it applies its share, even an empty one.
            self.share(now, &mut push, self.config.owner);
        }
        if synchronous && let Some(plan) = self.plan.clone() {
            // A step is complete when every shard holds all of its pushes.
            plan.shards().iter().for_each(|&shard| _ = self.share(now, &mut push, shard));
        }
        self.pushes.insert(sequence, push);
        Ok(sequence)
    }

    fn add_parts(
        &mut self,
        now: Instant,
        push: &mut PendingPush,
        staged: Option<Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<OutgoingPart>)>,
    ) {
        for (shard, part) in staged.iter().flat_map(StagedParts::parts) {
            self.share(now, push, shard).parts.push(part);
        }
        for (shard, parts) in parts {
            self.share(now, push, shard).parts.extend(parts);
        }
    }

    fn add_scattered(
        &mut self,
        now: Instant,
        push: &mut PendingPush,
        scattered: &ScatteredGradients,
    ) {
        for (index, shard) in scattered.shards().enumerate() {
            let share = self.share(now, push, shard);
            share.in_push_buffer = scattered.in_push_buffer(index, share.parts.len());
            share.parts.extend(scattered.parts(index));
        }
    }

    fn share<'a>(
        &mut self,
        now: Instant,
        push: &'a mut PendingPush,
        shard: ShardId,
    ) -> &'a mut PushShare {
        let link = self.link_to(now, shard);
        if let Some(index) = push.shares.iter().position(|share| share.link == link) {
            return &mut push.shares[index];
        }
        push.shares.push(PushShare { link, ..PushShare::default() });
        let last = push.shares.len() - 1;
        &mut push.shares[last]
    }

    pub(super) fn more_parts(
        &mut self,
        now: Instant,
        sequence: Sequence,
        staged: Option<Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<OutgoingPart>)>,
    ) {
        let Some(mut push) = self.pushes.remove(&sequence) else {
            return;
        };
        self.add_parts(now, &mut push, staged, parts);
        self.pushes.insert(sequence, push);
        self.drive_push(now, sequence);
    }

    pub(super) fn end_push(&mut self, sequence: Sequence) {
        if let Some(push) = self.pushes.get_mut(&sequence) {
            push.complete = true;
        }
    }

    /// Sends what can be sent of a push now.
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

    fn drive_share(
        &mut self,
        now: Instant,
        sequence: Sequence,
        push: &mut PendingPush,
        index: usize,
    ) {
        let share = &mut push.shares[index];
        let link = share.link;
        if self.links[link].status != LinkStatus::Up {
            return;
        }
        let envelope = Envelope { sequence, ..Envelope::default() };
        let begins =
            matches!(share.phase, SharePhase::NoSlot | SharePhase::Sending) && !share.whole;
        if begins && push.is_rejected_by(self.owner_link()) {
            return;
        }
        let share = &mut push.shares[index];
        match share.phase {
            SharePhase::InDoubt => {
                share.phase = SharePhase::Querying;
                let pending = PendingRequest::PushState(sequence);
                self.send(now, link, pending, envelope, OutcomeQuery {}, FrameBody::Empty);
            }
            SharePhase::NoSlot if push.complete || !share.parts.is_empty() => {
                let push_buffer = self.links[link].push_buffer;
                let in_buffer = share
                    .in_push_buffer
                    .as_ref()
                    .filter(|in_buffer| Some(in_buffer.push_buffer) == push_buffer);
                share.uses_push_buffer = in_buffer.is_some();
                share.push_slot = match in_buffer {
                    Some(in_buffer) => in_buffer.push_slot,
                    None => std::mem::take(&mut self.links[link].push_slot),
                };
                if share.push_slot != 0 {
                    share.phase = SharePhase::Sending;
                    self.send_parts(now, sequence, push, index);
                } else {
                    share.phase = SharePhase::Reserving;
                    self.send(
                        now,
                        link,
                        PendingRequest::Reserve(sequence),
                        envelope,
                        Reserve {},
                        FrameBody::Empty,
                    );
                }
            }
            SharePhase::Sending => self.send_parts(now, sequence, push, index),
            _ => {}
        }
    }

    /// Returns whether a shard may receive the last part of a push, after which it may apply the
    /// push.
    ///
    /// A gradient goes to all shards at once if its token was granted after the shard's welcome.
    /// Before the owner takes such a token back, it makes the shard close the connection. Over a
    /// connection newer than the token, the owner's outcome comes first. It always comes first if
    /// the owner may reject gradients as stale.
    pub(super) fn may_complete_on(&self, push: &PendingPush, link: usize) -> bool {
        let owner = self.owner_link();
        if !push.follows_owner || Some(link) == owner {
            return true;
        }
        // The shard may have applied its whole share. Repeating the last part asks for the outcome.
        if push.shares.iter().any(|share| share.link == link && share.whole) {
            return true;
        }
        push.is_applied_by(owner).unwrap_or_else(|| {
            let granted_since = self.links[link].granted_since;
            let granted = push.grant.zip(granted_since);
            !self.owner_first && granted.is_some_and(|(grant, since)| grant.token >= since)
        })
    }

    /// Returns the shards whose answers a push waits for now.
    pub(super) fn awaited_by(&self, push: &PendingPush) -> Vec<usize> {
        push.unsettled().filter(|&link| self.may_complete_on(push, link)).collect()
    }

    /// Handles a push whose caller has given up. It is withdrawn if no shard can hold it whole.
    /// Otherwise it continues: a push counted by one shard must be counted by all.
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

    /// Withdraws the incomplete shares of a push that has ended.
    pub(super) fn withdraw_shares(&mut self, now: Instant, sequence: Sequence, push: &PendingPush) {
        for share in push.shares.iter().filter(|share| share.sent > 0 && !share.whole) {
            let settled = matches!(share.phase, SharePhase::Settled(_));
            if !settled && self.links[share.link].status == LinkStatus::Up {
                let envelope = Envelope { sequence, ..Envelope::default() };
                let pending = PendingRequest::Withdraw(share.request);
                self.send(now, share.link, pending, envelope, Withdraw {}, FrameBody::Empty);
            }
        }
    }
}

impl PushShare {
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(OutgoingPart::bytes).sum()
    }

    /// Returns whether this outcome can come now. Only a stale outcome can precede the last part.
    pub(super) fn awaits(&self, outcome: Outcome) -> bool {
        match self.phase {
            SharePhase::Sent => true,
            SharePhase::Sending => self.sent > 0 && matches!(outcome, Outcome::Stale { .. }),
            _ => false,
        }
    }

    /// Restarts a share that the shard does not have: a new push slot, and all parts again.
    pub(super) fn start_over(&mut self) {
        (self.sent, self.request, self.whole, self.phase) = (0, None, false, SharePhase::NoSlot);
        self.uses_push_buffer = false;
    }
}
